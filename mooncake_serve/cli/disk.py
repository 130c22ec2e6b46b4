"""What a disk gives the store: it is asked by running a small store on it, on files removed after.

So what is found is what a store would find: the same probes for io_uring and direct I/O, the same
writes and verified reads. Takes `ROOM` bytes of the disk and `DRAM` of memory meanwhile.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mooncake_serve.store import BlockShape, StoreClient, StoreServer, block_keys

MIB = 1 << 20
DRAM, ROOM = 192 * MIB, 256 * MIB
NBYTES, BLOCKS = 4 * MIB, 16
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Disk:
    """Rates in bytes/s, of `BLOCKS` blocks of `NBYTES`, once each."""

    io_uring: bool
    direct_io: bool
    write_rate: float
    read_rate: float


def probe(folder: Path) -> Disk:
    """Measure the disk of `folder`, which exists. Raises StoreError, ConfigError, OSError."""
    with (
        tempfile.TemporaryDirectory(prefix=".doctor-", dir=folder) as nvme,
        tempfile.TemporaryDirectory(prefix="mooncake-doctor-") as private,
        StoreServer(
            socket=Path(private) / "store.sock",
            dram_bytes=DRAM,
            nvme_path=Path(nvme) / "blocks",
            nvme_bytes=ROOM,
        ) as server,
        StoreClient.connect(Path(private) / "store.sock", timeout_s=TIMEOUT_S) as client,
    ):
        keys = block_keys("doctor", b"", range(BLOCKS), 1)
        shape = BlockShape.opaque(NBYTES)
        for key in keys:
            client.put([key], [None], [os.urandom(NBYTES)], shape)
        began = time.perf_counter()
        server.drain(timeout_s=TIMEOUT_S)
        wrote_s = time.perf_counter() - began
        client.cool()
        buffers = [bytearray(NBYTES) for _ in keys]
        began = time.perf_counter()
        blocks = client.read_into(keys, buffers)
        read_s = time.perf_counter() - began
        stats = client.stats()
    return Disk(
        io_uring=bool(stats["nvme_io_uring"]),
        direct_io=bool(stats["nvme_direct_io"]),
        write_rate=stats["nvme_demoted"] * NBYTES / wrote_s,
        read_rate=blocks * NBYTES / read_s,
    )
