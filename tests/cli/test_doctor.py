"""`mooncake-serve doctor`: what it finds here, and what it says where something is wrong."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mooncake_serve.cli import app, disk, doctor


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *arguments])
    return done.exit_code, done.stdout


def test_this_machine_can_run_a_store() -> None:
    status, shown = run("--json")
    checks = {check["name"]: check["ok"] for check in json.loads(shown)["checks"]}
    assert checks == dict.fromkeys(("memory", "memfd seals", "client liveness", "open files"), True)
    assert status == 0


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_limit", lambda: 1 << 30)
    status, shown = run()
    assert status == 1
    assert "BAD memory" in shown
    assert "1.0 GiB allowed" in shown


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 512))
    status, shown = run()
    assert status == 1
    assert "ulimit -n" in shown


def test_the_sum_of_store_and_replicas_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "memory_limit", lambda: (2 << 30) + 1)
    status, shown = run()
    assert status == 1
    assert "takes 2.0 GiB and 2 replicas" in shown
    assert "lower store.dram" in shown


def test_the_disk_is_measured_as_a_store_uses_it(tmp_path: Path) -> None:
    _, shown = run("--nvme", str(tmp_path), "--json")
    checks = {check["name"]: check for check in json.loads(shown)["checks"]}
    assert {"io_uring", "direct I/O", "disk writes", "disk reads"} < checks.keys()
    assert "MiB/s" in checks["disk reads"]["found"]
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_a_poor_disk_says_what_to_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mib = 1 << 20
    monkeypatch.setattr(disk, "probe", lambda _: disk.Disk(False, False, 40 * mib, 50 * mib))
    status, shown = run("--nvme", str(tmp_path))
    assert status == 1
    for part in ("BAD io_uring", "seccomp", "BAD direct I/O", "xfs", "write_bytes_per_s to 20MiB"):
        assert part in shown
    assert "BAD disk reads: 50 MiB/s" in shown


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    status, shown = run("--nvme", str(tmp_path / "none"))
    assert status == 1
    assert "BAD disk: " in shown
