"""`mooncake-serve bench store`: lease, read and put from another process, beside memcpy and Ray.

The store runs in a process of its own; this process is the client. Rates are of raw bytes, reads
are verified, and after the puts every key is accounted for. Every block is read once, as a replica
that loads a prefix does. `ray.put`/`ray.get` are measured in this run, block size by block size,
right after ours, the gets in an actor as in a second process. So is Mooncake Store, whose client
shares memory with the owner of its segment (`mooncake_gb_s`) or reaches it over TCP
(`mooncake_tcp_gb_s`). What is not installed is null, with the reason under "why".
"""

from __future__ import annotations

import argparse
import json
import os
import socket as sockets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_serve._store import ClusterIndex
from mooncake_serve.bench import store_coded, store_nvme, store_peer_fetch
from mooncake_serve.bench import store_peers as peers
from mooncake_serve.bench.report import emit, machine, progress, quantile, timed, version
from mooncake_serve.bench.store_mooncake import mooncake_store
from mooncake_serve.store import BlockShape, StoreClient, StoreServer, block_keys

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
QUICK_SIZES = (64 * KIB, MIB, 4 * MIB)
WORKING_SET = 512 * MIB
"""Bytes a copy cycles through, there and here, so that no cache holds them."""
PLANES = 64


def main(argv: list[str] | None = None) -> int:
    """Entry of `mooncake-serve bench store` and of `python -m mooncake_serve.bench.store`."""
    parser = argparse.ArgumentParser(prog="mooncake-serve bench store", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object (the default)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, within a minute")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        serve(options.serve[0], json.loads(options.serve[1]))
        return 0
    emit(measure(options.quick))
    return 0


def measure(quick: bool) -> dict[str, Any]:
    """Run everything; the object that `--json` prints."""
    result: dict[str, Any] = {
        "machine": machine(),
        "version": version(),
        "runs": 1,
        "why": {},
    }
    copy_sizes = QUICK_SIZES if quick else SIZES
    progress("memcpy and Unix-socket round trip")
    result["memcpy_gb_s"] = memcpy_rate(4 * MIB)
    result["unix_rtt_us_p50"] = unix_round_trip_us(300 if quick else 3000)
    with running_store(3 * GIB // 2) as (client, _):
        result |= measure_copies(client, copy_sizes, result["why"])
        progress("batches")
        result |= measure_batches(client)
    for codec in ("fast", "dense"):
        settings = {"transcode_share": 1.0, "transcode_idle_s": 0.0}
        with running_store(GIB, codec=codec, **settings) as (client, _):
            for nbytes in copy_sizes:
                blocks = min(max(WORKING_SET // nbytes, 32), 256)
                row = store_coded.measure(client, codec, shape_of(nbytes), blocks)
                result["read_into"].append(row)
    with running_store(GIB) as (client, _):
        progress("pressure")
        result["pressure"] = measure_pressure(client, 300 if quick else 600)
    result["peer_fetch"] = store_peer_fetch.measure(quick, result["why"])
    disk_sizes = (4 * MIB,) if quick else (MIB, 4 * MIB, 16 * MIB)
    result["nvme_read"] = store_nvme.measure(
        disk_sizes, GIB // 2 if quick else GIB, 1 if quick else 3
    )
    result["scale"] = measure_scale(50_000 if quick else 1_000_000, 16 if quick else 64)
    return result


def serve(path: str, settings: dict[str, Any]) -> None:
    """Be the store until killed."""
    server = StoreServer(socket=path, **settings)
    server.start()
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.stop()


@contextmanager
def running_store(dram_bytes: int, **settings: Any) -> Iterator[tuple[StoreClient, str]]:
    """A client of a store in a fresh process, and its socket; `settings` as of `StoreServer`."""
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as directory:
        path = str(Path(directory) / "store.sock")
        command = [sys.executable, "-m", "mooncake_serve.bench.store", "--serve"]
        command += [path, json.dumps({"dram_bytes": dram_bytes, **settings})]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError("the store did not start; its error is above")
            with StoreClient.connect(path, prefault=True, timeout_s=60.0) as client:
                yield client, path
            process.kill()


def memcpy_rate(nbytes: int) -> float:
    """One thread, one size, pre-faulted destination, both cycling through `WORKING_SET`."""
    source = np.ones((WORKING_SET // nbytes, nbytes), np.uint8)
    target = peers.touched(len(source), nbytes)
    seconds = []
    for _ in range(3):
        for block, place in zip(source, target, strict=True):
            seconds += timed(lambda block=block, place=place: np.copyto(place, block), 1)
    return nbytes / quantile(sorted(seconds), 0.5) / 1e9


def unix_round_trip_us(times: int) -> float:
    """64 bytes to an echo process and back."""
    ours, theirs = sockets.socketpair()
    echo = (
        "import socket, sys\n"
        "peer = socket.socket(fileno=int(sys.argv[1]))\n"
        "while data := peer.recv(64): peer.send(data)"
    )
    command = [sys.executable, "-c", echo, str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()

        def round_trip() -> None:
            ours.send(b"x" * 64)
            ours.recv(64)

        timed(round_trip, 100)
        seconds = timed(round_trip, times)
        ours.shutdown(sockets.SHUT_RDWR)
        process.wait(timeout=10)
    return quantile(seconds, 0.5) * 1e6


def shape_of(nbytes: int) -> BlockShape:
    """A KV block of that size: 64 planes of bfloat16."""
    return BlockShape("bfloat16", PLANES, nbytes // PLANES // 128, 64)


def measure_copies(
    client: StoreClient, sizes: tuple[int, ...], why: dict[str, str]
) -> dict[str, Any]:
    """lease, read_into and put for each size: ours, Ray's and Mooncake Store's in turns."""
    rows: dict[str, list[dict[str, Any]]] = {"lease": [], "read_into": [], "put": []}
    segment = 2 * WORKING_SET
    with (
        peers.ray_object_store(WORKING_SET + 256 * MIB, why) as ray,
        mooncake_store(segment, why) as mooncake,
    ):
        for nbytes in sizes:
            progress(f"{nbytes // KIB} KiB blocks")
            ours = measure_size(client, nbytes)
            theirs = peers.measure_ray(ray, nbytes, WORKING_SET)
            theirs |= mooncake.measure(nbytes, min(max(WORKING_SET // nbytes, 32), 1024))
            rows["lease"].append(
                {"bytes": nbytes, **ours["lease"], "ray_get_us_p50": theirs["get_us_p50"]}
            )
            rows["read_into"].append(
                {
                    "bytes": nbytes,
                    "codec": "none",
                    "ours_gb_s": ours["read_gb_s"],
                    "ray_get_copy_gb_s": theirs["get_copy_gb_s"],
                    "mooncake_gb_s": theirs["mooncake_get_gb_s"],
                    "mooncake_tcp_gb_s": theirs["mooncake_tcp_get_gb_s"],
                }
            )
            rows["put"].append(
                {
                    "bytes": nbytes,
                    "ours_gb_s": ours["put_gb_s"],
                    "ray_put_gb_s": theirs["put_gb_s"],
                    "mooncake_gb_s": theirs["mooncake_put_gb_s"],
                    "mooncake_tcp_gb_s": theirs["mooncake_tcp_put_gb_s"],
                }
            )
    return rows


def measure_size(client: StoreClient, nbytes: int) -> dict[str, Any]:
    """Our figures for one block size; medians over distinct blocks of a working set."""
    count = max(WORKING_SET // nbytes, 32)
    count = min(count, 1024)
    keys = chain(f"size {nbytes}", count)
    shape = shape_of(nbytes)
    source = np.random.default_rng(0).integers(0, 256, (8, nbytes), np.uint8)
    target = peers.touched(count, nbytes)
    put, read = [], []
    for at, key in enumerate(keys):
        parent = [keys[at - 1] if at else None]
        block = [source[at % 8].data]
        start = time.perf_counter()
        (status,) = client.put([key], parent, block, shape)
        put.append(time.perf_counter() - start)
        if status != "stored":
            raise RuntimeError(f"a put was {status}")
    for at, key in enumerate(keys):
        buffer = [target[at].data]
        start = time.perf_counter()
        got = client.read_into([key], buffer)
        read.append(time.perf_counter() - start)
        if got != 1 or not np.array_equal(target[at][:64], source[at % 8][:64]):
            raise RuntimeError("a block that was stored could not be read back")
    leases = timed(lambda: lease_and_release(client, keys[:1]), 3000)
    client.evict(keys)
    return {
        "lease": {
            "ours_us_p50": quantile(leases, 0.5) * 1e6,
            "ours_us_p99": quantile(leases, 0.99) * 1e6,
        },
        "read_gb_s": nbytes / quantile(sorted(read), 0.5) / 1e9,
        "put_gb_s": nbytes / quantile(sorted(put), 0.5) / 1e9,
    }


def measure_batches(client: StoreClient) -> dict[str, float]:
    """Lease of 32 blocks in one call; match of 512 keys."""
    keys = chain("batch", 512)
    client.put(keys, [None, *keys[:-1]], [bytes(KIB)] * 512, BlockShape.opaque(KIB))
    held: list[Any] = []
    leases = timed(lambda: held.append(client.lease(keys[:32])), 500)
    held.clear()
    return {
        "lease_batch32_us_p50": quantile(leases, 0.5) * 1e6,
        "match_512_keys_us_p50": quantile(timed(lambda: client.match(keys), 500), 0.5) * 1e6,
    }


def measure_pressure(client: StoreClient, puts: int) -> dict[str, int]:
    """Put more than fits, and account for every block."""
    nbytes = 4 * MIB
    shape = shape_of(nbytes)
    block = bytes(nbytes)
    keys = chain("pressure", puts)
    refused = 0
    for key in keys:
        (status,) = client.put([key], [None], [block], shape)
        refused += status.startswith("refused: ")
    buffer = bytearray(nbytes)
    readable = sum(client.read_into([key], [buffer]) for key in keys)
    evicted = client.stats()["evicted_for_room"]
    return {
        "puts": puts,
        "readable": readable,
        "refused_with_reason": refused,
        "evicted_counted": evicted,
        "lost_silently": puts - readable - refused - evicted,
    }


def measure_scale(blocks: int, clients: int) -> dict[str, Any]:
    """Lease latency with many blocks of 1 KiB and many attached clients, beside a small store."""
    progress(f"scale: {blocks} blocks, {clients} clients")
    dram = blocks * (KIB + 512) + blocks * 128 + 256 * MIB
    batch = 4096
    p50, p99 = [], []
    p50_small, p99_small = [], []
    with running_store(dram, index_bytes=blocks * 128 + MIB) as (client, path):
        keys = chain("scale", batch)
        client.put(keys, [None] * batch, [bytes(KIB)] * batch, BlockShape.opaque(KIB))
        for _ in range(5):
            lease = timed(lambda: lease_and_release(client, keys[:1]), 1000)
            p50_small.append(quantile(lease, 0.5) * 1e6)
            p99_small.append(quantile(lease, 0.99) * 1e6)
        attached = [StoreClient.connect(path) for _ in range(clients - 1)]
        for at in range(batch, blocks, batch):
            more = chain(f"scale {at}", min(batch, blocks - at))
            client.put(more, [None] * len(more), [bytes(KIB)] * len(more), BlockShape.opaque(KIB))
            keys.append(more[0])
        probes = iter(keys * 40)
        for _ in range(5):
            lease = timed(lambda: lease_and_release(client, [next(probes)]), 1000)
            p50.append(quantile(lease, 0.5) * 1e6)
            p99.append(quantile(lease, 0.99) * 1e6)
        stats = client.stats()
        for other in attached:
            other.close()
    return {
        "clients": clients,
        "blocks": stats["blocks"],
        "lease_us_p50": sorted(p50)[2],
        "lease_us_p50_small": sorted(p50_small)[2],
        "lease_us_p99": sorted(p99)[2],
        "lease_us_p99_small": sorted(p99_small)[2],
        "index_bytes_per_own_block": stats["index_bytes"] / stats["blocks"],
        "index_bytes_per_remote_entry": remote_entry_bytes(blocks),
    }


def remote_entry_bytes(entries: int) -> float:
    """Memory of the cluster index for each block of another node."""
    index = ClusterIndex("here")
    there = index.join("there")
    empty = index.size_bytes
    for at in range(0, entries, 8192):
        index.apply(there, os.urandom(32 * min(8192, entries - at)), 0)
    return (index.size_bytes - empty) / entries


def chain(name: str, blocks: int) -> list[bytes]:
    """Keys of that many blocks."""
    return block_keys(f"bench {name}", b"", range(blocks), 1)


def lease_and_release(client: StoreClient, keys: list[bytes]) -> None:
    """One lease call, and the end of its leases."""
    for lease in client.lease(keys):
        assert lease is not None
        lease.release()


if __name__ == "__main__":
    sys.exit(main())
