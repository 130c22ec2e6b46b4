"""The protocol from outside: malformed frames end their session and nothing else."""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import random
import signal
import socket as sockets
import struct
import time
from pathlib import Path

import pytest

from mooncake_serve.errors import StoreProtocolError
from mooncake_serve.store import BlockShape, StoreClient, StoreServer
from tests.store.processes import chain
from tests.waiting import eventually

HELLO, MATCH, LEASE, RELEASE, PUT = 1, 2, 3, 4, 6
FAILED = 255


def frame(op: int, payload: bytes = b"", *, version: int = 4, seq: int = 7) -> bytes:
    return struct.pack("<IBBHQ", len(payload), version, op, 0, seq) + payload


def hello(path: Path, ingest_bytes: int = 0) -> tuple[sockets.socket, list[int]]:
    """A session by hand, and the fds the store passed."""
    raw = sockets.socket(sockets.AF_UNIX)
    raw.settimeout(20)
    raw.connect(str(path))
    raw.sendall(frame(HELLO, struct.pack("<Q", ingest_bytes)))
    fds = array.array("i")
    _, control, _, _ = raw.recvmsg(4096, sockets.CMSG_SPACE(16))
    for _, _, data in control:
        fds.frombytes(data)
    return raw, list(fds)


def answer(raw: sockets.socket) -> tuple[int, bytes]:
    header = raw.recv(16, sockets.MSG_WAITALL)
    if not header:
        return 0, b""
    length, _, op, _, _ = struct.unpack("<IBBHQ", header)
    return op, raw.recv(length, sockets.MSG_WAITALL) if length else b""


@pytest.mark.parametrize(
    "garbage",
    [
        frame(99),
        frame(MATCH, bytes(7) + b"\xff\xff\xff\xff"),
        frame(MATCH, bytes(6) + b"\x02\xff\xfe" + struct.pack("<I", 0)),
        frame(LEASE, bytes(16) + struct.pack("<I", 8193) + bytes(32)),
        struct.pack("<IBBHQ", 1 << 30, 4, MATCH, 0, 0),
        frame(HELLO, struct.pack("<Q", 0)),
        frame(RELEASE, struct.pack("<I", 1) + bytes(7)),
        os.urandom(64),
    ],
)
def test_a_malformed_frame_closes_only_its_session(
    server: StoreServer, client: StoreClient, garbage: bytes
) -> None:
    raw, fds = hello(server.socket)
    raw.sendall(garbage)
    op, message = answer(raw)
    assert (op, message[0]) == (FAILED, 1)
    assert answer(raw) == (0, b"")
    raw.close()
    for fd in fds:
        os.close(fd)
    client.ping()
    eventually(lambda: client.stats()["sessions"] == 1)
    assert client.stats()["sessions_violated"] == 1


def test_random_bytes_never_hurt_the_store(
    server: StoreServer, client: StoreClient, seed: int
) -> None:
    rng = random.Random(seed)
    keys, parents = chain("a", 4)
    client.put(keys, parents, [b"x" * 64] * 4, BlockShape.opaque(64))
    for _ in range(60):
        raw, fds = hello(server.socket)
        payload = rng.randbytes(rng.randrange(200))
        with raw, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(frame(rng.randrange(256), payload))
            raw.sendall(rng.randbytes(rng.randrange(1, 40)))
        for fd in fds:
            os.close(fd)
    eventually(lambda: client.stats()["sessions"] <= 2)
    assert client.match(keys) == 4


def test_another_wire_version_is_named(server: StoreServer) -> None:
    raw = sockets.socket(sockets.AF_UNIX)
    raw.connect(str(server.socket))
    raw.sendall(frame(HELLO, struct.pack("<Q", 0), version=9))
    op, message = answer(raw)
    assert op == FAILED
    assert b"wire version 9" in message
    raw.close()


def test_a_client_names_another_version_too(socket: Path) -> None:
    listener = sockets.socket(sockets.AF_UNIX)
    listener.bind(str(socket))
    listener.listen()
    child = os.fork()
    if child == 0:
        peer, _ = listener.accept()
        peer.sendall(frame(129, bytes(28), version=9))
        time.sleep(60)
        os._exit(0)
    try:
        with pytest.raises(StoreProtocolError, match="wire version 9"):
            StoreClient.connect(socket)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listener.close()


def test_requests_before_hello_and_foreign_tokens_change_nothing(
    server: StoreServer, client: StoreClient
) -> None:
    keys, parents = chain("a", 1)
    client.put(keys, parents, [b"x" * 64], BlockShape.opaque(64))
    held = client.lease(keys)
    raw = sockets.socket(sockets.AF_UNIX)
    raw.connect(str(server.socket))
    raw.sendall(frame(MATCH, bytes(7) + struct.pack("<I", 0)))
    assert answer(raw)[0] == FAILED
    raw.close()
    raw, fds = hello(server.socket)
    tokens = [0, 1, 1 << 32, (1 << 64) - 1]
    raw.sendall(frame(RELEASE, struct.pack("<I4Q", len(tokens), *tokens)))
    eventually(lambda: client.stats()["invalid_releases"] == len(tokens))
    assert client.stats()["leases"] == len(held) == 1
    raw.close()
    for fd in fds:
        os.close(fd)


def test_the_arena_cannot_be_written_resized_or_punched_by_a_client(server: StoreServer) -> None:
    raw, (arena, ingest) = hello(server.socket, ingest_bytes=1 << 20)
    size = os.fstat(arena).st_size
    assert mmap.mmap(arena, size, prot=mmap.PROT_READ)[:1] == b"\0"
    with pytest.raises(PermissionError):
        mmap.mmap(arena, size, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    for fd in (arena, ingest):
        for other in (0, 2 * size):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, other)
    with pytest.raises(PermissionError):
        os.pwrite(arena, b"x", 0)
    own = mmap.mmap(ingest, 1 << 20)
    own[:4] = b"mine"
    raw.close()
    os.close(arena)
    os.close(ingest)


def test_blocks_outside_the_put_buffer_are_refused(
    server: StoreServer, client: StoreClient
) -> None:
    raw, fds = hello(server.socket, ingest_bytes=1 << 16)
    shape = struct.pack("<BIII", 0, 1, 1, 4096)
    for offset in (1 << 16, (1 << 16) - 4095, (1 << 64) - 1):
        item = bytes([1]) * 32 + bytes(32) + struct.pack("<Q", offset)
        raw.sendall(frame(PUT, shape + bytes(7) + struct.pack("<I", 1) + item))
        op, message = answer(raw)
        assert (op, message[0]) == (FAILED, 0)
        assert b"outside the put buffer" in message
    assert client.match([bytes([1]) * 32]) == 0
    raw.close()
    for fd in fds:
        os.close(fd)


def test_a_client_that_stops_in_the_middle_of_a_put_stores_nothing(
    server: StoreServer, client: StoreClient
) -> None:
    raw, (arena, ingest) = hello(server.socket, ingest_bytes=1 << 16)
    own = mmap.mmap(ingest, (1 << 16) + 4096)
    own[:8192] = b"x" * 8192
    own[1 << 16 : (1 << 16) + 8] = struct.pack("<Q", 4096)
    (key,), parents = chain("half", 1)
    shape = struct.pack("<BIII", 0, 2, 1, 4096)
    item = key + bytes(32) + struct.pack("<Q", 0)
    raw.sendall(frame(PUT, shape + bytes(7) + struct.pack("<I", 1) + item))
    op, message = answer(raw)
    assert (op, message[0]) == (FAILED, 0)
    assert b"wrote nothing" in message
    assert client.match([key]) == 0
    assert client.stats()["logical_bytes"] == 0
    whole = BlockShape("opaque", 2, 1, 4096)
    assert client.put([key], parents, [b"y" * 8192], whole) == ["stored"]
    raw.sendall(frame(PUT, shape + bytes(7) + struct.pack("<I", 1) + item))
    assert answer(raw)[0] != FAILED  # It is there already: nothing is copied.
    own.close()
    raw.close()
    os.close(arena)
    os.close(ingest)


def test_a_session_that_broke_the_protocol_is_quarantined_until_its_process_is_dead(
    server: StoreServer, client: StoreClient
) -> None:
    keys, parents = chain("a", 1)
    client.put(keys, parents, [b"x" * 4096], BlockShape.opaque(4096))
    child = os.fork()
    if child == 0:
        raw, _ = hello(server.socket)
        raw.sendall(frame(LEASE, bytes(16) + struct.pack("<I", 1) + keys[0]))
        answer(raw)
        raw.sendall(frame(99))
        raw.close()
        signal.pause()
        os._exit(0)
    try:
        eventually(lambda: client.stats()["quarantined_bytes"] > 0)
        client.evict(keys)
        assert client.stats()["quarantined_bytes"] > 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    eventually(lambda: client.stats()["quarantined_bytes"] == 0)
    eventually(lambda: client.stats()["sessions"] == 2)
