"""What a pod gives: a memory limit that counts the arena, a /dev/shm of nothing, SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_serve.store import StoreClient
from tests.store.container import Cgroup, with_dev_shm
from tests.store.processes import MIB
from tests.waiting import WAIT_S

COMMAND = str(Path(sys.executable).with_name("mooncake-serve"))
LIMIT = 400 * MIB


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    try:
        made = Cgroup(LIMIT)
    except OSError as err:
        pytest.skip(f"no memory cgroup can be made here: {err.strerror}")
    yield made
    made.close()


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mk-") as folder:
        yield Path(folder) / "store.sock"


def start(command: list[str], path: Path) -> subprocess.Popen[str]:
    """A store that serves; asserts that it does."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = [process.stderr.readline(), process.stderr.readline()]
    assert str(path) in said[1], said
    return process


def end(process: subprocess.Popen[str]) -> None:
    """As a pod ends: SIGTERM, then patience."""
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0


def test_the_arena_counts_against_the_containers_limit(cgroup: Cgroup, path: Path) -> None:
    command = cgroup.command(COMMAND, "store", "--dram", "256MiB", "--socket", str(path))
    process = start(command, path)
    try:
        assert 200 * MIB < cgroup.usage <= LIMIT
    finally:
        end(process)


def test_more_than_the_limit_is_refused_not_killed(cgroup: Cgroup, path: Path) -> None:
    command = cgroup.command(COMMAND, "store", "--dram", "1GiB", "--socket", str(path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1, done.stderr
    assert "wants 1024 MiB" in done.stderr
    assert "container" in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")
def test_a_tiny_dev_shm_is_enough(path: Path) -> None:
    command = with_dev_shm("64k")
    process = start([*command, COMMAND, "store", "--dram", "64MiB", "--socket", str(path)], path)
    try:
        with StoreClient.connect(path, timeout_s=20) as client:
            client.ping()
    finally:
        end(process)
