"""What the router decided lately and how it turned out, in bounded memory: for the dashboard.

Pure: time is an argument (seconds since the epoch, ascending). Used from the ingress's event loop
only. Holds the last `DECISIONS` decisions and `BUCKETS` intervals of `BUCKET_S`; no prompt, no
tenant.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from mooncake_serve.router.hot import HotKeys

DECISIONS = 100
BUCKET_S = 10.0
BUCKETS = 180
TTFTS_PER_BUCKET = 256


@dataclass(slots=True)
class Decision:
    """One planned request: what was expected, and what came of it."""

    request_id: str
    at: float
    prompt_tokens: int
    replica: str
    reason: str
    """Why that one; a `Reason` of the gateway."""
    queue_s: float
    load_s: float
    prefill_s: float
    matched_tokens: int
    ttft_s: float | None = None
    cached_tokens: int | None = None

    def become(self, **route: Any) -> None:
        """The request went by another plan, or to another replica: fields of that."""
        for name, value in route.items():
            setattr(self, name, value)


@dataclass(slots=True)
class _Bucket:
    start: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)


class Journal:
    """Bounded history of one ingress."""

    def __init__(self) -> None:
        self._decisions: deque[Decision] = deque(maxlen=DECISIONS)
        self._buckets: deque[_Bucket] = deque(maxlen=BUCKETS)
        self.hot = HotKeys()
        self.saved_prefill_s = 0.0

    def planned(self, decision: Decision, prefix: bytes | None) -> None:
        """A request was given to a replica; `prefix` is the key of its first whole block."""
        self._decisions.append(decision)
        if prefix is not None:
            self.hot.count(prefix, decision.matched_tokens)

    def answered(self, decision: Decision, ttft_s: float, cached_tokens: int, now: float) -> None:
        """It ended well; `ttft_s` is from the plan to the first token."""
        decision.ttft_s, decision.cached_tokens = ttft_s, cached_tokens
        bucket = self._bucket(now)
        bucket.prompt_tokens += decision.prompt_tokens
        bucket.cached_tokens += cached_tokens
        if len(bucket.ttfts) < TTFTS_PER_BUCKET:
            bucket.ttfts.append(ttft_s)

    def decisions(self) -> list[dict[str, Any]]:
        """The last decisions, newest first."""
        return [asdict(one) for one in reversed(self._decisions)]

    def history(self) -> list[dict[str, Any]]:
        """The intervals in which requests ended, oldest first; quantiles of TTFT in seconds."""
        return [
            {
                "at": bucket.start,
                "prompt_tokens": bucket.prompt_tokens,
                "cached_tokens": bucket.cached_tokens,
                "ttft_p50_s": _quantile(bucket.ttfts, 0.5),
                "ttft_p95_s": _quantile(bucket.ttfts, 0.95),
            }
            for bucket in self._buckets
        ]

    def _bucket(self, now: float) -> _Bucket:
        start = now - now % BUCKET_S
        if not self._buckets or self._buckets[-1].start < start:
            self._buckets.append(_Bucket(start))
        return self._buckets[-1]


def _quantile(values: list[float], share: float) -> float | None:
    if not values:
        return None
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
