"""The decision, pure: expected time to first token of each replica, and the smallest.

    TTFT = queue + min over usable prefix p of [load(p, tier) + prefill(length, p)]

`queue` is the prefill work a replica has been given and not finished, and what the answers under
way take from it. Costs start from a guess; what a prefill costs follows what requests report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mooncake_serve.router.prefix import Prefix, Tier

SMOOTHING = 0.2
"""Weight of a new observation in the running averages."""
OBSERVED_TOKENS_MIN = 64
"""A shorter prefill says more of a request's fixed cost than of the cost of a token."""


@dataclass(slots=True)
class Costs:
    """What work costs: seconds per token, and per answer under way."""

    prefill_s: float = 1e-3
    load_s: dict[Tier, float] = field(default_factory=lambda: {"dram": 1e-5})
    decode_s: float = 2e-3
    """What each answer under way adds to the wait for a first token."""

    def observe(self, computed_tokens: int, loaded_tokens: int, service_s: float) -> None:
        """Learn from one request that waited for nobody: its tokens and its time to first token."""
        if computed_tokens < OBSERVED_TOKENS_MIN:
            return
        spent = max(0.0, service_s - loaded_tokens * self.load_s["dram"])
        self.prefill_s += SMOOTHING * (spent / computed_tokens - self.prefill_s)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Work a replica has been given: prompt tokens to compute, and answers that have not ended."""

    prefill_tokens: int = 0
    active: int = 0


class Score(NamedTuple):
    """Why a replica was chosen. Seconds; `matched_tokens` are loaded instead of computed."""

    queue_s: float
    load_s: float
    prefill_s: float
    matched_tokens: int

    @property
    def ttft_s(self) -> float:
        """Expected time to first token."""
        return self.queue_s + self.load_s + self.prefill_s


def score(length: int, prefixes: Sequence[Prefix], load: ReplicaLoad, costs: Costs) -> Score:
    """Expected time to first token of a prompt of `length` tokens on one replica.

    Loading is linear in the prefix, so the best use of each is all of it or nothing.
    """
    queue_s = load.prefill_tokens * costs.prefill_s + load.active * costs.decode_s
    return min(
        (
            Score(
                queue_s,
                prefix.tokens * costs.load_s[prefix.tier],
                (length - prefix.tokens) * costs.prefill_s,
                prefix.tokens,
            )
            for prefix in (*prefixes, Prefix(0))
        ),
        key=lambda option: option.ttft_s,
    )


def choose(
    length: int,
    prefixes: Mapping[str, Sequence[Prefix]],
    loads: Mapping[str, ReplicaLoad],
    costs: Costs,
    pick: Callable[[list[str]], str],
) -> tuple[str, Score]:
    """The replica with the smallest expected time to first token; `pick` breaks ties.

    `prefixes` is by replica; one that is absent has none. Raises ValueError without replicas.
    """
    if not loads:
        raise ValueError("no replica to choose from")
    scores = {
        name: score(length, prefixes.get(name, ()), load, costs) for name, load in loads.items()
    }
    best = min(option.ttft_s for option in scores.values())
    chosen = pick([name for name, option in scores.items() if option.ttft_s == best])
    return chosen, scores[chosen]
