"""How much one tenant may ask: requests a minute and requests at once. Pure: time is an argument.

Limits are those of one ingress. A refusal says when to come back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from mooncake_serve.errors import RateLimited

TENANTS_MAX = 10_000
BUSY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """None means no limit."""

    requests_per_minute: int | None = None
    concurrency: int | None = None


@dataclass(slots=True)
class Use:
    """What a tenant has used."""

    allowance: float
    """Requests it may start now; grows with time up to a minute's worth."""
    updated_s: float
    running: int = 0
    requests: int = 0
    refused: int = 0


class Limiter:
    """The use of every tenant that was seen lately."""

    def __init__(self) -> None:
        self._uses: OrderedDict[str, Use] = OrderedDict()

    def enter(self, tenant: str, limits: Limits, now_s: float) -> None:
        """A request begins. Raises RateLimited; then `leave` must not be called."""
        use = self._use(tenant, limits, now_s)
        if limits.concurrency is not None and use.running >= limits.concurrency:
            use.refused += 1
            raise RateLimited(
                f"{use.running} requests of yours run already, and that many may",
                retry_after_s=BUSY_RETRY_S,
            )
        if limits.requests_per_minute is not None:
            rate = limits.requests_per_minute / 60
            grown = use.allowance + (now_s - use.updated_s) * rate
            use.allowance = min(grown, float(limits.requests_per_minute))
            use.updated_s = now_s
            if use.allowance < 1:
                use.refused += 1
                raise RateLimited(
                    f"you may send {limits.requests_per_minute} requests a minute",
                    retry_after_s=(1 - use.allowance) / rate,
                )
            use.allowance -= 1
        use.running += 1
        use.requests += 1

    def leave(self, tenant: str) -> None:
        """A request that entered has ended."""
        self._uses[tenant].running -= 1

    def uses(self) -> dict[str, Use]:
        """What each tenant has used since it was first seen."""
        return dict(self._uses)

    def _use(self, tenant: str, limits: Limits, now_s: float) -> Use:
        use = self._uses.get(tenant)
        if use is None:
            use = Use(float(limits.requests_per_minute or 0), now_s)
            self._uses[tenant] = use
            self._forget()
        self._uses.move_to_end(tenant)
        return use

    def _forget(self) -> None:
        idle = (name for name, use in self._uses.items() if use.running == 0)
        while len(self._uses) > TENANTS_MAX and (oldest := next(idle, None)) is not None:
            del self._uses[oldest]
            idle = (name for name, use in self._uses.items() if use.running == 0)
