"""Another user of the machine: kept out by the directory, and by the kernel if that is open."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_serve.store import StoreClient
from tests.store.processes import MIB, store
from tests.waiting import WAIT_S, eventually

STRANGER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
client.settimeout(20)
try:
    client.connect(sys.argv[1])
except PermissionError:
    print("not let to the socket")
    sys.exit()
said = b""
while chunk := client.recv(4096):
    said += chunk
print(said)
"""


def stranger(socket: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, str(socket)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be somebody else")
def test_another_user_is_kept_out(socket: Path) -> None:
    socket = socket.parent / "private" / "store.sock"
    with store(socket):
        assert socket.parent.stat().st_mode & 0o777 == 0o700
        socket.parent.parent.chmod(0o755)
        assert stranger(socket) == "not let to the socket"
        socket.parent.chmod(0o755)
        socket.chmod(0o666)
        assert "this store serves another user" in stranger(socket)
        with StoreClient.connect(socket, timeout_s=20.0) as client:
            client.ping()
            assert client.stats()["dram_bytes"] == 64 * MIB
        with StoreClient.connect(socket, ingest_bytes=0, timeout_s=20.0) as client:
            eventually(lambda: client.stats()["sessions"] == 1)
