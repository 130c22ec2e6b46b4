"""The engine's view of the node's store: it can only help.

`NodeStore` owns one `StoreClient` and a watcher thread. No call raises because of the store, and
none takes longer than its own deadline: a store that is dead, hung, full or restarted is a miss and
a counter. The first failed call opens the circuit (later calls miss at once, without touching the
socket); the watcher reconnects with a jittered, growing pause, and the circuit closes.

The watcher also pings the store on a connection of its own, so that a busy client is never taken
for a hung store. A supervisor reads `server_pid` and `seconds_unresponsive` and decides about
killing.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from mooncake_serve import tracing
from mooncake_serve._store import BlockShape, Hint, Reading, StoreClient
from mooncake_serve.errors import StoreError, StoreRefused, StoreTimeout, StoreUnavailable

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

log = logging.getLogger(__name__)

MATCH_TIMEOUT_S = 0.05
PUT_TIMEOUT_S = 2.0
READ_TIMEOUT_MIN_S = 0.25
READ_BYTES_PER_S_MIN = 0.5e9
"""A read that runs slower than this is given up: recomputing is then the better bet."""
RATES_KEPT = 16
"""Reads that the measured rate looks back on."""

_PING_EVERY_S = 1.0
_PING_TIMEOUT_S = 1.0
_CONNECT_TIMEOUT_S = 0.5
_PAUSE_MIN_S = 0.05
_PAUSE_MAX_S = 2.0


@dataclass(frozen=True, slots=True)
class NodeStoreStats:
    """What the store did for this process, and how often it could not."""

    healthy: bool = False
    matches: int = 0
    matched_blocks: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    stored_blocks: int = 0
    present_blocks: int = 0
    refused_blocks: int = 0
    timeouts: int = 0
    errors: int = 0
    skipped: int = 0
    """Calls answered as a miss while the circuit was open."""
    connects: int = 0
    epoch_changes: int = 0
    seconds_unresponsive: float = 0.0


class NodeStore:
    """match, read_into and put on the node's store, without its failures. Thread-safe.

    `socket` need not exist yet: the store is attached when it appears.
    """

    def __init__(self, socket: str, *, ingest_bytes: int = 64 << 20) -> None:
        self.socket = socket
        self._ingest_bytes = ingest_bytes
        self._lock = threading.Lock()
        self._stats = NodeStoreStats()
        self._client: StoreClient | None = None
        self._control: StoreClient | None = None
        self._server_pid: int | None = None
        self._epoch: int | None = None
        self._first_missed_ping: float | None = None
        self._failures = 0
        self._read_rates: deque[float] = deque(maxlen=RATES_KEPT)
        self._last_warning = ""
        self._closed = False
        self._wake = threading.Event()
        self._attached = threading.Event()
        self._attach()
        self._watcher = threading.Thread(target=self._watch, name="store-watcher", daemon=True)
        self._watcher.start()

    def match(self, keys: Sequence[bytes], tenant: str = "") -> int:
        """How many of `keys`, from the first, the store holds; 0 when it cannot say in 50 ms."""
        with tracing.span("store.match", asked_blocks=len(keys)) as note:
            matched = self._call(
                lambda client: client.match(keys, tenant, timeout_s=MATCH_TIMEOUT_S)
            )
            note.set(matched_blocks=matched or 0)
        self._count(matches=1, matched_blocks=matched or 0)
        return matched or 0

    def read_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        tenant: str = "",
        hint: Hint | None = None,
        threads: int = 1,
    ) -> int:
        """Leading blocks copied into `buffers` and verified; buffers after them hold garbage.

        Gives up after max(0.25 s, bytes / 0.5 GB/s).
        """
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        timeout_s = max(READ_TIMEOUT_MIN_S, sum(sizes) / READ_BYTES_PER_S_MIN)
        with tracing.span("store.read", asked_blocks=len(keys)) as note:
            origins: dict[str, int] | None = {} if note.traceparent else None
            begun = time.monotonic()
            read = self._call(
                lambda client: client.read_into(
                    keys,
                    buffers,
                    tenant,
                    hint=hint,
                    threads=threads,
                    timeout_s=timeout_s,
                    origins=origins,
                )
            )
            self._note_read(note, read or 0, sizes, begun, origins)
        return read or 0

    @contextmanager
    def open(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[Buffer],
        tenant: str = "",
        hint: Hint | None = None,
        threads: int = 1,
    ) -> Iterator[Reading | None]:
        """Leading present blocks, to be read plane by plane; None without a store.

        Gives up when `read_into` would.
        """
        sizes = [memoryview(buffer).nbytes for buffer in buffers]
        timeout_s = max(READ_TIMEOUT_MIN_S, sum(sizes) / READ_BYTES_PER_S_MIN)
        with tracing.span("store.read", asked_blocks=len(keys)) as note:
            reading = self._call(
                lambda client: client.open(
                    keys, buffers, tenant, hint=hint, threads=threads, timeout_s=timeout_s
                )
            )
            if reading is None:
                yield None
                return
            with reading:
                begun = time.monotonic()
                yield reading
                origins = reading.origins() if note.traceparent else None
                self._note_read(note, len(reading), sizes, begun, origins)

    def _note_read(
        self,
        note: tracing.Note,
        blocks: int,
        sizes: Sequence[int],
        begun: float,
        origins: Mapping[str, int] | None,
    ) -> None:
        """Count what was read since `begun`, here and on its span."""
        read_bytes = sum(sizes[:blocks])
        if read_bytes:
            self._read_rates.append(read_bytes / (time.monotonic() - begun))
        self._count(read_blocks=blocks, read_bytes=read_bytes)
        tiers = {f"{tier}_blocks": count for tier, count in (origins or {}).items()}
        note.set(read_blocks=blocks, read_bytes=read_bytes, **tiers)

    @property
    def read_bytes_per_s(self) -> float:
        """What a read from memory runs at: the best of the last ones, some of which had to wait for
        a disk or another node; 0 before the first."""
        return max(self._read_rates.copy(), default=0.0)

    def report(self, replica: str, **load: Any) -> None:
        """Tell the store how busy a replica is (see `StoreClient.report`); lost without one."""
        self._call(lambda client: client.report(replica, **load))

    def report_pool(
        self, replica: str, added: Sequence[bytes], removed: Sequence[bytes], *, anew: bool
    ) -> bool:
        """Tell the store what a replica's pool holds (see `StoreClient.report_pool`); whether it
        was told."""

        def tell(client: StoreClient) -> bool:
            client.report_pool(replica, added, removed, anew=anew)
            return True

        return self._call(tell) or False

    def lend(self, use: Callable[[StoreClient], T]) -> T:
        """Call `use` with the client of this moment. Raises StoreError, opens no circuit."""
        client = self._client
        if client is None:
            raise StoreUnavailable("no store is attached")
        return use(client)

    def put(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None],
        buffers: Sequence[Buffer],
        shape: BlockShape,
        tenant: str = "",
        hint: Hint | None = None,
    ) -> list[str]:
        """Store blocks: "stored", "present" or "refused: <reason>" for each, within 2 s."""
        with tracing.span("store.put", put_bytes=len(keys) * shape.nbytes) as note:
            statuses = self._call(
                lambda client: client.put(
                    keys, parents, buffers, shape, tenant, hint=hint, timeout_s=PUT_TIMEOUT_S
                )
            )
            if statuses is None:
                statuses = ["refused: the store did not take it"] * len(keys)
            stored, present = statuses.count("stored"), statuses.count("present")
            counts = {
                "stored_blocks": stored,
                "present_blocks": present,
                "refused_blocks": len(statuses) - stored - present,
            }
            note.set(**counts)
        self._count(**counts)
        return statuses

    def store_stats(self) -> dict[str, Any] | None:
        """The store's own counters, or None when it does not answer in 50 ms."""
        return self._call(lambda client: client.stats(timeout_s=MATCH_TIMEOUT_S))

    def stats(self) -> NodeStoreStats:
        """A snapshot; never touches the store."""
        with self._lock:
            return replace(
                self._stats,
                healthy=self._client is not None,
                seconds_unresponsive=self._unresponsive(),
            )

    @property
    def healthy(self) -> bool:
        """Whether calls reach a store: the circuit is closed."""
        return self._client is not None

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def epoch(self) -> int | None:
        """Epoch of the store last attached; it differs at every start."""
        return self._epoch

    @property
    def server_pid(self) -> int | None:
        """Process of the store last attached."""
        return self._server_pid

    @property
    def seconds_unresponsive(self) -> float:
        """How long pings have gone unanswered although the store's socket is open; else 0."""
        with self._lock:
            return self._unresponsive()

    def wait_until_healthy(self, timeout_s: float) -> bool:
        """Wait for the store to be attached; False if it was not in time."""
        return self._attached.wait(timeout_s)

    def close(self) -> None:
        """Let go of the store and end the watcher. Later calls miss."""
        with self._lock:
            self._closed = True
            clients = [self._client, self._control]
            self._client = self._control = None
            self._attached.clear()
        self._wake.set()
        for client in clients:
            if client is not None:
                client.close()
        self._watcher.join(timeout=_CONNECT_TIMEOUT_S + _PING_TIMEOUT_S)

    def _call(self, call: Callable[[StoreClient], T]) -> T | None:
        client = self._client
        if client is None:
            self._count(skipped=1)
            return None
        try:
            return call(client)
        except StoreRefused as error:
            self._count(errors=1)
            self._warn_once(f"the store refused a call: {error}")
        except StoreTimeout as error:
            self._count(timeouts=1)
            self._open_circuit(client, error)
        except StoreError as error:
            self._count(errors=1)
            self._open_circuit(client, error)
        return None

    def _warn_once(self, message: str) -> None:
        with self._lock:
            level = logging.DEBUG if self._last_warning == message else logging.WARNING
            self._last_warning = message
        log.log(level, "%s", message)

    def _count(self, **increments: int) -> None:
        with self._lock:
            changed = {name: getattr(self._stats, name) + n for name, n in increments.items()}
            self._stats = replace(self._stats, **changed)

    def _unresponsive(self) -> float:
        since = self._first_missed_ping
        return 0.0 if since is None else time.monotonic() - since

    def _open_circuit(self, client: StoreClient, error: StoreError) -> None:
        with self._lock:
            if self._client is not client:
                return
            self._client = None
            self._failures += 1
            self._attached.clear()
        log.warning("store detached, serving without it: %s", error)
        client.close()
        self._wake.set()

    def _watch(self) -> None:
        while not self._closed:
            self._ping()
            if self._client is not None:
                self._pause(_PING_EVERY_S)
                continue
            self._pause(min(_PAUSE_MIN_S * 2 ** min(self._failures, 10), _PAUSE_MAX_S))
            if not self._closed:
                self._attach()

    def _pause(self, seconds: float) -> None:
        # Jittered, so that the clients of a restarted store do not all come at once.
        self._wake.wait(seconds * random.uniform(0.5, 1.0))
        self._wake.clear()

    def _attach(self) -> None:
        try:
            client = StoreClient.connect(
                self.socket,
                ingest_bytes=self._ingest_bytes,
                prefault=True,
                timeout_s=_CONNECT_TIMEOUT_S,
            )
        except StoreError as error:
            with self._lock:
                self._failures += 1
            log.debug("no store attached: %s", error)
            return
        with self._lock:
            if self._closed:
                client.close()
                return
            changed = self._epoch is not None and self._epoch != client.epoch
            self._client, self._epoch = client, client.epoch
            self._server_pid = client.server_pid
            self._failures = 0
            self._stats = replace(
                self._stats,
                connects=self._stats.connects + 1,
                epoch_changes=self._stats.epoch_changes + changed,
            )
            self._attached.set()
        log.info("attached to the store (pid %d)", client.server_pid)

    def _ping(self) -> None:
        """Ask the store on the control connection; remember since when it has not answered."""
        try:
            if self._control is None:
                control = StoreClient.connect(self.socket, timeout_s=_PING_TIMEOUT_S)
                self._server_pid = control.server_pid
                self._control = control
            self._control.ping(timeout_s=_PING_TIMEOUT_S)
        except StoreTimeout as error:
            self._control = None
            with self._lock:
                client = self._client
                if self._first_missed_ping is None:
                    self._first_missed_ping = time.monotonic() - _PING_TIMEOUT_S
            if client is not None:
                self._open_circuit(client, error)
        except StoreError:
            # Nobody listens: dead, not hung.
            self._control = None
            with self._lock:
                self._first_missed_ping = None
        else:
            with self._lock:
                self._first_missed_ping = None
