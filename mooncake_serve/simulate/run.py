"""One simulation: trace and profile in, report out.

Owns the typed face of the native simulator. A file that cannot be read or parsed, and an option
out of range, raise `ConfigError` with what to write instead.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from mooncake_serve.errors import ConfigError

ROUTERS = ("ours", "round-robin", "pow2", "longest-prefix", "ray-prefix", "dynamo", "mooncake")
POLICIES = ("ours", "lru", "arc", "s3fifo", "belady")
PROFILES = Path(__file__).parent / "profiles"
_native: Any = import_module("mooncake_serve._store").policy


@dataclass(frozen=True, slots=True)
class Options:
    """One configuration; the native simulator checks the ranges."""

    nodes: int = 8
    device_blocks: int = 0
    dram_blocks: int = 5860
    nvme_blocks: int = 0
    router: str = "ours"
    policy: str = "ours"
    speed: float = 1.0
    """Arrivals are this much faster than in the trace."""
    slo_s: float | None = None
    """Refuse requests whose predicted time to first token is longer; None refuses none."""
    hint_accuracy: float | None = None
    """Share of right hints (will a later request extend this one?); None gives no hints."""
    peers: bool = True
    """Nodes load from each other."""
    report_s: float = 0.02
    """Seconds between a node's load reports."""
    seed: int = 0
    slice: tuple[float, float] = (0.0, 1.0)
    """Part of the trace, as fractions of its requests."""
    series: bool = False
    """Report every request too."""

    def but(self, **changes: Any) -> Self:
        """These options with some changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class Profile:
    """What work costs on a node: a name and the JSON the native side reads."""

    name: str
    block_tokens: int
    text: str

    @classmethod
    def load(cls, profile: str) -> Self:
        """A profile by path, or by the name of one that ships with the package."""
        path = Path(profile)
        if not path.is_file() and (PROFILES / f"{profile}.json").is_file():
            path = PROFILES / f"{profile}.json"
        shipped = ", ".join(sorted(file.stem for file in PROFILES.glob("*.json")))
        try:
            text = path.read_text()
            fields = json.loads(text)
            return cls(str(fields["name"]), int(fields["block_tokens"]), text)
        except OSError as err:
            raise ConfigError("profile", f"{err}; give a file or one of {shipped}") from err
        except (ValueError, KeyError, TypeError) as err:
            raise ConfigError("profile", f"{path} is not a profile: {err!r}") from err


@dataclass(frozen=True, slots=True)
class Trace:
    """A parsed trace and the name to report it under."""

    name: str
    native: Any

    @classmethod
    def load(cls, path: Path, block_tokens: int) -> Self:
        """Read a trace in the Mooncake format, one JSON object a line."""
        try:
            return cls(path.name, _native.Trace.parse(path.read_text(), block_tokens))
        except (OSError, ValueError) as err:
            raise ConfigError("trace", str(err)) from err

    @classmethod
    def generate(
        cls, seed: int, requests: int, rate: float | None = None, block_tokens: int = 512
    ) -> Self:
        """A trace of the shape of a chat service; `rate` is requests a second."""
        try:
            native = _native.Trace.generate(seed, requests, rate, block_tokens)
        except ValueError as err:
            raise ConfigError("generate", str(err)) from err
        return cls(f"generated-{seed}", native)

    @property
    def requests(self) -> int:
        """How many requests it has."""
        return self.native.requests

    def text(self) -> str:
        """The trace in the Mooncake format."""
        return self.native.to_text()


def simulate(trace: Trace, profile: Profile, options: Options) -> dict[str, Any]:
    """Run one configuration. Deterministic; the keys are those of the native report."""
    try:
        return json.loads(trace.native.simulate(profile.text, json.dumps(asdict(options))))
    except ValueError as err:
        raise ConfigError("simulate", str(err)) from err
