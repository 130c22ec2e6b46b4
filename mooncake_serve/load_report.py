"""A replica tells its node's store, and through it every router, how busy it is.

One thread looks at the engine's snapshot and reports what changed, at most 50 times a second, and
at least once a second as a sign of life. The way is one-way and lossy: a report that cannot be
sent is one the routers do without.
"""

from __future__ import annotations

import threading
from typing import Any

from mooncake_serve.engine.protocol import Engine
from mooncake_serve.store import NodeStore

EVERY_S = 0.02
SIGN_OF_LIFE_S = 1.0


class LoadReporter:
    """Reports from construction to `close`."""

    def __init__(self, replica: str, engine: Engine, store: NodeStore) -> None:
        self._replica = replica
        self._engine = engine
        self._store = store
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load-report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the replica out of the routers' sight, and end."""
        self._ended.set()
        self._thread.join(timeout=SIGN_OF_LIFE_S)
        self._store.report(self._replica, accepting=False)

    def _run(self) -> None:
        last: dict[str, Any] = {}
        silent = 0
        while not self._ended.wait(EVERY_S):
            load = self._load()
            silent += 1
            if load != last or silent * EVERY_S >= SIGN_OF_LIFE_S:
                self._store.report(self._replica, **load)
                last, silent = load, 0

    def _load(self) -> dict[str, Any]:
        stats = self._engine.stats()
        return {
            "prefill_tokens": stats.outstanding_prefill_tokens,
            "waiting": min(stats.waiting, 0xFFFF),
            "running": min(stats.running, 0xFFFF),
            "free_blocks": stats.pool_free_blocks,
            "prefill": (0.0, stats.prefill_token_s, stats.prefill_attention_s),
            "load_bytes_per_s": self._store.read_bytes_per_s,
        }
