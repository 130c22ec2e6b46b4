"""A replica tells its node's store, and through it every router, how busy it is and what its pool
holds.

One thread looks at the engine's snapshot and reports what changed, at most 50 times a second, and
at least once a second as a sign of life. The way is one-way and lossy: a report that cannot be
sent is one the routers do without. A store that is met anew, or may have taken the replica for
dead, is told everything.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from mooncake_serve.engine.protocol import Engine
from mooncake_serve.store import NodeStore

EVERY_S = 0.02
SIGN_OF_LIFE_S = 1.0
TAKEN_FOR_DEAD_S = 5.0
"""Half of the silence after which stores forget a replica."""


class LoadReporter:
    """Reports from construction to `close`."""

    def __init__(self, replica: str, engine: Engine, store: NodeStore) -> None:
        self._replica = replica
        self._engine = engine
        self._store = store
        self._told: int | None = None
        """Which connection to a store has been told everything up to now."""
        self._load: dict[str, Any] = {}
        self._reported_at = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load-report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the replica out of the routers' sight, and end."""
        self._ended.set()
        self._thread.join(timeout=SIGN_OF_LIFE_S)
        self._store.report(self._replica, accepting=False)

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self._report(time.monotonic())

    def _report(self, now: float) -> None:
        if not self._store.healthy:
            self._told = None
            return
        connection = self._store.stats().connects
        silent_s = now - self._reported_at
        anew = connection != self._told or silent_s > TAKEN_FOR_DEAD_S
        load = self._measure()
        # The load first: a store ignores the pool of a replica without one.
        if anew or load != self._load or silent_s >= SIGN_OF_LIFE_S:
            self._store.report(self._replica, **load)
            self._load, self._reported_at = load, now
        came, went = self._engine.pool_changes(everything=anew)
        if anew or came or went:
            told = self._store.report_pool(self._replica, came, went, anew=anew)
            self._told = connection if told else None

    def _measure(self) -> dict[str, Any]:
        stats = self._engine.stats()
        return {
            "prefill_tokens": stats.outstanding_prefill_tokens,
            "waiting": min(stats.waiting, 0xFFFF),
            "running": min(stats.running, 0xFFFF),
            "free_blocks": stats.pool_free_blocks,
            "prefill": (0.0, stats.prefill_token_s, stats.prefill_attention_s),
            "load_bytes_per_s": self._store.read_bytes_per_s,
        }
