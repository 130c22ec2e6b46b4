"""Processes that are killed, stopped and forked: nothing leaks, nothing hangs, nothing is wrong."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from mooncake_serve.errors import StoreError, StoreTimeout, StoreUnavailable
from mooncake_serve.store import BlockShape, Lease, NodeStore, StoreClient, StoreServer
from tests.store.processes import MIB, Process, chain, store
from tests.waiting import eventually

SHAPE = BlockShape.opaque(256 * 1024)


def fill(client: StoreClient, name: str, blocks: int) -> tuple[list[bytes], list[bytes]]:
    keys, parents = chain(name, blocks)
    data = [os.urandom(SHAPE.nbytes) for _ in keys]
    assert client.put(keys, parents, data, SHAPE) == ["stored"] * blocks
    return keys, data


def test_a_killed_reader_gives_its_leases_back(server: StoreServer, client: StoreClient) -> None:
    shm = set(os.listdir("/dev/shm"))
    fill(client, "a", 8)
    with Process("hold_leases", server.socket, "a", 8) as reader:
        assert reader.said == "8 leases"
        assert client.stats()["leases"] == 8
        reader.kill()
    eventually(lambda: client.stats()["leased_bytes"] == 0)
    eventually(lambda: client.stats()["sessions"] == 2)
    assert set(os.listdir("/dev/shm")) == shm


def test_death_is_seen_even_while_a_child_holds_the_socket(
    server: StoreServer, client: StoreClient
) -> None:
    fill(client, "a", 2)
    with Process("hold_leases_forked", server.socket, "a", 2) as reader:
        child = int(reader.said)
        try:
            eventually(lambda: client.stats()["leases"] == 1)
            reader.kill()
            eventually(lambda: client.stats()["leases"] == 0)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_stopped_reader_keeps_its_leases(server: StoreServer, client: StoreClient) -> None:
    keys, _ = fill(client, "a", 4)
    with Process("hold_leases", server.socket, "a", 4) as reader:
        reader.stop()
        client.evict(keys)
        fill(client, "b", 8)
        time.sleep(0.5)
        assert client.stats()["leases"] == 4, "time never frees memory"
        reader.signal(signal.SIGCONT)
        reader.kill()
    eventually(lambda: client.stats()["leases"] == 0)


def test_a_stopped_readers_bytes_stay_as_they_are_while_memory_runs_out(
    server: StoreServer, client: StoreClient
) -> None:
    keys, data = fill(client, "a", 8)
    digest = hashlib.sha256(b"".join(data)).hexdigest()
    with Process("hold_and_read", server.socket, "a", 8) as reader:
        assert reader.said == digest
        reader.stop()
        assert client.evict(keys) == 8
        held: list[Lease | None] = []
        while True:
            more, parents = chain(f"b{len(held)}", 1)
            (status,) = client.put(more, parents, [os.urandom(SHAPE.nbytes)], SHAPE)
            if status != "stored" or len(held) > 1000:
                break
            held += client.lease(more)
        assert status.startswith("refused: full")
        assert client.stats()["leases"] == len(held) + 8
        reader.signal(signal.SIGCONT)
        reader.signal(signal.SIGUSR1)
        assert reader.listen() == digest, "what a stopped reader leased was reused"
    eventually(lambda: client.stats()["leases"] == len(held))
    assert client.put(keys, [None, *keys[:-1]], data, SHAPE) == ["stored"] * 8


def test_a_store_out_of_descriptors_serves_who_it_has_and_recovers(socket: Path) -> None:
    with Process("few_fds_store", socket, 64 * MIB, 64) as process:
        old = StoreClient.connect(socket, timeout_s=20.0)
        keys, data = fill(old, "a", 2)
        others: list[StoreClient] = []
        while len(others) < 100 and (other := connected(socket)) is not None:
            others.append(other)
        assert 4 < len(others) < 100
        assert len(os.listdir(f"/proc/{process.pid}/fd")) <= 64
        buffers = [bytearray(SHAPE.nbytes) for _ in keys]
        assert old.read_into(keys, buffers) == 2
        assert buffers == data
        for other in others:
            other.close()
        again = eventually(lambda: connected(socket))
        assert again is not None
        assert again.match(keys) == 2
        eventually(lambda: old.stats()["sessions"] == 3)
        again.close()
        old.close()


def connected(socket: Path) -> StoreClient | None:
    try:
        return StoreClient.connect(socket, timeout_s=2.0)
    except StoreError:
        return None


def test_a_writer_killed_in_the_middle_leaves_whole_blocks_only(
    server: StoreServer, client: StoreClient, seed: int
) -> None:
    rng = random.Random(seed)
    nbytes = 2 * MIB
    for round_ in range(5):
        with Process("put_for_ever", server.socket, f"w{round_}", nbytes) as writer:
            time.sleep(rng.uniform(0.0, 0.3))
            writer.kill()
        eventually(lambda: client.stats()["sessions"] == 1)
        stats = client.stats()
        assert (stats["reserved_bytes"], stats["leased_bytes"]) == (0, 0)
        assert stats["ingest_free_bytes"] == 16 * MIB
        buffers = [bytearray(nbytes) for _ in range(4)]
        for chain_number in range(400):
            keys, _ = chain(f"w{round_}/{chain_number}", 4)
            matched = client.match(keys)
            assert client.read_into(keys[:matched], buffers[:matched]) == matched
            expected = bytes([chain_number % 256]) * nbytes
            assert all(buffer == expected for buffer in buffers[:matched])
        assert client.stats()["corrupt_dropped"] == 0


def test_a_stopped_store_times_out_and_the_connection_is_over(socket: Path) -> None:
    with store(socket) as process:
        client = StoreClient.connect(socket)
        keys, data = fill(client, "a", 2)
        process.stop()
        with pytest.raises(StoreTimeout):
            client.match(keys, timeout_s=0.05)
        with pytest.raises(StoreUnavailable, match="connect again"):
            client.match(keys, timeout_s=0.05)
        with pytest.raises(StoreTimeout):
            StoreClient.connect(socket, timeout_s=0.05)
        with pytest.raises(StoreTimeout):
            client.put(keys, [None, keys[0]], data, SHAPE, timeout_s=0.05)
        process.signal(signal.SIGCONT)
        again = eventually(lambda: StoreClient.connect(socket))
        assert again.match(keys) == 2
        client.close()
        eventually(lambda: again.stats()["sessions"] == 1)


def test_a_killed_store_is_unavailable_and_its_successor_has_another_epoch(socket: Path) -> None:
    with store(socket) as process:
        client = StoreClient.connect(socket)
        keys, data = fill(client, "a", 1)
        (lease,) = client.lease(keys)
        assert client.server_pid == process.pid
        process.kill()
        with pytest.raises(StoreUnavailable):
            client.ping()
        assert lease is not None
        assert bytes(lease) == data[0]
    with store(socket):
        again = StoreClient.connect(socket)
        assert again.epoch != client.epoch
        assert again.match(keys) == 0


def test_a_forked_child_can_neither_use_nor_end_its_parents_session(
    server: StoreServer, client: StoreClient
) -> None:
    keys, _ = fill(client, "a", 1)
    (lease,) = client.lease(keys)
    assert lease is not None
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (lambda: client.match(keys), lambda: memoryview(lease)):
            try:
                call()
            except (StoreUnavailable, ValueError):
                refused += 1
        client.close()
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2
    assert client.match(keys) == 1
    assert client.stats()["leases"] == 1
    assert lease.verify()


def test_node_store_serves_without_the_store_and_heals(socket: Path) -> None:
    keys, parents = chain("a", 2)
    data = [os.urandom(SHAPE.nbytes) for _ in keys]
    buffers = [bytearray(SHAPE.nbytes) for _ in keys]
    node = NodeStore(str(socket))
    assert (node.healthy, node.match(keys), node.read_into(keys, buffers)) == (False, 0, 0)
    assert node.put(keys, parents, data, SHAPE)[0].startswith("refused")
    with store(socket) as process:
        assert node.wait_until_healthy(20)
        assert node.put(keys, parents, data, SHAPE) == ["stored"] * 2
        assert node.read_into(keys, buffers) == 2
        assert buffers == data
        process.stop()
        assert node.match(keys) == 0
        assert not node.healthy
        assert node.stats().timeouts == 1
        assert node.read_into(keys, buffers) == 0
        eventually(lambda: node.seconds_unresponsive > 0)
        assert node.server_pid == process.pid
        process.signal(signal.SIGCONT)
        assert node.wait_until_healthy(20)
        eventually(lambda: node.seconds_unresponsive == 0)
        eventually(lambda: node.match(keys) == 2)
        epoch = node.epoch
        process.kill()
        assert node.match(keys) == 0
        eventually(lambda: node.seconds_unresponsive == 0)
    with store(socket):
        assert node.wait_until_healthy(20)
        assert node.epoch != epoch
        assert (node.match(keys), node.stats().epoch_changes) == (0, 1)
    node.close()
    assert node.match(keys) == 0


def test_node_store_refusals_do_not_open_the_circuit(socket: Path) -> None:
    with StoreServer(socket=socket, dram_bytes=16 * MIB, ingest_bytes_max=MIB):
        node = NodeStore(str(socket))
        keys, parents = chain("a", 1)
        big = BlockShape.opaque(2 * MIB)
        assert node.put(keys, parents, [bytes(2 * MIB)], big)[0].startswith("refused")
        assert node.healthy
        assert node.stats().refused_blocks == 1
        node.close()


def test_a_forked_child_of_the_store_leaves_it_alone(socket: Path) -> None:
    with StoreServer(socket=socket, dram_bytes=16 * MIB) as server:
        child = os.fork()
        if child == 0:
            server.stop()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert socket.exists()
        with StoreClient.connect(socket) as client:
            client.ping()


def test_a_draining_stop_answers_what_has_arrived(socket: Path) -> None:
    server = StoreServer(socket=socket, dram_bytes=64 * MIB)
    server.start()
    client = StoreClient.connect(socket)
    outcomes: list[object] = []

    def put_until_it_ends() -> None:
        for number in range(100_000):
            keys, parents = chain(str(number), 8)
            try:
                outcomes.append(client.put(keys, parents, [bytes(SHAPE.nbytes)] * 8, SHAPE))
            except StoreUnavailable as error:
                outcomes.append(error)
                return

    thread = threading.Thread(target=put_until_it_ends)
    thread.start()
    eventually(lambda: len(outcomes) > 3)
    server.stop(drain=True)
    thread.join()
    assert outcomes[:-1] == [["stored"] * 8] * (len(outcomes) - 1)
    assert "connect again" in str(outcomes[-1])
    assert not server.is_running
