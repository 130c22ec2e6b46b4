"""Reads from the disk tier for `bench store`, beside a bare loop over the same file.

Ours: `read_into` of prefixes of `DEPTH` blocks that are on disk only, verified, into touched
buffers, as a replica that loads a prompt. The bare loop: as many threads, each reading blocks of
the same size from the same file with O_DIRECT into a buffer of its own, and nothing else; it never
waits between prefixes. The two take turns, and each figure is the median of the turns.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_serve.bench import store_peers as peers
from mooncake_serve.bench.report import progress, quantile
from mooncake_serve.store import BlockShape, StoreClient, StoreServer, block_keys

MIB = 1 << 20
DEPTH = 16
DISTINCT = 8
PAGE = 4096


def measure(sizes: tuple[int, ...], total: int, turns: int) -> list[dict[str, Any]]:
    """A row per block size; `total` bytes of blocks are written, and read in each turn."""
    rows = []
    for nbytes in sizes:
        progress(f"disk tier: {nbytes >> 10} KiB blocks")
        with tempfile.TemporaryDirectory(prefix="mooncake-nvme-", dir=_disk_dir()) as directory:
            rows.append(_measure_size(Path(directory), nbytes, total, turns))
    return rows


def _disk_dir() -> str:
    """Not /tmp, which may be memory."""
    return os.environ.get("MOONCAKE_BENCH_DIR", "/var/tmp")


def _measure_size(directory: Path, nbytes: int, total: int, turns: int) -> dict[str, Any]:
    socket = directory / "s" / "store.sock"
    server = StoreServer(
        socket=socket,
        dram_bytes=max(256 * MIB, 2 * DEPTH * nbytes),
        ingest_bytes_max=32 * MIB,
        nvme_path=directory / "nvme",
        nvme_bytes=2 * total,
    )
    with server, StoreClient.connect(str(socket), timeout_s=120.0) as client:
        prefixes = _write(client, nbytes, total // nbytes // DEPTH)
        target = peers.touched(DEPTH, nbytes)
        ours, raw = [], []
        for _ in range(turns):
            client.cool()
            ours.append(_read_ours(client, prefixes, target))
            raw.append(_read_bare(directory / "nvme" / "blocks.log", nbytes, len(prefixes)))
        stats = client.stats()
    return {
        "bytes": nbytes,
        "depth": DEPTH,
        "ours_gb_s": quantile(sorted(ours), 0.5),
        "raw_o_direct_gb_s": quantile(sorted(raw), 0.5),
        "io_uring": bool(stats["nvme_io_uring"]),
        "direct_io": bool(stats["nvme_direct_io"]),
    }


def _write(client: StoreClient, nbytes: int, prefixes: int) -> list[list[bytes]]:
    """Chains of `DEPTH` blocks, on disk when this returns."""
    source = np.random.default_rng(0).integers(0, 256, (DISTINCT, nbytes), np.uint8)
    shape = BlockShape.opaque(nbytes)
    written = []
    for number in range(prefixes):
        keys = block_keys(f"disk {nbytes} {number}", b"", range(DEPTH), 1)
        blocks = [source[at % DISTINCT].data for at in range(DEPTH)]
        if client.put(keys, [None, *keys[:-1]], blocks, shape) != ["stored"] * DEPTH:
            raise RuntimeError("a put was refused")
        client.drain()
        client.cool()
        written.append(keys)
    return written


def _read_ours(client: StoreClient, prefixes: list[list[bytes]], target: Any) -> float:
    """GB/s of verified reads of everything once."""
    buffers = [row.data for row in target]
    begin = time.perf_counter()
    for keys in prefixes:
        if client.read_into(keys, buffers) != DEPTH:
            raise RuntimeError("a block that was on disk could not be read back")
    seconds = time.perf_counter() - begin
    return len(prefixes) * target.size / seconds / 1e9


def _read_bare(path: Path, nbytes: int, prefixes: int) -> float:
    """GB/s of `DEPTH` threads that read the same file with O_DIRECT."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    blocks = min(prefixes * DEPTH, (os.fstat(fd).st_size - PAGE) // nbytes)

    def read(first: int) -> None:
        with mmap.mmap(-1, nbytes) as buffer:
            for at in range(first, blocks, DEPTH):
                if os.preadv(fd, [buffer], PAGE + at * nbytes) != nbytes:
                    raise RuntimeError("a short read")

    threads = [threading.Thread(target=read, args=(at,)) for at in range(DEPTH)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    os.close(fd)
    return blocks * nbytes / seconds / 1e9
