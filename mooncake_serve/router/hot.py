"""Which beginnings of prompts come most often, by key, in bounded memory.

`HotKeys` keeps `KEYS` counters and gives the smallest to a new key (the space-saving sketch): a
count is too high by the smallest at most, and what is truly frequent is never lost. The smallest
comes from a heap with one entry for each key, which is brought up to date when it is on top:
counting a known key costs nothing there, a new one O(log KEYS) amortised.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import Any

KEYS = 512
SHOWN_CHARS = 16
"""Hexadecimal digits of a key: enough to tell keys apart, too few to ask a store with."""


@dataclass(slots=True)
class _Count:
    requests: int
    tokens: int = 0


class HotKeys:
    """Requests by the key of their first block."""

    def __init__(self) -> None:
        self._counts: dict[bytes, _Count] = {}
        self._rarest: list[tuple[int, int, bytes]] = []
        """Requests at some time, the key's place in time, the key."""
        self._ages = itertools.count()

    def count(self, key: bytes, cached_tokens: int) -> None:
        """One more request that begins so, of which so many tokens were found."""
        known = self._counts.get(key)
        if known is None:
            floor = self._drop_rarest() if len(self._counts) >= KEYS else 0
            known = self._counts[key] = _Count(floor)
            heapq.heappush(self._rarest, (floor + 1, next(self._ages), key))
        known.requests += 1
        known.tokens = max(known.tokens, cached_tokens)

    def _drop_rarest(self) -> int:
        """Forget the key with the fewest requests, of equals the oldest: how many it had."""
        while True:
            requests, age, key = self._rarest[0]
            now = self._counts[key].requests
            if now == requests:
                heapq.heappop(self._rarest)
                del self._counts[key]
                return requests
            heapq.heapreplace(self._rarest, (now, age, key))

    def top(self, count: int) -> list[dict[str, Any]]:
        """The most frequent, most frequent first, with the longest prefix found for each."""
        rows = sorted(self._counts.items(), key=lambda row: row[1].requests, reverse=True)
        return [
            {"key": key.hex()[:SHOWN_CHARS], "requests": one.requests, "cached_tokens": one.tokens}
            for key, one in rows[:count]
        ]
