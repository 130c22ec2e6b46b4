"""Every query of the Grafana dashboard finds series in what a running application exports."""

from __future__ import annotations

import os
import signal
import socket as sockets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from mooncake_serve.metrics import store_samples
from mooncake_serve.ray_metrics import RaySink, Reporter
from mooncake_serve.store import BlockShape, PeerSettings, StoreClient, StoreServer
from tests.e2e.cluster import BLOCK_TOKENS, App
from tests.e2e.test_metrics import scrape
from tests.metrics.test_grafana import WORDS, queries
from tests.store.processes import chain
from tests.waiting import WAIT_S, eventually

MIB = 1 << 20
SHAPE = BlockShape.opaque(MIB)
PROMPT = "a prompt for the dashboard, " * BLOCK_TOKENS


@contextmanager
def reporting_store(folder: Path, name: str) -> Iterator[StoreServer]:
    """A store with a disk and peers, which this session's own stores have not, on Ray's agent."""
    server = StoreServer(
        socket=folder / name / "store.sock",
        dram_bytes=32 * MIB,
        peer=PeerSettings(node=name, listen="127.0.0.1:0"),
        nvme_path=folder / f"{name}-blocks",
        nvme_bytes=64 * MIB,
    )
    with server:
        reporter = Reporter(RaySink({"node": name}), lambda: store_samples(server.stats()))
        try:
            yield server
        finally:
            reporter.close()


def work(one: StoreServer, other: StoreServer) -> None:
    """Puts, evictions, reads from disk and from the peer, and a client that speaks nonsense."""
    one.set_peers([other.peer_address or ""])
    other.set_peers([one.peer_address or ""])
    with StoreClient.connect(one.socket, timeout_s=30.0) as client:
        for name in ("first", "second", "third"):
            keys, parents = chain(name, 8)
            blocks = [bytes([at]) * MIB for at in range(8)]
            assert client.put(keys, parents, blocks, SHAPE) == ["stored"] * 8
            one.drain(timeout_s=60.0)
        client.cool()
        buffers = [bytearray(MIB) for _ in keys]
        assert client.read_into(keys, buffers, timeout_s=30.0) == 8
        client.evict(keys[-1:])
    with StoreClient.connect(other.socket, timeout_s=30.0) as client:
        eventually(lambda: client.match(keys[:7]) == 7)
        assert client.read_into(keys[:7], buffers[:7], timeout_s=30.0) == 7
    with sockets.socket(sockets.AF_UNIX) as nonsense:
        nonsense.settimeout(WAIT_S)
        nonsense.connect(str(one.socket))
        nonsense.sendall(b"\xff" * 256)
        while nonsense.recv(4096):
            pass


def test_every_query_finds_series(app: App, tmp_path: Path) -> None:
    for replica in (0, 0, 1):  # Computed, found in the pool, loaded from the store.
        assert app.post(PROMPT, replica=replica).status_code == 200
    assert httpx.get(f"{app.url}/v1/models/of-nobody", timeout=WAIT_S).status_code == 404
    pid = app.store_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: app.post("with a store that is gone, " * 64).status_code == 200)
    asked = {name for query in queries() for name in WORDS.findall(query)}
    missing = set(asked)

    def all_found() -> bool:
        missing.intersection_update(asked - set(scrape()))
        return not missing

    with ExitStack() as stack:
        stores = [stack.enter_context(reporting_store(tmp_path, name)) for name in ("a", "b")]
        work(*stores)
        try:
            eventually(all_found)
        except AssertionError:
            pytest.fail(f"no series of {sorted(missing)}")
        found = scrape()
    latencies = ("ray_mooncake_nvme_read_seconds_count", "ray_mooncake_peer_fetch_seconds_count")
    for name in latencies:
        assert sum(value for _, value in found[name]) >= 7, name
