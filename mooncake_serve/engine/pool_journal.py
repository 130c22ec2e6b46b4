"""What changed in the pool since somebody asked, for the routers. Thread-safe.

The engine's thread notes, another takes. A key that came and went meanwhile counts as it ended.
"""

from __future__ import annotations

import threading


class PoolJournal:
    """Notes nothing before the first `take`, so that without a reader it stays empty."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = False
        self._held: set[bytes] = set()
        self._changes: dict[bytes, bool] = {}

    def note(self, key: bytes, here: bool) -> None:
        """The block of `key` is in the pool from now on, or no longer."""
        with self._lock:
            if here:
                self._held.add(key)
            else:
                self._held.discard(key)
            if self._read:
                self._changes[key] = here

    def take(self, *, everything: bool = False) -> tuple[list[bytes], list[bytes]]:
        """Keys that came and keys that went since the last call; or all that are held."""
        with self._lock:
            changes, self._changes = self._changes, {}
            if everything or not self._read:
                self._read = True
                return list(self._held), []
        came = [key for key, here in changes.items() if here]
        return came, [key for key, here in changes.items() if not here]
