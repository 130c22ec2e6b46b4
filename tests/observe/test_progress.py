"""Long work tells how far it is: a bar for a person, lines for a log, nothing on stdout."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mooncake_serve import progress
from mooncake_serve.store import BlockShape, StoreClient, StoreServer, starting
from tests.waiting import WAIT_S, eventually

MIB = 1 << 20
WORK = """
import time
from mooncake_serve.progress import shown
with shown("working", 4 * 2**20, size=True) as show:
    show(2 * 2**20)
    time.sleep(0.3)
"""


def test_lines_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.02)
    told: list[str] = []

    def lines() -> bool:
        told.extend(capsys.readouterr().err.splitlines())
        return len(told) > 3

    with progress.shown("copying", 4 * MIB, size=True) as show:
        show(MIB)
        eventually(lines)
    assert told[0] == "mooncake-serve: copying"
    assert "copying: 1.0 MiB of 4.0 MiB, " in told[-1]
    with progress.shown("quick", announce=False):
        pass
    assert "quick" not in capsys.readouterr().err


def test_a_bar_on_a_terminal() -> None:
    """A pseudo-terminal as stderr, and a pipe as stdout, which stays empty."""
    ours, theirs = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", WORK],
        stderr=theirs,
        stdout=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    while select.select([ours], [], [], WAIT_S)[0]:
        try:
            seen += os.read(ours, 65536)
        except OSError:  # The other end is closed.
            break
    os.close(ours)
    out, _ = done.communicate(timeout=WAIT_S)
    assert out == b""
    assert "working" in seen.decode()
    assert "2.0 MiB of 4.0 MiB" in seen.decode()


def test_a_store_tells_how_far_its_start_is(tmp_path: Path) -> None:
    options: dict[str, Any] = {"nvme_path": tmp_path / "nvme", "nvme_bytes": 64 * MIB}
    socket = tmp_path / "s" / "store.sock"
    with StoreServer(socket=socket, dram_bytes=64 * MIB, **options) as server:
        with StoreClient.connect(socket, timeout_s=20.0) as client:
            client.put([bytes(32)], [None], [bytes(MIB)], BlockShape.opaque(MIB))
        server.drain(timeout_s=60.0)
    again = StoreServer(socket=socket, dram_bytes=64 * MIB, **options)
    assert again.starting == ("", 0, 0)
    starting.start(again)
    try:
        phase, done, total = again.starting
        assert phase == "recovering"
        assert done == total > 0
        assert again.stats()["nvme_recovered_blocks"] == 1
    finally:
        again.stop()
