"""Two stores that fetch over Mooncake's transfer engine, by its TCP protocol."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from mooncake_serve.errors import ConfigError
from mooncake_serve.store import BlockShape, PeerSettings, StoreClient, StoreServer
from tests.store.processes import MIB, chain
from tests.waiting import WAIT_S, eventually

SHAPE = BlockShape("bfloat16", 8, 256, 128)
NBYTES = 8 * 256 * 128 * 2
BLOCKS = 48
HOST = "127.0.0.1"


def serve(socket: str, node: str, peers: list[str]) -> None:
    """Be a store with an engine until stdin closes."""
    from mooncake_serve.store.transfer_engine import TransferEngine

    engine = TransferEngine(HOST, protocol="tcp")
    peer = PeerSettings(node=node, listen=f"{HOST}:0", token=b"0123456789abcdef", engine=engine)
    with StoreServer(socket=socket, dram_bytes=96 * MIB, peer=peer) as server:
        server.set_peers(peers)
        sys.stdout.write(f"\naddress {server.peer_address}\n")
        sys.stdout.flush()
        sys.stdin.read()


def start(stack: ExitStack, socket: Path, node: str, peers: list[str]) -> str:
    arguments = json.dumps([str(socket), node, peers])
    command = [sys.executable, "-m", "tests.store.test_transfer_engine", arguments]
    pipe = subprocess.PIPE
    process = stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
    stack.callback(process.kill)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("address "):
            return line.split()[1]
    raise AssertionError("the store did not start; its error is above")


@pytest.fixture
def engine() -> None:
    """Skips where there is none."""
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("mooncake-transfer-engine is not installed")
    probe = [sys.executable, "-c", "import mooncake.engine"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=WAIT_S, check=False)
    if done.returncode:
        pytest.skip(f"the transfer engine does not load: {done.stderr.splitlines()[-1]}")


@pytest.mark.usefixtures("engine")
def test_blocks_come_over_the_engine_and_are_what_was_put(tmp_path: Path) -> None:
    keys, parents = chain("engine", BLOCKS)
    blocks = np.random.default_rng(0).integers(0, 256, (BLOCKS, NBYTES), np.uint8)
    with ExitStack() as stack:
        address = start(stack, tmp_path / "a" / "store.sock", "a", [])
        start(stack, tmp_path / "b" / "store.sock", "b", [address])
        far, near = (
            stack.enter_context(StoreClient.connect(tmp_path / node / "store.sock", timeout_s=20.0))
            for node in ("a", "b")
        )
        stored = far.put(keys, parents, [block.data for block in blocks], SHAPE)
        assert stored == ["stored"] * BLOCKS
        eventually(lambda: near.match(keys) == BLOCKS)
        got = np.zeros_like(blocks)
        assert near.read_into(keys, [block.data for block in got], timeout_s=WAIT_S) == BLOCKS
        assert np.array_equal(got, blocks)
        stats = near.stats()
        assert stats["peer_fetched_blocks"] == BLOCKS
        assert stats["peer_failures"] == stats["peer_corrupt_blocks"] == 0
        eventually(lambda: far.stats()["leases"] == 0)


def test_without_the_package_the_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    from mooncake_serve.store.transfer_engine import TransferEngine

    with pytest.raises(ConfigError, match=r"store\.peer\.transfer_engine.*pip install"):
        TransferEngine(HOST)


if __name__ == "__main__":
    serve(*json.loads(sys.argv[1]))
