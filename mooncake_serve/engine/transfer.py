"""Traffic between the pool and the store, off the engine's thread.

`Loader` reads blocks into the pool; `Publisher` puts completed blocks into the store. Both move
bytes with the GIL released while the engine computes. A block they touch is held by a reference
in the pool, so it is neither evicted nor reused until they report back through `done`, which runs
in their thread and must only post to the engine. The store never raises and answers within its
deadline, or it counts as a miss; nothing here can fail a request.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from mooncake_serve.engine.protocol import Backend
from mooncake_serve.engine.scheduler import Completed, Load

if TYPE_CHECKING:
    from mooncake_serve._store import BlockShape


class BlockStore(Protocol):
    """What the engine asks of a store; `mooncake_serve.store.NodeStore` is one.

    No method raises for a failure of the store: it becomes a miss or a refusal.
    """

    def match(self, keys: Sequence[bytes], tenant: str = "") -> int:
        """Length of the longest run of present blocks from the first key."""
        ...

    def read_into(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], tenant: str = ""
    ) -> int:
        """Fill the leading buffers with verified bytes; how many were filled."""
        ...

    def put(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None],
        buffers: Sequence[memoryview],
        shape: BlockShape,
        tenant: str = "",
    ) -> list[str]:
        """Store blocks; per block "stored", "present" or "refused: reason"."""
        ...


class Loader:
    """Reads matching blocks from the store into pool blocks, one load after another."""

    def __init__(
        self, store: BlockStore, backend: Backend, done: Callable[[Load, int], None]
    ) -> None:
        self._store = store
        self._backend = backend
        self._done = done
        self._queue: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-loader", daemon=True)
        self._thread.start()

    def start(self, load: Load) -> None:
        """Begin a load; `done(load, blocks)` follows."""
        self._queue.put(load)

    def close(self) -> None:
        """Finish what was started, then end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (load := self._queue.get()) is not None:
            self._done(load, 0 if load.sequence.ended else self._read(load))

    def _read(self, load: Load) -> int:
        tenant = load.sequence.request.tenant
        count = self._store.match(load.keys, tenant)
        if count == 0:
            return 0
        keys, blocks = load.keys[:count], load.blocks[:count]
        views = [self._backend.view_block(block) for block in blocks]
        in_place = [view for view in views if view is not None]
        if len(in_place) == count:
            return self._read_in_place(keys, in_place, tenant)
        staging = memoryview(bytearray(self._backend.layout.block_bytes))
        for index, (key, block) in enumerate(zip(keys, blocks, strict=True)):
            if self._store.read_into([key], [staging], tenant) == 0:
                return index
            self._backend.write_block(block, staging)
        return count

    def _read_in_place(
        self, keys: Sequence[bytes], views: Sequence[memoryview], tenant: str
    ) -> int:
        """Each read waits for blocks on their way here as long as it may; go on while they come."""
        read = 0
        while read < len(keys):
            more = self._store.read_into(keys[read:], views[read:], tenant)
            if more == 0:
                break
            read += more
        return read


class Publisher:
    """Puts completed blocks into the store; drops them when the store is slower than compute."""

    def __init__(
        self,
        store: BlockStore,
        backend: Backend,
        shape: BlockShape,
        done: Callable[[Completed], None],
        max_queued: int,
    ) -> None:
        self._store = store
        self._backend = backend
        self._shape = shape
        self._done = done
        self._max_queued = max_queued
        self._queue: deque[Completed] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.published = 0
        """Blocks the store took or had."""
        self.refused = 0
        self.dropped = 0
        """Blocks given up before they were put."""
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="kv-publisher", daemon=True)
        self._thread.start()

    def offer(self, block: Completed) -> bool:
        """Queue a block that the caller holds a reference to; False when the queue is full."""
        with self._changed:
            if len(self._queue) >= self._max_queued:
                self.dropped += 1
                return False
            self._queue.append(block)
            self._changed.notify_all()
            return True

    def take_back(self) -> Completed | None:
        """Give up the newest queued block, so that the pool may reuse it."""
        with self._changed:
            if not self._queue:
                return None
            self.dropped += 1
            return self._queue.pop()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything queued was put; False when it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._busy, timeout_s)

    def close(self) -> None:
        """End after the put in progress; queued blocks are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while (block := self._next()) is not None:
            # A hit in the pool keeps the store's copy fresh; only a lost one is sent again.
            if not (block.again and self._store.match([block.key], block.tenant)):
                self._put(block)
            self._done(block)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _put(self, block: Completed) -> None:
        data = self._backend.read_block(block.block)
        tenant = block.tenant
        answer = self._store.put([block.key], [block.parent], [data], self._shape, tenant)
        if answer[0] in {"stored", "present"}:
            self.published += 1
        else:
            self.refused += 1

    def _next(self) -> Completed | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or bool(self._queue))
            if self._closing:
                return None
            self._busy = True
            return self._queue.popleft()
