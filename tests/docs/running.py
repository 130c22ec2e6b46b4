"""How a documented command is run: in a folder that looks like the repository, as a reader would.

What `make TARGET` does is asked of make itself, without what it builds first: for a test all of
that is there. Ports, sockets and sizes that a test must not take are replaced.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import ROOT

BIN = Path(sys.executable).parent
OWN = {".git", ".venv", "build", "target", "node_modules"}
FROM_MAKE = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}


def scratch(folder: Path) -> Path:
    """The repository under `folder`, by links, but for what builds leave in it."""
    for path in ROOT.iterdir():
        if path.name not in OWN:
            (folder / path.name).symlink_to(path)
    (folder / "build").mkdir()
    return folder


def expanded(code: str, extra: str = "") -> str:
    """The code with each `make` line as the commands that make would run."""
    return re.sub(r"^make .*$", lambda line: _recipe(line[0], extra), code, flags=re.MULTILINE)


def _recipe(line: str, extra: str) -> str:
    words = re.sub(r"\s+#.*", "", line).split()[1:]
    command = ["make", "-n", "-o", "build", "-o", "model", *words]
    if extra:
        command.append(f"EXTRA={extra}")
    # Under `make test` this make would be a sub-make, whose output names the folders it enters.
    own = {name: value for name, value in os.environ.items() if name not in FROM_MAKE}
    ran = subprocess.run(
        command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.replace(".venv/bin/", f"{BIN}/").strip()


def environment(**more: str) -> dict[str, str]:
    """Commands of this virtual environment come first."""
    return {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **more}


def run(
    code: str, folder: Path, timeout_s: float, language: str = "bash", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a block to its end; asserts that it succeeds."""
    command = ["bash", "-euo", "pipefail", "-c", code]
    if language == "python":
        command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command,
        cwd=folder,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert ran.returncode == 0, f"{code}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    return ran
