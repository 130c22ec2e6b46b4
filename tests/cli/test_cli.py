"""The command line as a person uses it: real processes, real exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = str(Path(sys.executable).with_name("mooncake-serve"))
TIMEOUT_S = 60.0


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def test_help_names_every_command() -> None:
    shown = run("--help").stdout
    for name in ("check", "serve", "store", "doctor", "bench", "chat", "version"):
        assert name in shown


def test_doctor_prints_one_object() -> None:
    checks = json.loads(run("doctor", "--json").stdout)["checks"]
    assert {"memory", "memfd seals", "open files"} <= {check["name"] for check in checks}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("dram: 2GiB", "dram: 9999GiB"), "store.dram"),
        (("dram: 2GiB", "dram: much"), "store.dram"),
        (("threads: 1", "thread: 1"), "engine.thread"),
        (("threads: 1", "threads: 4096"), "engine.threads"),
        (("id: smollm2-135m", "id: /no/such/model"), "model.id"),
        (("name: mooncake", "nome: mooncake"), "applications"),
    ],
)
def test_check_names_the_field(tmp_path: Path, change: tuple[str, str], field: str) -> None:
    text = (ROOT / "deployments" / "app.yaml").read_text("utf-8")
    assert change[0] in text
    config = tmp_path / "app.yaml"
    config.write_text(text.replace(*change))
    done = run("check", str(config))
    assert done.returncode == 1
    assert field in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("text", ["", "- 1", "a: [", "applications: []"])
def test_check_survives_anything(tmp_path: Path, text: str) -> None:
    config = tmp_path / "app.yaml"
    config.write_text(text)
    done = run("check", str(config))
    assert done.returncode == 1
    assert done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["app.yaml", "app-plain-proxy.yaml"])
def test_the_shipped_configurations_are_good(name: str) -> None:
    done = run("check", str(ROOT / "deployments" / name))
    assert done.returncode == 0, done.stderr


def test_a_store_runs_by_itself() -> None:
    with tempfile.TemporaryDirectory(prefix="mooncake-") as directory:
        socket = Path(directory) / "kv" / "store.sock"
        process = subprocess.Popen(
            [COMMAND, "store", "--dram", "64MiB", "--ingest", "4MiB", "--socket", str(socket)],
            stderr=subprocess.PIPE,
        )
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while not socket.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            stats = json.loads(run("store", "stats", "--socket", str(socket), "--json").stdout)
            assert stats["dram_bytes"] == 64 << 20
            assert stats["blocks"] == 0
            second = run("store", "--dram", "64MiB", "--socket", str(socket))
            assert second.returncode == 1
            assert "Traceback" not in second.stderr
        finally:
            os.kill(process.pid, signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0


def test_errors_are_one_line_with_the_fix() -> None:
    bad_size = run("store", "--dram", "lots", "--socket", "/tmp/none/s.sock")
    assert (bad_size.returncode, bad_size.stdout) == (1, "")
    assert bad_size.stderr.startswith("mooncake-serve: --dram")
    nobody = run("store", "stats", "--socket", "/tmp/none/s.sock")
    assert nobody.returncode == 1
    assert "Traceback" not in nobody.stderr
