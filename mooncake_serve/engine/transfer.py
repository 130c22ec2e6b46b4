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
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from mooncake_serve import tracing
from mooncake_serve.engine.protocol import Backend, LayeredBackend, LayerGate
from mooncake_serve.engine.scheduler import Completed, Load

if TYPE_CHECKING:
    from mooncake_serve._store import BlockShape, Hint


class Reading(Protocol):
    """Leading present blocks on their way into buffers; `_store.Reading` is one."""

    def __len__(self) -> int:
        """Blocks that can still be read."""
        ...

    def read_planes(self, first: int, end: int) -> int:
        """Copy planes [first, end) of every block, verified; how many leading blocks are left."""
        ...


class BlockStore(Protocol):
    """What the engine asks of a store; `mooncake_serve.store.NodeStore` is one.

    No method raises for a failure of the store: it becomes a miss or a refusal.
    """

    def match(self, keys: Sequence[bytes], tenant: str = "") -> int:
        """Length of the longest run of present blocks from the first key."""
        ...

    def read_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        tenant: str = "",
        hint: Hint | None = None,
        threads: int = 1,
    ) -> int:
        """Fill the leading buffers with verified bytes; how many were filled."""
        ...

    def open(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        tenant: str = "",
        hint: Hint | None = None,
        threads: int = 1,
    ) -> AbstractContextManager[Reading | None]:
        """Leading present blocks, to be read plane by plane; None when the store is away."""
        ...

    def put(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None],
        buffers: Sequence[memoryview],
        shape: BlockShape,
        tenant: str = "",
        hint: Hint | None = None,
    ) -> list[str]:
        """Store blocks; per block "stored", "present" or "refused: reason"."""
        ...


class Loader:
    """Reads matching blocks from the store into pool blocks, one load after another.

    A load takes all `threads`, as a forward does: who waits for it waits for nothing else.
    """

    def __init__(
        self,
        store: BlockStore,
        backend: Backend,
        threads: int,
        begun: Callable[[Load, LayerGate], None],
        done: Callable[[Load, int], None],
    ) -> None:
        self._store = store
        self._backend = backend
        self._threads = threads
        self._begun = begun
        self._done = done
        self._staging: memoryview | None = None
        """Where blocks are decoded on their way to a device; made once, as pinning is slow."""
        self._queue: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-loader", daemon=True)
        self._thread.start()

    def start(self, load: Load) -> None:
        """Begin a load; `done(load, blocks)` follows.

        Before it may come `begun(load, gate)`: all blocks are in the store, and the first layer has
        arrived. The gate then fails if `done` will report fewer blocks.
        """
        self._queue.put(load)

    def close(self) -> None:
        """Finish what was started, then end."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (load := self._queue.get()) is not None:
            self._done(load, 0 if load.sequence.ended else self._read(load))

    def _read(self, load: Load) -> int:
        parent = load.sequence.request.traceparent
        with (
            tracing.span("store.load", parent, asked_blocks=len(load.keys)) as note,
            tracing.under(note.traceparent),
        ):
            loaded = self._read_blocks(load)
            note.set(loaded_blocks=loaded)
            return loaded

    def _read_blocks(self, load: Load) -> int:
        count = self._store.match(load.keys, load.sequence.request.tenant)
        if count == 0:
            return 0
        keys, blocks = load.keys[:count], load.blocks[:count]
        views = [self._backend.view_block(block) for block in blocks]
        in_place = [view for view in views if view is not None]
        if len(in_place) == count:
            return self._read_in_place(load, keys, in_place)
        return self._read_staged(load, keys)

    def _read_staged(self, load: Load, keys: Sequence[bytes]) -> int:
        if self._staging is None:
            self._staging = self._backend.make_staging()
        staging, request = [self._staging], load.sequence.request
        for index, (key, block) in enumerate(zip(keys, load.blocks, strict=False)):
            if self._store.read_into([key], staging, request.tenant, request.hint) == 0:
                return index
            self._backend.write_block(block, self._staging)
        return len(keys)

    def _read_in_place(self, load: Load, keys: Sequence[bytes], views: Sequence[memoryview]) -> int:
        """Each read waits for blocks on their way here as long as it may; go on while they come."""
        read, request = 0, load.sequence.request
        if len(keys) == len(load.keys) and isinstance(self._backend, LayeredBackend):
            read = self._read_layers(load, views, self._backend.make_gate())
        while read < len(keys):
            more = self._store.read_into(
                keys[read:], views[read:], request.tenant, request.hint, self._threads
            )
            if more == 0:
                break
            read += more
        return read

    def _read_layers(self, load: Load, views: Sequence[memoryview], gate: LayerGate) -> int:
        """Layer by layer; whatever happens, the forward behind the gate does not wait for ever."""
        wanted = left = len(views)
        request = load.sequence.request
        try:
            with self._store.open(
                load.keys, views, request.tenant, request.hint, self._threads
            ) as reading:
                for layer in range(self._backend.layout.layers):
                    left = 0 if reading is None else reading.read_planes(2 * layer, 2 * layer + 2)
                    if left < wanted:
                        gate.fail()
                        continue
                    gate.open(layer + 1)
                    if layer == 0:
                        self._begun(load, gate)
        except BaseException:
            gate.fail()
            raise
        return left


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
            with tracing.under(block.traceparent):
                # A hit in the pool keeps the store's copy fresh; only a lost one is sent again.
                if not (block.again and self._store.match([block.key], block.tenant)):
                    self._put(block)
            self._done(block)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _put(self, block: Completed) -> None:
        data = self._backend.read_block(block.block)
        answer = self._store.put(
            [block.key], [block.parent], [data], self._shape, block.tenant, block.hint
        )
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
