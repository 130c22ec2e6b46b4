"""Keeps the board's planner attached to the cluster index of the node's store.

The index is a mapping, so nothing has to be polled but whether it is still the right one: a store
that restarts has a new one, and so has a store whose index outgrew the old. While the store is
away the planner goes without: it then knows of no cached block.
"""

from __future__ import annotations

import logging
import threading
import time

from mooncake_serve.errors import StoreError
from mooncake_serve.router.board import Board
from mooncake_serve.store import NodeStore

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05


def follow_index(board: Board, store: NodeStore | None) -> None:
    """Attach `board` to the index of `store`, now and whenever it changes, on a thread."""
    if store is None:
        return
    _attach(board, store, None)
    threading.Thread(
        target=_follow, args=(board, store), name="index-follower", daemon=True
    ).start()


def _follow(board: Board, store: NodeStore) -> None:
    epoch = store.epoch
    while not store.closed:
        time.sleep(LOOK_EVERY_S)
        epoch = _attach(board, store, epoch)


def _attach(board: Board, store: NodeStore, epoch: int | None) -> int | None:
    """Give the planner the index if it needs it; the epoch it belongs to."""
    planner = board.planner
    if not store.healthy:
        if not planner.wants_view:
            planner.set_view(None)
        return None
    if epoch == store.epoch and not planner.wants_view:
        return epoch
    attached = store.epoch
    try:
        store.lend(planner.set_view)
    except StoreError as err:
        log.warning("planning without the cluster index: %s", err)
        return None
    return attached
