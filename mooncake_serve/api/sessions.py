"""Which replica answered a session last. A hint, bounded, forgotten least recently used first."""

from __future__ import annotations

from collections import OrderedDict

SESSIONS_MAX = 10_000


class Sessions:
    """The last replica of each session of each tenant."""

    def __init__(self, limit: int = SESSIONS_MAX) -> None:
        self._limit = limit
        self._replicas: OrderedDict[tuple[str, str], str] = OrderedDict()

    def last(self, tenant: str, session: str | None) -> str | None:
        """The replica, if the session is known."""
        return self._replicas.get((tenant, session)) if session is not None else None

    def answered(self, tenant: str, session: str | None, replica: str) -> None:
        """This replica answers it now."""
        if session is None:
            return
        self._replicas[tenant, session] = replica
        self._replicas.move_to_end((tenant, session))
        if len(self._replicas) > self._limit:
            self._replicas.popitem(last=False)
