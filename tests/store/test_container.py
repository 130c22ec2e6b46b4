"""What a pod gives: a memory limit that counts the arena, a /dev/shm of nothing, SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_serve.store import StoreClient
from tests.store.processes import MIB
from tests.waiting import WAIT_S, eventually

COMMAND = str(Path(sys.executable).with_name("mooncake-serve"))
CGROUPS = Path("/sys/fs/cgroup")
LIMIT = 400 * MIB


class Cgroup:
    """A memory cgroup of this test, version 1 or 2."""

    def __init__(self) -> None:
        first = (CGROUPS / "memory").is_dir()
        self.folder = (CGROUPS / "memory" if first else CGROUPS) / f"mooncake-{uuid.uuid4().hex}"
        self._limit = "memory.limit_in_bytes" if first else "memory.max"
        self._usage = "memory.usage_in_bytes" if first else "memory.current"
        self.folder.mkdir()
        try:
            (self.folder / self._limit).write_text(str(LIMIT))
        except OSError:
            self.folder.rmdir()
            raise

    @property
    def usage(self) -> int:
        return int((self.folder / self._usage).read_text())

    def command(self, *arguments: str) -> list[str]:
        """A command that runs inside."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh", *arguments]

    def close(self) -> None:
        eventually(lambda: not (self.folder / "cgroup.procs").read_text())
        self.folder.rmdir()


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    try:
        made = Cgroup()
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
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh"]
    tried = subprocess.run([*command, "true"], capture_output=True, timeout=WAIT_S, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespace can be made here: {tried.stderr.decode().strip()}")
    process = start([*command, COMMAND, "store", "--dram", "64MiB", "--socket", str(path)], path)
    try:
        with StoreClient.connect(path, timeout_s=20) as client:
            client.ping()
    finally:
        end(process)
