"""API keys at rest: one JSON file of hashes, written whole and renamed into place.

A key is `mk-<id>-<secret>`. The secret is 256 random bits, so one SHA-256 is as good a hash as a
slow one; it is shown once and never stored. The id finds the record, the hash is compared in
constant time, and an unknown id costs the same. The file is read again when it changes, so a
revoked key stops working within a second. A file that cannot be read keeps nobody in: loading
fails with ConfigError, and a running server refuses every key until the file is whole again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import secrets
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from mooncake_serve.durable import place
from mooncake_serve.errors import ConfigError, Unauthorized

RELOAD_S = 1.0
_NO_HASH = "0" * 64

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Key:
    """What is known of a key. Limits of None take the configuration's."""

    id: str
    tenant: str
    sha256: str
    created: int
    requests_per_minute: int | None = None
    concurrency: int | None = None


_KEYS = TypeAdapter(list[Key])


def load(path: Path) -> dict[str, Key]:
    """Keys by id. Raises ConfigError."""
    try:
        keys = _KEYS.validate_json(path.read_bytes())
    except OSError as err:
        raise ConfigError(
            "api.keys_file", f"{path}: {err.strerror}; make it with `mooncake-serve keys create`"
        ) from err
    except ValidationError as err:
        raise ConfigError("api.keys_file", f"{path}: {err.errors()[0]['msg']}") from err
    return {key.id: key for key in keys}


def create(
    path: Path,
    tenant: str,
    *,
    requests_per_minute: int | None = None,
    concurrency: int | None = None,
) -> str:
    """Add a key to the file, which may not exist yet: the key, to be shown once."""
    keys = load(path) if path.exists() else {}
    number = secrets.token_hex(4)
    key = f"mk-{number}-{secrets.token_urlsafe(32)}"
    keys[number] = Key(
        number, tenant, _digest(key), int(time.time()), requests_per_minute, concurrency
    )
    _save(path, keys)
    return key


def revoke(path: Path, key_id: str) -> None:
    """Remove a key. Raises ConfigError when it is not there."""
    keys = load(path)
    if keys.pop(key_id, None) is None:
        raise ConfigError("", f"{path} has no key {key_id!r}; see `mooncake-serve keys list`")
    _save(path, keys)


def _save(path: Path, keys: dict[str, Key]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([asdict(key) for key in keys.values()], indent=1)
    # Readable by its owner alone.
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
    ) as file:
        file.write(text + "\n")
        place(file, path)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


class KeyRing:
    """The keys of a running server."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be used."""
        self._path = path
        self._keys = load(path)
        self._stamp = self._now()
        self._checked = time.monotonic()

    def authenticate(self, key: str) -> Key:
        """The record of a key. Raises Unauthorized."""
        self._follow()
        parts = key.split("-", 2)
        known = self._keys.get(parts[1]) if len(parts) == 3 and parts[0] == "mk" else None
        right = hmac.compare_digest(_digest(key), known.sha256 if known else _NO_HASH)
        if known is None or not right:
            raise Unauthorized("unknown API key", code="invalid_api_key")
        return known

    def of(self, tenant: str) -> list[Key]:
        """The records of a tenant's keys."""
        self._follow()
        return [key for key in self._keys.values() if key.tenant == tenant]

    def reload(self) -> int:
        """Read the file now: how many keys it has. Raises ConfigError, and then knows none."""
        self._stamp = self._now()
        self._keys = {}
        self._keys = load(self._path)
        return len(self._keys)

    def _follow(self) -> None:
        if time.monotonic() - self._checked < RELOAD_S:
            return
        self._checked = time.monotonic()
        if self._now() != self._stamp:
            try:
                self.reload()
            except ConfigError as err:
                log.error("every key is refused: %s", err)

    def _now(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino
