"""A store per test: in this process, or in one of its own that can be stopped and killed."""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_serve.store import StoreClient, StoreServer
from tests.store.processes import MIB
from tests.waiting import eventually


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After a test this process has no descriptor more, and nothing of ours is in /dev/shm."""
    fds, names = descriptors(), shared_names()
    yield
    gc.collect()
    eventually(lambda: descriptors() <= fds, timeout_s=20.0)
    eventually(lambda: shared_names() <= names, timeout_s=20.0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_names() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "mooncake" in name}


@pytest.fixture
def seed() -> int:
    """What a test's random choices follow from; shown when it fails. MOONCAKE_SEED replays it."""
    number = int(os.environ.get("MOONCAKE_SEED") or random.randrange(1 << 32))
    sys.stdout.write(f"seed {number}: replay with make fault SEED={number}\n")
    return number


@pytest.fixture
def socket() -> Iterator[Path]:
    """A socket path short enough for the kernel, in a directory of mode 0700."""
    with tempfile.TemporaryDirectory(prefix="mooncake-") as directory:
        yield Path(directory) / "store.sock"


@pytest.fixture
def server(socket: Path) -> Iterator[StoreServer]:
    with StoreServer(socket=socket, dram_bytes=64 * MIB) as server:
        yield server
        stats = server.stats()
        parts = ("free", "reserved", "resident", "leased", "quarantined")
        assert sum(stats[f"{part}_bytes"] for part in parts) == stats["capacity_bytes"]


@pytest.fixture
def client(server: StoreServer) -> Iterator[StoreClient]:
    with StoreClient.connect(server.socket, timeout_s=20.0) as client:
        yield client
