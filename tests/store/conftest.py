"""A store per test: in this process, or in one of its own that can be stopped and killed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_serve.store import StoreClient, StoreServer
from tests.store.processes import MIB


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
