"""Stores in a network of their own: one comes back under another address, warm from its disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mooncake_serve.store import BlockShape, StoreClient
from tests.store.processes import MIB, chain
from tests.waiting import WAIT_S, eventually

OLD, NEW, OTHER = "10.77.0.2", "10.77.0.3", "10.77.0.1"
BLOCKS = 6
SHAPE = BlockShape.opaque(MIB)


def test_a_changed_address_after_a_restart() -> None:
    """As a pod that is restarted elsewhere; in a network namespace, where the kernel makes one."""
    inside = ["unshare", "--net", "--"]
    probe = subprocess.run(
        [*inside, "ip", "link", "set", "lo", "up"], capture_output=True, timeout=WAIT_S, check=False
    )
    if probe.returncode:
        pytest.skip(f"no network namespace can be made here: {probe.stderr.decode().strip()}")
    command = [*inside, sys.executable, "-m", "tests.store.test_network"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "came back"


class Store:
    """A store with peers and a disk, in a process of its own."""

    def __init__(self, folder: Path, name: str, address: str, disk: str) -> None:
        self.socket = folder / f"{name}.sock"
        arguments = [self.socket, name, address, folder / disk]
        command = [
            sys.executable,
            "-m",
            "tests.store.processes",
            "peer_store",
            *map(str, arguments),
        ]
        self._process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout.readline() == "serving\n"

    def meet(self, *addresses: str) -> None:
        self._process.stdin.write(" ".join(f"{one}:7400" for one in addresses) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "met\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=WAIT_S)


def address(verb: str, one: str) -> None:
    subprocess.run(["ip", "addr", verb, f"{one}/32", "dev", "lo"], check=True, timeout=WAIT_S)


def read(client: StoreClient, keys: list[bytes]) -> dict[str, int]:
    """How many of the blocks come from where; each must be right."""
    buffers = [bytearray(SHAPE.nbytes) for _ in keys]
    origins: dict[str, int] = {}
    came = client.read_into(keys, buffers, timeout_s=20.0, origins=origins)
    assert all(buffers[at] == bytes([at + 1]) * SHAPE.nbytes for at in range(came))
    assert sum(origins.values()) == came
    return origins


def scenario(folder: Path) -> None:
    """Runs inside the namespace: `OTHER` reads what `OLD` had, before and after it is `NEW`."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=WAIT_S)
    for one in (OTHER, OLD):
        address("add", one)
    stays, moves = Store(folder, "stays", OTHER, "disk-a"), Store(folder, "moves", OLD, "disk-b")
    stays.meet(OLD)
    moves.meet(OTHER)
    chains = [chain(name, BLOCKS) for name in ("read before", "read after")]
    with StoreClient.connect(moves.socket, timeout_s=20.0) as client:
        for keys, parents in chains:
            blocks = [bytes([at + 1]) * SHAPE.nbytes for at in range(BLOCKS)]
            assert client.put(keys, parents, blocks, SHAPE) == ["stored"] * BLOCKS
        assert client.drain(timeout_s=60.0) == 2 * BLOCKS
    (before, _), (after, _) = chains
    with StoreClient.connect(stays.socket, timeout_s=20.0) as client:
        eventually(lambda: client.match(before) == BLOCKS)
        assert read(client, before) == {"peer": BLOCKS}
        moves.kill()
        address("del", OLD)
        # A peer that is gone is a miss, within the deadline, and then it is known to be gone.
        assert read(client, after) == {}
        eventually(lambda: client.match(after) == 0)
        assert read(client, before) == {"dram": BLOCKS}, "what had crossed stays"
        address("add", NEW)
        moved = Store(folder, "moved", NEW, "disk-b")
        stays.meet(NEW)
        moved.meet(OTHER)
        eventually(lambda: client.match(after) == BLOCKS)
        assert read(client, after) == {"peer": BLOCKS}
        stats = client.stats()
        assert stats["peers_connected"] == 1
        assert stats["peer_fetched_blocks"] == 2 * BLOCKS
        assert stats["peer_fetch_us_count"] == 2 * BLOCKS
    stays.kill()
    moved.kill()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="mk-") as made:
        scenario(Path(made))
    os.write(1, b"came back\n")
