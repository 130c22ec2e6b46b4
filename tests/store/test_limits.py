"""Caps, limits and bad settings: each refused with a reason, none exceeded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncake_serve.errors import ConfigError, StoreRefused, StoreUnavailable
from mooncake_serve.store import BlockShape, StoreClient, StoreServer
from tests.store.processes import MIB, Process, chain, store
from tests.waiting import eventually


def test_the_cap_holds_and_every_put_is_accounted_for(socket: Path) -> None:
    shape = BlockShape.opaque(MIB)
    with store(socket, dram_mib=48) as process, StoreClient.connect(socket) as client:
        put: list[bytes] = []
        for number in range(30):
            keys, parents = chain(f"chain {number}", 4)
            data = [os.urandom(MIB) for _ in keys]
            assert client.put(keys, parents, data, shape) == ["stored"] * 4
            put += keys
            assert shared_memory(process) <= 48 * MIB
        stats = client.stats()
        readable = sum(lease is not None for lease in client.lease(put))
        assert stats["puts_stored"] == len(put)
        assert readable == stats["blocks"] == len(put) - stats["evicted_for_room"]
        assert readable > 0.4 * 48, "most of the memory holds blocks"


def shared_memory(process: Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("RssShmem")]
    return int(line.split()[1]) * 1024


def test_eviction_takes_leaves_before_their_parents(client: StoreClient) -> None:
    shape = BlockShape.opaque(MIB)
    capacity = client.stats()["capacity_bytes"] // MIB
    old, parents = chain("old", 8)
    client.put(old, parents, [bytes(MIB)] * 8, shape)
    keys, parents = chain("new", capacity - 4)
    client.put(keys, parents, [bytes(MIB)] * len(keys), shape)
    left = client.match(old)
    assert 0 < left < 8
    assert sum(lease is not None for lease in client.lease(old)) == left, "a prefix remains"
    assert client.match(keys) == len(keys)


def test_a_full_store_refuses_at_once_and_recovers(client: StoreClient) -> None:
    shape = BlockShape.opaque(MIB)
    keys, parents = chain("a", 200)
    client.put(keys, parents, [bytes(MIB)] * 200, shape)
    held = [lease for lease in client.lease(keys) if lease is not None]
    other, parents = chain("b", 2)
    statuses = client.put(other, parents, [bytes(MIB)] * 2, shape)
    assert statuses[0].startswith("refused: full")
    assert statuses[1].startswith("refused: parent absent")
    assert client.stats()["refused_full"] > 0
    held.clear()
    eventually(lambda: client.stats()["leased_bytes"] == 0)
    assert client.put(other, parents, [bytes(MIB)] * 2, shape) == ["stored"] * 2


def test_an_impossible_size_names_the_field_and_the_fix(socket: Path) -> None:
    for dram in (1 << 52, 1 << 40):
        with pytest.raises(ConfigError, match="dram_bytes") as caught:
            StoreServer(socket=socket, dram_bytes=dram).start()
        assert caught.value.field == "dram_bytes"
    with pytest.raises(ConfigError, match="raise it"):
        StoreServer(socket=socket, dram_bytes=MIB).start()
    assert not socket.exists()


def test_a_second_store_on_the_socket_is_told_who_has_it(server: StoreServer) -> None:
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        StoreServer(socket=server.socket, dram_bytes=16 * MIB).start()
    StoreClient.connect(server.socket).ping()


def test_the_socket_of_a_dead_store_is_taken_over(socket: Path) -> None:
    with store(socket) as process:
        process.kill()
        assert socket.exists()
        with pytest.raises(StoreUnavailable, match="start one"):
            StoreClient.connect(socket)
    with StoreServer(socket=socket, dram_bytes=16 * MIB), StoreClient.connect(socket) as client:
        client.ping()
    assert not socket.exists()


def test_a_directory_open_to_others_is_refused(socket: Path) -> None:
    socket.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        StoreServer(socket=socket, dram_bytes=16 * MIB).start()


def test_sessions_leases_and_put_buffers_are_limited(socket: Path) -> None:
    settings = {"max_sessions": 3, "max_leases": 2, "ingest_bytes_total": 2 * MIB}
    with StoreServer(socket=socket, dram_bytes=16 * MIB, **settings):
        first = StoreClient.connect(socket, ingest_bytes=8 * MIB)
        keys, parents = chain("a", 3)
        first.put(keys, parents, [b"x"] * 3, BlockShape.opaque(1))
        assert first.stats()["ingest_free_bytes"] == MIB - 4096, "the page of its count, too"
        with pytest.raises(StoreRefused, match="2 left"):
            first.lease(keys)
        assert len(first.lease(keys[:2])) == 2
        second = StoreClient.connect(socket)
        with pytest.raises(StoreRefused, match="max_sessions"):
            StoreClient.connect(socket)
        second.close()
        first.close()


def test_a_stopped_store_gives_everything_back(socket: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with StoreServer(socket=socket, dram_bytes=16 * MIB):
            clients = [StoreClient.connect(socket) for _ in range(4)]
            for client in clients:
                client.put(*chain("a", 1), [b"x"], BlockShape.opaque(1))
        for client in clients:
            client.close()
    assert len(os.listdir("/proc/self/fd")) == before
