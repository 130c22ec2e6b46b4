"""The disk tier from outside: what survives, what is capped, and what a broken disk costs."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_serve.errors import ConfigError
from mooncake_serve.store import BlockShape, StoreClient, StoreServer
from tests.store.processes import MIB, Process, chain
from tests.waiting import eventually

SHAPE = BlockShape.opaque(MIB)
DISK = 96 * MIB


CAPS: dict[Path, int] = {}
"""Of the last store in a directory, where it is not `DISK`."""


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "nvme"
    yield path
    assert not path.exists() or on_disk(path) <= CAPS.get(path, DISK)


def block(number: int) -> bytes:
    """The same bytes for a number in every process."""
    return random.Random(number).randbytes(64) * (MIB // 64)


def disk_store(socket: Path, nvme: Path, dram: int = 32 * MIB, disk: int = DISK) -> StoreServer:
    CAPS[nvme] = disk
    return StoreServer(socket=socket, dram_bytes=dram, nvme_path=nvme, nvme_bytes=disk)


def fill(client: StoreClient, name: str, blocks: int) -> list[bytes]:
    keys, parents = chain(name, blocks)
    statuses = client.put(keys, parents, [block(at) for at in range(blocks)], SHAPE)
    assert statuses == ["stored"] * blocks
    return keys


def read(client: StoreClient, keys: list[bytes]) -> int:
    """How many leading blocks come back; each must be right."""
    buffers = [bytearray(MIB) for _ in keys]
    got = client.read_into(keys, buffers, timeout_s=30.0)
    assert all(buffers[at] == block(at) for at in range(got))
    return got


def on_disk(nvme: Path) -> int:
    """What `du` shows."""
    out = subprocess.run(["du", "-s", "-B1", nvme], capture_output=True, check=True, timeout=60)
    return int(out.stdout.split()[0])


def test_blocks_survive_kill_at_any_moment(socket: Path, nvme: Path, seed: int) -> None:
    rng = random.Random(seed)
    names: list[str] = []
    for round_ in range(6):
        with Process("disk_store", socket, nvme, 32 * MIB, DISK) as process:
            with StoreClient.connect(socket, timeout_s=30.0) as client:
                for name in names:
                    keys, _ = chain(name, 8)
                    assert read(client, keys[: client.match(keys)]) == client.match(keys)
                names.append(f"seed {seed} round {round_}")
                keys = fill(client, names[-1], 8)
                # Blocks that are read again go to disk by themselves.
                assert read(client, keys) == 8
                time.sleep(rng.uniform(0.0, 0.5))
                process.kill()
    with disk_store(socket, nvme), StoreClient.connect(socket) as client:
        assert client.stats()["nvme_recovered_blocks"] > 0
        assert client.stats()["corrupt_dropped"] == 0
        assert on_disk(nvme) <= DISK


def test_what_was_drained_is_there_after_kill(socket: Path, nvme: Path) -> None:
    with Process("disk_store", socket, nvme, 32 * MIB, DISK) as process:
        with StoreClient.connect(socket, timeout_s=30.0) as client:
            keys = fill(client, "a", 16)
            assert client.drain(timeout_s=60.0) <= 16
            assert client.stats()["nvme_blocks"] == 16
            assert client.drain(timeout_s=60.0) == 0
            process.kill()
    with disk_store(socket, nvme), StoreClient.connect(socket) as client:
        assert client.stats()["nvme_recovered_blocks"] == 16
        assert client.match(keys) == 16
        assert read(client, keys) == 16
        assert client.stats()["nvme_recovery_read_bytes"] <= 12 * 16 * 1024


def test_the_cap_is_what_du_shows_and_what_is_read_stays(socket: Path, nvme: Path) -> None:
    with disk_store(socket, nvme) as server, StoreClient.connect(socket) as client:
        kept = fill(client, "kept", 4)
        for round_ in range(12):
            fill(client, f"passing {round_}", 12)
            server.drain()
            # What is asked for again and again is moved when its segment goes.
            assert read(client, kept) == 4
            assert on_disk(nvme) <= DISK
        stats = client.stats()
        assert stats["nvme_dropped"] > 50
        assert stats["nvme_allocated_bytes"] <= DISK


def test_a_prefix_larger_than_memory_is_read_from_disk(socket: Path, nvme: Path) -> None:
    with disk_store(socket, nvme, disk=128 * MIB) as server, StoreClient.connect(socket) as client:
        keys, parents = chain("long", 48)
        for at in range(48):
            (status,) = client.put([keys[at]], [parents[at]], [block(at)], SHAPE)
            assert status == "stored"
            server.drain()
        assert client.stats()["capacity_bytes"] < 32 * MIB
        assert client.match(keys) == 48
        assert read(client, keys) == 48


def test_readers_learn_where_blocks_were(socket: Path, nvme: Path) -> None:
    with disk_store(socket, nvme) as server, StoreClient.connect(socket) as client:
        keys, buffers = fill(client, "a", 8), [bytearray(MIB) for _ in range(8)]
        server.drain()
        for wanted in ("dram", "nvme"):
            if wanted == "nvme":
                assert client.cool() == 8
            origins: dict[str, int] = {}
            assert client.read_into(keys, buffers, timeout_s=30.0, origins=origins) == 8
            assert origins == {wanted: 8}
        assert client.cool() == 8
        with client.open(keys, buffers, timeout_s=30.0) as reading:
            assert reading.origins() == {"nvme": 8}
        assert client.stats()["lease_hits_dram"] == 8


def test_what_was_just_released_can_be_cooled(socket: Path, nvme: Path) -> None:
    with disk_store(socket, nvme) as server, StoreClient.connect(socket) as client:
        keys = fill(client, "a", 8)
        server.drain()
        for _ in range(100):
            for lease in client.lease(keys):
                lease.release()
            assert client.cool() == 8


def test_a_match_is_not_held_up_by_a_load(socket: Path, nvme: Path) -> None:
    with disk_store(socket, nvme) as server, StoreClient.connect(socket) as client:
        keys = fill(client, "a", 8)
        server.drain()
        client.lease(keys[:1])
        # Match, lease and put each have a session of their own.
        eventually(lambda: client.stats()["sessions"] == 3)
        assert client.match(keys) == 8


def test_a_second_store_in_the_directory_is_refused(socket: Path, nvme: Path) -> None:
    with disk_store(socket, nvme):
        other = disk_store(socket.with_name("other.sock"), nvme)
        with pytest.raises(ConfigError, match="another store uses"):
            other.start()


def test_wrong_sizes_and_directories_name_the_field(socket: Path, nvme: Path) -> None:
    with pytest.raises(ConfigError, match=r"nvme\.bytes"):
        disk_store(socket, nvme, disk=2 * MIB).start()
    nvme.mkdir(exist_ok=True)
    (nvme / "identity").write_text("of something else\n")
    with pytest.raises(ConfigError, match=r"nvme.path.*empty the directory"):
        disk_store(socket, nvme).start()


def test_a_directory_without_direct_io_is_served_with_a_warning(socket: Path) -> None:
    memory = Path("/dev/shm") / f"mooncake-test-{os.getpid()}"
    try:
        with disk_store(socket, memory) as server, StoreClient.connect(socket) as client:
            keys = fill(client, "a", 4)
            assert server.drain() == 4
            assert client.match(keys) == 4
            if not client.stats()["nvme_direct_io"]:
                assert any("page cache" in warning for warning in server.warnings)
    finally:
        subprocess.run(["rm", "-rf", memory], check=True, timeout=60)


def test_operators_look_check_pin_and_cool(socket: Path, nvme: Path) -> None:
    with disk_store(socket, nvme) as server, StoreClient.connect(socket) as client:
        keys = fill(client, "a", 6)
        server.drain()
        rows = {row["key"]: row for row in client.list()}
        assert set(rows) == set(keys)
        assert all(row["dram_bytes"] == row["nvme_bytes"] > MIB for row in rows.values())
        assert client.verify() == {
            "checked": 12,
            "corrupt": 0,
            "bytes": sum(row["dram_bytes"] + row["nvme_bytes"] for row in rows.values()),
        }
        assert client.pin(keys[:1]) == 1
        assert client.pin(keys[1:2], ttl_s=3600) == 1
        assert client.cool() == 4
        assert client.stats()["blocks"] == 2
        assert read(client, keys) == 6
        assert client.unpin(keys) == 2
        assert client.cool() == 6


def test_pins_keep_blocks_and_have_a_quota(socket: Path, nvme: Path) -> None:
    with StoreServer(socket=socket, dram_bytes=32 * MIB), StoreClient.connect(socket) as client:
        keys = fill(client, "kept", 12)
        quota = client.stats()["capacity_bytes"] // 4
        pinned = client.pin(keys)
        assert 2 <= pinned < 12
        assert client.stats()["pinned_bytes"] <= quota
        for round_ in range(4):
            fill(client, f"passing {round_}", 8)
        assert client.match(keys) >= pinned


def test_verify_finds_damage_on_disk(socket: Path, nvme: Path) -> None:
    with disk_store(socket, nvme) as server, StoreClient.connect(socket) as client:
        keys = fill(client, "a", 3)
        server.drain()
    log = nvme / "blocks.log"
    at = log.read_bytes().find(block(1)[:64])
    with log.open("r+b") as file:
        file.seek(at + 5000)
        file.write(b"?")
    with disk_store(socket, nvme), StoreClient.connect(socket) as client:
        assert client.verify()["corrupt"] == 1
        assert client.match(keys) == 1


def test_damaged_bytes_on_disk_are_misses(socket: Path, nvme: Path) -> None:
    with disk_store(socket, nvme) as server, StoreClient.connect(socket) as client:
        keys = fill(client, "a", 6)
        server.drain()
    log = nvme / "blocks.log"
    at = log.read_bytes().find(block(3)[:64])
    assert at > 0
    with log.open("r+b") as file:
        file.seek(at + 1000)
        file.write(b"?")
    with disk_store(socket, nvme), StoreClient.connect(socket) as client:
        assert client.match(keys) == 6
        assert read(client, keys) == 3
        assert client.match(keys) == 3
        assert client.stats()["nvme_read_misses"] == 1


def test_a_smaller_cap_takes_effect_at_the_next_start(socket: Path, nvme: Path) -> None:
    with disk_store(socket, nvme) as server, StoreClient.connect(socket) as client:
        for round_ in range(6):
            fill(client, f"{round_}", 12)
            server.drain()
    assert on_disk(nvme) > 48 * MIB
    with disk_store(socket, nvme, disk=48 * MIB), StoreClient.connect(socket) as client:
        assert on_disk(nvme) <= 48 * MIB
        assert client.stats()["nvme_recovered_blocks"] > 0
