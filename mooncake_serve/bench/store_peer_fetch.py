"""Fetching from another store over loopback, beside a raw TCP stream of the same bytes.

Two stores in processes of their own, with a shared token and then under mutual TLS. A lease of
blocks that only the other store holds brings them: received into the arena, verified, published.
The raw stream is one connection between two processes, without checksum or protocol; like ours it
sends from and receives into memory that is in no cache, pre-faulted, in pieces of a block.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_serve.bench.report import progress
from mooncake_serve.store import BlockShape, PeerSettings, StoreClient, StoreServer, block_keys

MIB = 1 << 20
BLOCK = 4 * MIB
SHAPE = BlockShape("bfloat16", 64, 512, 64)
BATCH = 32
WORKING_SET = 512 * MIB
TOKEN = b"a token of the benchmark"
TURNS = 3


def measure(quick: bool, why: dict[str, str]) -> dict[str, Any]:
    """The `peer_fetch` row: medians of several turns, raw and ours in each."""
    total = WORKING_SET // 2 if quick else WORKING_SET
    raw, plain, tls = [], [], []
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder, ExitStack() as stack:
        files = certificates(Path(folder), why)
        ours = stack.enter_context(pair(Path(folder) / "plain", total, {}))
        under_tls = stack.enter_context(pair(Path(folder) / "tls", total, files)) if files else None
        for turn in range(TURNS):
            progress(f"peer fetch, turn {turn + 1} of {TURNS}")
            raw.append(raw_stream(total))
            plain.append(fetch(*ours, total))
            if under_tls:
                tls.append(fetch(*under_tls, total))
    return {
        "bytes": BLOCK,
        "ours_gb_s": median(plain),
        "ours_tls_gb_s": median(tls) if tls else None,
        "raw_tcp_gb_s": median(raw),
    }


def median(values: list[float]) -> float:
    """The middle one."""
    return sorted(values)[len(values) // 2]


@contextmanager
def pair(
    folder: Path, total: int, tls: dict[str, str]
) -> Iterator[tuple[StoreClient, StoreClient, list[bytes]]]:
    """Clients of a store that knows the other as its peer, and of the other, which is full."""
    with ExitStack() as stack:
        far, address = stack.enter_context(store(folder / "far", total, tls, []))
        near, _ = stack.enter_context(store(folder / "near", total, tls, [address]))
        keys = block_keys(f"peer fetch {folder}", b"", range(total // BLOCK), 1)
        block = np.random.default_rng(0).integers(0, 256, (4, BLOCK), np.uint8)
        for at, key in enumerate(keys):
            (status,) = far.put([key], [keys[at - 1] if at else None], [block[at % 4].data], SHAPE)
            if status != "stored":
                raise RuntimeError(f"a put was {status}")
        yield near, far, keys


@contextmanager
def store(
    folder: Path, total: int, tls: dict[str, str], peers: list[str]
) -> Iterator[tuple[StoreClient, str]]:
    """A client of a store in a fresh process, and the address its peers use."""
    options = {
        "socket": str(folder / "store.sock"),
        "dram": total + total // 8 + 192 * MIB,
        "node": folder.name,
        "tls": tls,
        "peers": peers,
    }
    command = [sys.executable, "-m", "mooncake_serve.bench.store_peer_fetch", json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        if not address:
            raise RuntimeError("the store did not start; its error is above")
        with StoreClient.connect(options["socket"], timeout_s=60.0) as client:
            yield client, address
        process.kill()


def serve(options: dict[str, Any]) -> None:
    """Be a store until stdin closes."""
    peer = PeerSettings(node=options["node"], listen="127.0.0.1:0", token=TOKEN, **options["tls"])
    with StoreServer(socket=options["socket"], dram_bytes=options["dram"], peer=peer) as server:
        server.set_peers(options["peers"])
        sys.stdout.write(f"{server.peer_address}\n")
        sys.stdout.flush()
        sys.stdin.read()


def fetch(near: StoreClient, far: StoreClient, keys: list[bytes], total: int) -> float:
    """GB/s at which leases bring all blocks over; then they are dropped again."""
    patience = time.monotonic() + 60
    while near.match(keys) < len(keys):
        if time.monotonic() > patience:
            raise RuntimeError("the stores did not meet")
        time.sleep(0.02)
    begun = time.perf_counter()
    for at in range(0, len(keys), BATCH):
        for lease in near.lease(keys[at : at + BATCH], timeout_s=30.0):
            if lease is None:
                raise RuntimeError("a block did not come")
            lease.release()
    seconds = time.perf_counter() - begun
    near.evict(keys)
    return total / seconds / 1e9


def raw_stream(total: int) -> float:
    """GB/s of one TCP connection on loopback between two processes."""
    sender = (
        "import socket, sys, numpy\n"
        "total, block = int(sys.argv[2]), int(sys.argv[3])\n"
        "data = numpy.ones((total // block, block), numpy.uint8)\n"
        "with socket.create_connection(('127.0.0.1', int(sys.argv[1]))) as peer:\n"
        "    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)\n"
        "    peer.recv(1)\n"
        "    for part in data: peer.sendall(part)\n"
        "    peer.recv(1)\n"
    )
    target = np.ones((total // BLOCK, BLOCK), np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        command = [sys.executable, "-c", sender, port, str(total), str(BLOCK)]
        with subprocess.Popen(command) as process:
            peer, _ = listener.accept()
            with peer:
                begun = time.perf_counter()
                peer.send(b"!")
                for part in target:
                    left = part.data
                    while left.nbytes:
                        left = left[peer.recv_into(left) :]
                seconds = time.perf_counter() - begun
            process.wait(timeout=30)
    return total / seconds / 1e9


def certificates(folder: Path, why: dict[str, str]) -> dict[str, str]:
    """An authority and one certificate that both stores use; empty without openssl."""
    subject = "/CN=mooncake-bench"
    alt = "subjectAltName=DNS:mooncake-peer"
    ca, key, request, own = (folder / name for name in ("ca.pem", "key.pem", "csr", "own.pem"))
    extensions = folder / "extensions"
    extensions.write_text(alt)
    elliptic = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    commands: list[list[Any]] = [
        ["req", "-x509", *elliptic, "-keyout", f"{ca}.key", "-out", ca, "-subj", "/CN=authority"],
        ["req", *elliptic, "-keyout", key, "-out", request, "-subj", subject],
        ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", f"{ca}.key", "-CAcreateserial"],
    ]
    commands[-1] += ["-out", own, "-extfile", extensions]
    try:
        for command in commands:
            subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why["peer_fetch.ours_tls_gb_s"] = f"openssl made no certificate ({error})"
        return {}
    return {"tls_ca": str(ca), "tls_certificate": str(own), "tls_key": str(key)}


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
