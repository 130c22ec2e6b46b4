"""The documentation's examples that talk to a server, against this session's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, marked
from tests.e2e.cluster import App
from tests.waiting import WAIT_S


@pytest.mark.parametrize("block", marked("with a server"), ids=str)
def test_examples_run_against_a_server(app: App, block: Block) -> None:
    code = block.code.replace("http://localhost:8000", app.url).replace(
        "localhost:8000", app.url.removeprefix("http://")
    )
    code = code.replace("smollm2-135m", "tiny").replace(
        "mooncake-serve store stats", f"mooncake-serve store stats --socket {app.store_socket}"
    )
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", code]
    if block.language == "python":
        command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()
    assert "Error" not in ran.stderr, ran.stderr
    assert '"error"' not in ran.stdout, ran.stdout
