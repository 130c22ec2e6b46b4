"""The Rust extension: the store's server and client, and block keys.

Every call that may wait or copy releases the GIL and honours `timeout_s`; none hangs. Failures
are `StoreUnavailable`, `StoreTimeout`, `StoreRefused`, `StoreProtocolError` and `ConfigError` of
`mooncake_serve.errors`; wrong arguments are `ValueError`, `TypeError` or `BufferError`. A missing
or corrupt block is never an error. Keys are the 32 bytes that `block_keys` returns.
"""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from types import ModuleType, TracebackType
from typing import Any, Self, final

from typing_extensions import Buffer

from mooncake_serve.store.transfer_engine import TransferEngine

codec: ModuleType
"""Block containers; see mooncake_serve.codec."""
cpu: ModuleType
"""CPU kernels of the engine."""
policy: ModuleType
"""Eviction policies, routers and the simulator."""

def block_keys(
    namespace: str,
    tenant_salt: bytes,
    token_ids: Sequence[int] | Buffer,
    block_tokens: int,
) -> list[bytes]:
    """Chained BLAKE3 keys of the ⌊len/block_tokens⌋ full blocks, in order.

    A key names its block and everything before it. The same in every process and on every
    machine. `token_ids` may be a buffer of uint32, int32 or int64.
    """

def tenant_salt(cluster_secret: bytes, tenant: str) -> bytes:
    """32 bytes that root a tenant's keys: keyed BLAKE3 of its name under the cluster's secret."""

@final
class BlockShape:
    """A block: `planes` independent planes of `tokens` by `channels` elements.

    `dtype` is opaque, bfloat16, float16, float32, float8_e4m3fn or float8_e5m2. At most 65536
    planes and 4 GiB.
    """

    def __new__(cls, dtype: str, planes: int, tokens: int, channels: int) -> Self: ...
    @staticmethod
    def opaque(nbytes: int) -> BlockShape:
        """Bytes without structure."""
    @property
    def dtype(self) -> str: ...
    @property
    def planes(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Lease:
    """The right to read one block in place: a read-only buffer, valid until `release`.

    A block that is stored coded has no bytes to view (BufferError); `read_into` decodes it. The
    bytes are unverified until `verify()`. The store never reuses them while the lease holds, even
    if it dies meanwhile. Ends at `release()`, at the end of `with`, or with the object.
    """

    @property
    def key(self) -> bytes: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def shape(self) -> BlockShape: ...
    @property
    def codec(self) -> str:
        """How the block is stored: "none", "fast", "dense" or "zstd"."""
    def verify(self) -> bool:
        """True if every byte matches its checksum. If not, the store drops the block."""
    def release(self) -> None:
        """End the lease; again is harmless. Raises BufferError while views of it exist."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None: ...

@final
class PeerSettings:
    """How a store meets the stores of other nodes.

    `node` names this node in the cluster, at most 64 bytes. `listen` is `host:port`, port 0 for a
    free one; beyond loopback it needs `token`, the secret all stores share, or the three `tls_`
    files for mutual TLS, whose certificates carry `tls_name`. `max_bytes_per_s` bounds what is sent
    to all peers together. `index_bytes` bounds the cluster index (None:
    1/32 of the memory, 256 MiB at most). `engine` moves the blocks instead of TCP; every store of
    the cluster has one then, and no TLS.
    """

    def __new__(
        cls,
        *,
        node: str,
        listen: str | None = None,
        token: bytes | None = None,
        tls_ca: str | PathLike[str] | None = None,
        tls_certificate: str | PathLike[str] | None = None,
        tls_key: str | PathLike[str] | None = None,
        tls_name: str = "mooncake-peer",
        max_bytes_per_s: int | None = None,
        index_bytes: int | None = None,
        engine: TransferEngine | None = None,
    ) -> Self: ...

@final
class ClusterView:
    """Which node holds which blocks, and how busy each replica is; read in place, never blocks."""

    @property
    def moved(self) -> bool:
        """A larger index took over: ask the store for it."""
    @property
    def entries(self) -> int:
        """Blocks known, each once per node that has it."""
    def longest_prefix(self, keys: Iterable[bytes]) -> tuple[dict[str, tuple[int, int]], int]:
        """Leading blocks of the chain `keys` per node name: (in memory, in memory or on disk).

        The number is that of leading blocks that some node holds, each from wherever it is.
        """
    def pooled_prefix(self, keys: Iterable[bytes]) -> dict[str, int]:
        """Leading blocks of the chain `keys` in the pool of each replica that has the first."""
    def nodes(self) -> dict[str, tuple[bool, float, float]]:
        """Stores by name: alive, measured bytes/s and latency in s of fetches (0: none yet)."""
    def replicas(self) -> dict[str, dict[str, Any]]:
        """Replicas by name: node, at_s (monotonic), and what `StoreClient.report` was given."""

@final
class ClusterIndex:
    """A cluster index that no store feeds: for benchmarks and tests of routing."""

    def __new__(cls, node: str, *, bytes_max: int = 268435456) -> Self: ...
    @property
    def size_bytes(self) -> int:
        """Memory it takes."""
    def join(self, node: str) -> int:
        """Row of a store that answers; `node` of the constructor has row 0."""
    def leave(self, node: int) -> None:
        """The store's stream ended: nothing it had counts any more."""
    def apply(self, node: int, keys: bytes, tier: int) -> None:
        """`keys`, 32 bytes each, are in memory (0), on disk (1) or gone (255) there."""
    def report(
        self, node: int, replica: str, prefill_tokens: int, token_s: float, at_s: float
    ) -> None:
        """A replica's load at `at_s`, `time.monotonic()`."""
    def report_pool(self, node: int, replica: str, keys: bytes) -> None:
        """The pool of a replica that has reported holds `keys`, 32 bytes each, and no others."""
    def view(self) -> ClusterView:
        """The readers' side."""

@final
class Route:
    """Where a request goes, and what that rests on: predicted seconds, and blocks reused."""

    @property
    def replica(self) -> str: ...
    @property
    def queue_s(self) -> float: ...
    @property
    def load_s(self) -> float: ...
    @property
    def prefill_s(self) -> float: ...
    @property
    def ttft_s(self) -> float: ...
    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """From device, dram, nvme, peer."""

@final
class RoutePlanner:
    """The router of one process: the planner the simulator runs, over the cluster index.

    Never waits. `now_s` is `time.monotonic()`. `token_s` and the rates are assumed until replicas
    and stores have measured theirs. Requests whose first token would take longer than `slo_s` on
    every replica are rejected.
    """

    def __new__(
        cls,
        *,
        slo_s: float | None = None,
        seed: int = 0,
        token_s: float = 0.001,
        dram_bytes_per_s: float = 5e9,
        peer_bytes_per_s: float = 1e9,
    ) -> Self: ...
    def set_model(self, block_tokens: int, token_bytes: float) -> None:
        """A block has `block_tokens` tokens of `token_bytes` of KV each."""
    def set_replicas(self, running: Mapping[str, str], now_s: float) -> None:
        """These run, each by name on its node; others are gone."""
    def drop_replica(self, name: str, now_s: float) -> None:
        """This one is gone, before anybody reports the new set."""
    def replicas(self) -> list[str]:
        """Names of the running replicas, sorted."""
    @property
    def wants_view(self) -> bool:
        """There is no view, or a larger index took over."""
    def set_view(
        self, source: StoreClient | ClusterIndex | None, *, timeout_s: float = 0.05
    ) -> None:
        """Read the cluster index of a client's store from now on. Raises StoreError."""
    def plan(
        self,
        request: int,
        tokens: int,
        keys: Iterable[bytes],
        now_s: float,
        *,
        only: str | None = None,
        prefer: str | None = None,
        avoid: Sequence[str] = ...,
    ) -> tuple[Route | None, float]:
        """Choose a replica, count the request there; the route and its time to first token.

        `only` restricts the choice to one replica, `avoid` excludes some, `prefer` wins ties.
        Without a route the request must be refused: the number is the best time on offer, infinite
        if there is no replica.
        """
    def first_token(self, request: int) -> None:
        """Its prefill is done."""
    def end(self, request: int) -> None:
        """It ended, or never reached its replica."""
    def outstanding(self) -> dict[str, tuple[int, int]]:
        """By replica: prompt tokens sent from here without a first token, and requests."""
    def queued_tokens(self, now_s: float) -> int:
        """Prompt tokens that wait for all replicas together."""
    def costs(self) -> tuple[tuple[float, float, float], float, float]:
        """(fixed, per token, per token and token of context) seconds; memory and peer bytes/s."""

@final
class Reading:
    """Blocks that arrive in buffers plane by plane; see `StoreClient.open`.

    Ends at `close()`, at the end of `with`, or with the object.
    """

    def __len__(self) -> int:
        """Leading blocks that can still be read."""
    def origins(self) -> dict[str, int]:
        """How many of them were in "dram", "nvme" or at a "peer" when they were asked for."""
    def read_planes(self, first: int, end: int) -> int:
        """Copy planes [first, end) of every block to their places in its buffer, verified.

        Returns how many leading blocks are left: a corrupt block, or one at which the time is up,
        ends the reading there. A block is whole once all its planes were read.
        """
    def close(self) -> None:
        """End the leases; again is harmless."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None: ...

@final
class StoreServer:
    """A store inside this process, on Rust threads that never need the GIL.

    `dram_bytes` caps arena, put buffers and index together. `ingest_bytes_max` is the largest put
    buffer of one client, `ingest_bytes_total` that of all (None: an eighth of the memory, or more
    in a small store). `index_bytes` bounds the number of blocks at 128 bytes each (None: 1/64 of
    the memory). A client that puts takes two of `max_sessions`, and one more where there is a disk.
    `codec` is none, fast, dense or auto; dense codes blocks again that were unused for
    `transcode_idle_s`, with `transcode_share` of one core. `eviction` is ours (recency, corrected
    by the learnt odds of being used again) or lru.

    `nvme_path` is a directory for blocks that memory has no room for, at most `nvme_bytes` of it,
    written at `nvme_write_bytes_per_s` (0: no limit), read with io_uring where the kernel has it.
    What it holds survives the process. `nvme_codec` is how blocks are stored there, coded with
    `transcode_share` of one core: none, fast, dense, or auto, which is dense where the disk is
    slower than decoding (None: as they are in memory).

    `tenant_bytes` and `tenant_nvme_bytes` are the most that each named tenant may take of either;
    at its quota a tenant makes room among its own blocks.
    """

    def __new__(
        cls,
        *,
        socket: str | PathLike[str],
        dram_bytes: int,
        ingest_bytes_max: int = 67108864,
        max_sessions: int = 128,
        ingest_bytes_total: int | None = None,
        index_bytes: int | None = None,
        max_leases: int = 65536,
        codec: str = "none",
        eviction: str = "ours",
        transcode_share: float = 0.1,
        transcode_idle_s: float = 2.0,
        peer: PeerSettings | None = None,
        nvme_path: str | PathLike[str] | None = None,
        nvme_bytes: int = 0,
        nvme_write_bytes_per_s: int = 0,
        nvme_io_uring: bool = True,
        tenant_bytes: int | None = None,
        tenant_nvme_bytes: int | None = None,
        nvme_codec: str | None = None,
    ) -> Self: ...
    def start(self) -> None:
        """Reserve memory, take the socket, serve; nothing if it runs already.

        Raises ConfigError naming the field: memory that the machine or its cgroup does not have, a
        socket that another store serves, a directory open to other users.
        """
    def stop(self, drain: bool = False) -> None:
        """Stop; with `drain`, requests that have arrived are answered first."""
    def drain(self, *, timeout_s: float = 30.0) -> int:
        """Write to disk what is in memory only, where there is room: how many blocks went."""
    @property
    def starting(self) -> tuple[str, int, int]:
        """How far `start` in another thread is: "reserving" (bytes) or "recovering" (segments).

        What is done, and all there is to do.
        """
    @property
    def warnings(self) -> list[str]:
        """What an operator should know about how this store runs here."""
    def stats(self) -> dict[str, Any]:
        """Counters and gauges by name.

        Of blocks: `logical_bytes - codec_saved_bytes + metadata_bytes + rounding_bytes =
        physical_bytes`, also in each row of `usage` (by tier, dtype and codec).
        `shared_saved_bytes` is what caches of each process's own would hold besides. `codec`,
        `codec_why` and `nvme_codec_why` say how blocks are stored. `tenants` maps a name to
        its bytes and blocks. `nvme_read_us_…` and `peer_fetch_us_…` are histograms: count, sum, and
        how many took no longer than each bound.
        """
    @property
    def peer_address(self) -> str | None:
        """`host:port` where other stores reach this one; None if it does not listen."""
    def set_peers(self, addresses: Sequence[str]) -> None:
        """These are the peers from now on; its own address among them is ignored.

        Raises ConfigError if the store does not listen itself.
        """
    @property
    def epoch(self) -> int:
        """Differs at every start."""
    @property
    def pid(self) -> int: ...
    @property
    def socket(self) -> Any:
        """Path of the socket."""
    @property
    def is_running(self) -> bool:
        """False before start, after stop, and after a broken invariant."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None: ...

@final
class Hint:
    """What a caller knows about the next use of its blocks; soft, and learnt how far to trust.

    `priority` is -100 (let these go first) to 100 (keep these). `session_end`: no request follows
    in this conversation. `expected_reuse_s`: they will be wanted again after so many seconds; 0 if
    unknown.
    """

    def __new__(
        cls, *, priority: int = 0, session_end: bool = False, expected_reuse_s: int = 0
    ) -> Self: ...
    @property
    def priority(self) -> int: ...
    @property
    def session_end(self) -> bool: ...
    @property
    def expected_reuse_s(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...

class StoreClient:
    """A blocking, thread-safe client of the node's store.

    Each call returns or raises within `timeout_s` (default: that of `connect`). After a timeout or
    a broken connection every call raises StoreUnavailable: connect anew. `tenant` is for
    accounting only, `hint` moves the blocks' place in the order of eviction.
    """

    @staticmethod
    def connect(
        socket: str | PathLike[str],
        *,
        ingest_bytes: int = 67108864,
        prefault: bool = False,
        timeout_s: float = 5.0,
    ) -> StoreClient:
        """Attach to the store at `socket`; `ingest_bytes` is the put buffer to ask for.

        `prefault` maps the arena's pages in the background, so that first reads run at full speed.
        """
    def match(
        self,
        keys: Iterable[bytes],
        tenant: str = "",
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """How many of `keys`, from the first, are present."""
    def lease(
        self,
        keys: Iterable[bytes],
        tenant: str = "",
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> list[Lease | None]:
        """Lease blocks in place; None stands for one that is absent."""
    def read_into(
        self,
        keys: Iterable[bytes],
        buffers: Iterable[Buffer],
        tenant: str = "",
        *,
        hint: Hint | None = None,
        threads: int = 1,
        timeout_s: float | None = None,
        origins: dict[str, int] | None = None,
    ) -> int:
        """Copy the leading present blocks into writable buffers, verified; how many were.

        Copies on up to `threads` threads. Stops at the first that is absent, corrupt, or of another
        size than its buffer; buffers from there on hold garbage. A corrupt block is dropped from
        the store. In `origins`, if given, the blocks are counted under where they were: "dram",
        "nvme" or "peer".
        """
    def open(
        self,
        keys: Iterable[bytes],
        buffers: Iterable[Buffer],
        tenant: str = "",
        *,
        hint: Hint | None = None,
        threads: int = 1,
        timeout_s: float | None = None,
    ) -> Reading:
        """Lease the leading present blocks, to be read plane by plane into writable buffers.

        The buffers are of one size, that of a block; up to `threads` threads copy, and `timeout_s`
        covers the whole reading.
        """
    def put(
        self,
        keys: Iterable[bytes],
        parents: Iterable[bytes | None],
        buffers: Iterable[Buffer],
        shape: BlockShape,
        tenant: str = "",
        *,
        hint: Hint | None = None,
        timeout_s: float | None = None,
    ) -> list[str]:
        """Store blocks; for each "stored", "present" or "refused: <reason>".

        A parent is the key before it in the chain, None for the first block. What is stored or
        present can be read as soon as this returns.
        """
    def evict(self, keys: Iterable[bytes], *, timeout_s: float | None = None) -> int:
        """Drop blocks; how many were present. Leases of them stay valid."""
    def blocks(self, *, timeout_s: float | None = None) -> list[tuple[bytes, bytes | None]]:
        """Key and parent of every block in DRAM; not a snapshot, as it comes in pieces."""
    def stats(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Counters and gauges of the store by name; see `StoreServer.stats`."""
    def cluster(self, *, timeout_s: float | None = None) -> ClusterView:
        """The cluster index, mapped read-only. Ask again once it has `moved`."""
    def report(
        self,
        replica: str,
        *,
        prefill_tokens: int = 0,
        waiting: int = 0,
        running: int = 0,
        free_blocks: int = 0,
        prefill: tuple[float, float, float] = ...,
        load_bytes_per_s: float = 0.0,
        accepting: bool = True,
    ) -> None:
        """Tell the store, and through it every router, how busy a replica of this node is.

        One-way. `replica` has at most 16 bytes; `prefill` is measured seconds of any prefill, per
        token, and per token and token of context. Not `accepting` takes its row away.
        """
    def report_pool(
        self,
        replica: str,
        added: Iterable[bytes],
        removed: Iterable[bytes],
        *,
        anew: bool = False,
    ) -> None:
        """Tell the store, and through it every router, which blocks a replica's own pool took up
        and gave up.

        One-way. `anew` voids what was told before. Ignored before the replica's first `report`.
        """
    def drain(self, *, timeout_s: float | None = None) -> int:
        """Have the store write to disk what it holds in memory only: how many blocks it wrote."""
    def list(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Every block: key, dram_bytes, nvme_bytes, leases, tenant, idle_s, pinned.

        `tenant` is the row of `stats()["tenants"]`.
        """
    def verify(self, *, timeout_s: float | None = None) -> dict[str, int]:
        """Have the store check every copy of every block, and drop those that are wrong.

        `checked` and `corrupt` count copies, `bytes` what was read for it.
        """
    def pin(
        self, keys: Sequence[bytes], ttl_s: int | None = None, *, timeout_s: float | None = None
    ) -> int:
        """Keep blocks in memory: how many of `keys` are.

        For `ttl_s` seconds, unless nothing else can make room; None until `unpin`, within the
        quota of a quarter of the memory.
        """
    def unpin(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> int:
        """End pins: how many there were."""
    def cool(self, *, timeout_s: float | None = None) -> int:
        """Give back the memory of blocks that are on disk as well: how many."""
    def ping(self, *, timeout_s: float | None = None) -> None:
        """Return if the store answers."""
    @property
    def server_pid(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    def close(self) -> None:
        """Let go of the store; leases stay valid until they are released."""
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
        /,
    ) -> None: ...
