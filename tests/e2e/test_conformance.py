"""The official OpenAI clients against the running application: the whole shared script of each."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conformance.check import CHECKS
from tests.e2e.cluster import MODEL, App

SCRIPTS = Path(__file__).parents[1] / "conformance"
INSTALL_WAIT_S, SCRIPT_WAIT_S = 120, 240


def passed(command: list[str], cwd: Path | None = None) -> list[str]:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=SCRIPT_WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.removeprefix("ok ") for line in done.stdout.splitlines()]


def test_the_python_client(app: App) -> None:
    command = [sys.executable, "-m", "tests.conformance.check", app.url, MODEL]
    assert passed(command) == [check.__name__ for check in CHECKS]


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs node and npm")
def test_the_javascript_client(app: App, tmp_path: Path) -> None:
    for name in ("check.mjs", "package.json"):
        shutil.copy(SCRIPTS / name, tmp_path)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
    subprocess.run(install, cwd=tmp_path, capture_output=True, timeout=INSTALL_WAIT_S, check=True)
    ran = passed(["node", "check.mjs", app.url, MODEL], tmp_path)
    assert ran == [check.__name__ for check in CHECKS]
