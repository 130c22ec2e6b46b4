"""`mooncake-serve doctor`: what it finds here, and what it says where something is wrong."""

from __future__ import annotations

import json
import resource

import pytest
from typer.testing import CliRunner

from mooncake_serve.cli import app, doctor


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
