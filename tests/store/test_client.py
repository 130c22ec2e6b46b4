"""match, lease, read_into, put and evict against a store in this process."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from pathlib import Path

import pytest

from mooncake_serve.errors import StoreRefused, StoreUnavailable
from mooncake_serve.store import BlockShape, StoreClient, StoreServer
from tests.store.processes import MIB, chain

SHAPE = BlockShape("bfloat16", 4, 16, 32)
THREADS = pytest.mark.parametrize("threads", [1, 2, 7])
"""Threads that copy: one, several, more than blocks."""


def blocks(count: int, nbytes: int = SHAPE.nbytes) -> list[bytes]:
    return [os.urandom(nbytes) for _ in range(count)]


@THREADS
def test_what_is_put_is_read_back_and_runs_end_at_the_first_miss(
    client: StoreClient, threads: int
) -> None:
    keys, parents = chain("a", 5)
    data = blocks(4)
    assert client.match(keys) == 0
    assert client.put(keys[:4], parents[:4], data, SHAPE, "acme") == ["stored"] * 4
    assert client.put(keys[:4], parents[:4], data, SHAPE, "acme") == ["present"] * 4
    assert client.match(keys) == 4
    buffers = [bytearray(SHAPE.nbytes) for _ in keys]
    assert client.read_into(keys, buffers, threads=threads) == 4
    assert buffers[:4] == data
    assert client.evict([keys[2]]) == 1
    assert client.match(keys) == 2
    assert client.read_into(keys, buffers, threads=threads) == 2
    assert [lease is not None for lease in client.lease(keys)] == [True, True, False, True, False]
    stats = client.stats()
    assert (stats["blocks"], stats["leases"]) == (3, 0)
    assert stats["logical_bytes"] == 3 * SHAPE.nbytes
    assert stats["tenants"]["acme"]["blocks"] == 3


def test_a_lease_is_a_read_only_view_until_it_is_released(
    server: StoreServer, client: StoreClient
) -> None:
    keys, parents = chain("a", 1)
    data = blocks(1)
    client.put(keys, parents, data, SHAPE)
    (lease,) = client.lease(keys)
    assert lease is not None
    view = memoryview(lease)
    assert (view.readonly, bytes(view), lease.key) == (True, data[0], keys[0])
    assert ctypes.addressof(ctypes.c_char.from_buffer_copy(view)) != 0
    assert lease.verify()
    client.evict(keys)
    assert (client.match(keys), bytes(view)) == (0, data[0])
    assert server.stats()["leased_bytes"] > 0
    with pytest.raises(BufferError, match="views"):
        lease.release()
    view.release()
    lease.release()
    lease.release()
    with pytest.raises(ValueError, match="released"):
        memoryview(lease)
    assert client.stats()["leased_bytes"] == 0
    assert client.stats()["invalid_releases"] == 0


def test_a_lease_outlives_its_client_and_its_store(socket: Path) -> None:
    server = StoreServer(socket=socket, dram_bytes=64 * MIB)
    server.start()
    client = StoreClient.connect(socket)
    keys, parents = chain("a", 1)
    data = blocks(1)
    client.put(keys, parents, data, SHAPE)
    (lease,) = client.lease(keys)
    assert lease is not None
    client.close()
    assert server.stats()["leases"] == 1
    with pytest.raises(StoreUnavailable, match="closed"):
        client.ping()
    server.stop()
    assert bytes(lease) == data[0]
    assert lease.verify()


@THREADS
def test_a_corrupt_block_is_a_miss_and_is_dropped(client: StoreClient, threads: int) -> None:
    keys, parents = chain("a", 3)
    data = blocks(3)
    client.put(keys, parents, data, SHAPE)
    flip_byte(client, keys[1], 100)
    buffers = [bytearray(SHAPE.nbytes) for _ in keys]
    assert client.read_into(keys, buffers, threads=threads) == 1
    assert client.match(keys) == 1
    assert client.stats()["corrupt_dropped"] == 1
    assert client.put(keys[1:2], parents[1:2], data[1:2], SHAPE) == ["stored"]
    assert client.read_into(keys, buffers, threads=threads) == 3
    assert buffers == data
    flip_byte(client, keys[2], SHAPE.nbytes - 1)
    (lease,) = client.lease(keys[2:])
    assert lease is not None
    assert not lease.verify()
    assert client.match(keys) == 2


@THREADS
def test_blocks_are_read_plane_by_plane(client: StoreClient, threads: int) -> None:
    keys, parents = chain("a", 4)
    data = blocks(3)
    client.put(keys[:3], parents[:3], data, SHAPE)
    buffers = [bytearray(SHAPE.nbytes) for _ in keys]
    plane = SHAPE.nbytes // SHAPE.planes
    with client.open(keys, buffers, threads=threads) as reading:
        assert len(reading) == 3
        assert client.stats()["leases"] == 3
        for first in (2, 0):
            assert reading.read_planes(first, first + 2) == 3
            part = slice(first * plane, (first + 2) * plane)
            assert [buffer[part] for buffer in buffers[:3]] == [each[part] for each in data]
        assert reading.read_planes(SHAPE.planes, SHAPE.planes + 1) == 0
    assert client.stats()["leases"] == 0
    assert len(reading) == 0
    with pytest.raises(ValueError, match="closed"):
        reading.read_planes(0, 1)
    with pytest.raises(ValueError, match="size"):
        client.open(keys[:2], [bytearray(SHAPE.nbytes), bytearray(8)])
    with client.open(keys, [bytearray(8) for _ in keys]) as other:
        assert len(other) == 0


@THREADS
def test_a_corrupt_plane_ends_the_reading_at_its_block(client: StoreClient, threads: int) -> None:
    keys, parents = chain("a", 3)
    data = blocks(3)
    client.put(keys, parents, data, SHAPE)
    flip_byte(client, keys[1], SHAPE.nbytes - 1)
    buffers = [bytearray(SHAPE.nbytes) for _ in keys]
    with client.open(keys, buffers, threads=threads) as reading:
        assert [reading.read_planes(plane, plane + 1) for plane in range(4)] == [3, 3, 3, 1]
        assert len(reading) == 1
    assert buffers[0] == data[0]
    assert client.stats()["corrupt_dropped"] == 1
    assert client.match(keys) == 1


def test_a_damaged_header_is_a_miss(client: StoreClient) -> None:
    keys, parents = chain("a", 1)
    client.put(keys, parents, blocks(1), SHAPE)
    flip_byte(client, keys[0], -100)
    assert client.lease(keys) == [None]
    assert client.match(keys) == 0


def flip_byte(client: StoreClient, key: bytes, at: int) -> None:
    """Damage a block as bad memory would, through the server's own mapping in this process."""
    (lease,) = client.lease([key])
    assert lease is not None
    maps = Path("/proc/self/maps").read_text()
    arena = re.compile(r"^(\w+)-(\w+) (r\S)-s .*memfd:mooncake-arena", re.M)
    found = [(int(a, 16), int(b, 16), mode) for a, b, mode in arena.findall(maps)]
    address = address_of(lease)
    (view,) = [start for start, end, mode in found if mode == "r-" and start <= address < end]
    (own,) = [start for start, _, mode in found if mode == "rw"]
    byte = ctypes.c_ubyte.from_address(own + (address - view) + at)
    byte.value ^= 0x10
    lease.release()


def address_of(buffer: object) -> int:
    import numpy as np

    return np.frombuffer(buffer, dtype=np.uint8).ctypes.data  # type: ignore[call-overload]


def test_concurrent_puts_of_one_chain_make_one_copy(
    server: StoreServer, client: StoreClient
) -> None:
    keys, parents = chain("a", 16)
    data = blocks(16, 256 * 1024)
    shape = BlockShape.opaque(256 * 1024)
    outcomes: list[list[str]] = []

    def put() -> None:
        with StoreClient.connect(server.socket, ingest_bytes=MIB, timeout_s=20.0) as mine:
            outcomes.append(mine.put(keys, parents, data, shape))
            assert mine.match(keys) == 16

    threads = [threading.Thread(target=put) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4
    for statuses in zip(*outcomes, strict=True):
        assert sorted(statuses) == ["present"] * 3 + ["stored"]
    assert server.stats()["blocks"] == 16
    buffers = [bytearray(256 * 1024) for _ in keys]
    assert client.read_into(keys, buffers) == 16
    assert buffers == data


def test_one_client_serves_many_threads(client: StoreClient) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            keys, parents = chain(name, 8)
            data = blocks(8)
            buffers = [bytearray(SHAPE.nbytes) for _ in keys]
            for _ in range(20):
                client.put(keys, parents, data, SHAPE)
                assert client.match(keys) == 8
                assert client.read_into(keys, buffers) == 8
                assert buffers == data
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_wrong_arguments_are_python_errors(client: StoreClient) -> None:
    keys, parents = chain("a", 2)
    data = blocks(2)
    with pytest.raises(ValueError, match="32 bytes"):
        client.match([b"short"])
    with pytest.raises(ValueError, match="the shape says"):
        client.put(keys, parents, [data[0], b"short"], SHAPE)
    with pytest.raises(ValueError, match="one per key"):
        client.put(keys, parents, data[:1], SHAPE)
    with pytest.raises(ValueError, match="parents"):
        client.put(keys, parents[:1], data, SHAPE)
    with pytest.raises(BufferError, match="writable"):
        client.read_into(keys, data)
    same = bytearray(SHAPE.nbytes)
    with pytest.raises((ValueError, BufferError), match="overlap"):
        client.read_into(keys, [same, same])
    with pytest.raises(ValueError, match="timeout_s"):
        client.ping(timeout_s=0)
    with pytest.raises(ValueError, match="unknown dtype"):
        BlockShape("int4", 1, 1, 1)
    with pytest.raises(ValueError, match="at most 65536 planes"):
        BlockShape("float32", 1 << 17, 1, 1)
    with pytest.raises(StoreRefused, match="tenant"):
        client.match(keys, "x" * 300)
    client.put(keys, parents, data, SHAPE)
    assert client.read_into(keys, [bytearray(3), bytearray(3)]) == 0


def test_batches_larger_than_the_put_buffer_go_in_pieces(server: StoreServer) -> None:
    keys, parents = chain("a", 24)
    shape = BlockShape.opaque(MIB)
    data = blocks(24, MIB)
    with StoreClient.connect(server.socket, ingest_bytes=2 * MIB, timeout_s=20.0) as client:
        assert client.put(keys, parents, data, shape) == ["stored"] * 24
        buffers = [bytearray(MIB) for _ in keys]
        assert client.read_into(keys, buffers) == 24
        assert buffers == data
        with pytest.raises(StoreRefused, match="put buffer"):
            client.put(keys[:1], [None], [bytes(4 * MIB)], BlockShape.opaque(4 * MIB))
