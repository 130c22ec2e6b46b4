"""A store's start, which reserves memory and reads what is on disk, with its progress shown."""

from __future__ import annotations

import threading

from mooncake_serve._store import StoreServer
from mooncake_serve.progress import shown

POLL_S = 0.1
TITLES = {
    "reserving": "reserving memory for the store",
    "recovering": "looking for blocks on disk, by segments",
}


def start(server: StoreServer) -> None:
    """As `server.start()`, in this thread; raises what that raises."""
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(server, ended), name="start", daemon=True)
    watcher.start()
    try:
        server.start()
    finally:
        ended.set()
        watcher.join()


def _watch(server: StoreServer, ended: threading.Event) -> None:
    while not ended.wait(POLL_S):
        phase, _, total = server.starting
        if phase:
            _show(server, ended, phase, total)


def _show(server: StoreServer, ended: threading.Event, phase: str, total: int) -> None:
    """Until another phase begins."""
    with shown(TITLES[phase], total, size=phase == "reserving", announce=False) as show:
        now = phase
        while now == phase and not ended.wait(POLL_S):
            now, done, _ = server.starting
            if now == phase:
                show(done)
