"""Which beginnings of prompts come most often, by key, in bounded memory.

`HotKeys` keeps `KEYS` counters and gives the smallest to a new key (the space-saving sketch): a
count is too high by the smallest at most, and what is truly frequent is never lost.
"""

from __future__ import annotations

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

    def count(self, key: bytes, cached_tokens: int) -> None:
        """One more request that begins so, of which so many tokens were found."""
        known = self._counts.get(key)
        if known is None:
            floor = 0
            if len(self._counts) >= KEYS:
                rarest = min(self._counts, key=lambda one: self._counts[one].requests)
                floor = self._counts.pop(rarest).requests
            known = self._counts[key] = _Count(floor)
        known.requests += 1
        known.tokens = max(known.tokens, cached_tokens)

    def top(self, count: int) -> list[dict[str, Any]]:
        """The most frequent, most frequent first, with the longest prefix found for each."""
        rows = sorted(self._counts.items(), key=lambda row: row[1].requests, reverse=True)
        return [
            {"key": key.hex()[:SHOWN_CHARS], "requests": one.requests, "cached_tokens": one.tokens}
            for key, one in rows[:count]
        ]
