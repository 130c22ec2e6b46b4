"""A real file system that runs out of space, and one that fails: serving goes on from memory.

The file systems are a tmpfs of fixed size, a ramfs, which can neither reserve space nor bypass the
page cache, and an ext4 on a loop device whose backing file is cut, so that reads end in EIO. All
need the right to mount.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooncake_serve.store import StoreClient
from tests.store.processes import MIB
from tests.store.test_nvme import disk_store, fill, on_disk, read
from tests.waiting import eventually


def sh(*command: object) -> None:
    """Run it, or skip the test: the machine does not allow it."""
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, capture_output=True, timeout=60)
    if done.returncode:
        pytest.skip(f"{command[0]}: {done.stderr.decode().strip()}")


@contextmanager
def mounted(at: Path, *options: object) -> Iterator[Path]:
    at.mkdir()
    sh("mount", *options, at)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True, timeout=60)


def test_a_full_disk_costs_no_block_in_memory_and_heals(socket: Path, tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=24M", "tmpfs") as small,
        disk_store(socket, small / "nvme", disk=256 * MIB),
        StoreClient.connect(socket, timeout_s=30.0) as client,
    ):
        for name in range(12):
            keys = fill(client, f"full {name}", 4)
            assert read(client, keys) == 4
            client.drain()
        stats = client.stats()
        assert (stats["nvme_full"], stats["nvme_alert"], stats["nvme_serving"]) == (1, 1, 1)
        assert on_disk(small) <= 24 * MIB
        assert read(client, fill(client, "while full", 4)) == 4
        sh("mount", "-o", "remount,size=200M", small)
        eventually(lambda: client.drain() >= 0 and client.stats()["nvme_full"] == 0)
        before = client.stats()["nvme_allocated_bytes"]
        for name in range(12):
            fill(client, f"more {name}", 4)
            client.drain()
        assert client.stats()["nvme_allocated_bytes"] > before


def test_a_file_system_without_direct_io_and_reservations_serves_with_a_warning(
    socket: Path, tmp_path: Path
) -> None:
    with (
        mounted(tmp_path / "plain", "-t", "ramfs", "ramfs") as plain,
        disk_store(socket, plain / "nvme") as server,
        StoreClient.connect(socket, timeout_s=30.0) as client,
    ):
        keys = fill(client, "plain", 8)
        assert client.drain() == 8
        assert client.cool() == 8
        assert read(client, keys) == 8
        stats = client.stats()
        assert (stats["nvme_direct_io"], stats["nvme_serving"], stats["nvme_alert"]) == (0, 1, 0)
        assert (stats["nvme_switched_off"], stats["nvme_write_errors"]) == (0, 0)
        assert any("page cache" in warning for warning in server.warnings)


def test_a_failing_disk_costs_blocks_but_no_answer(socket: Path, tmp_path: Path) -> None:
    backing = tmp_path / "backing"
    backing.touch()
    sh("truncate", "-s", "128M", backing)
    sh("mkfs.ext4", "-q", "-F", backing)
    with (
        mounted(tmp_path / "disk", "-o", "loop", backing) as disk,
        disk_store(socket, disk / "nvme", disk=64 * MIB),
        StoreClient.connect(socket, timeout_s=30.0) as client,
    ):
        keys = fill(client, "before", 8)
        assert client.drain() == 8
        client.cool()
        sh("truncate", "-s", "1M", backing)
        assert read(client, keys) < 8, "its bytes are gone"
        stats = client.stats()
        assert stats["nvme_read_errors"] + stats["nvme_read_misses"] > 0
        assert read(client, fill(client, "from memory", 4)) == 4
