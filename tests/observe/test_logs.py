"""Log lines carry their request, in both styles."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from mooncake_serve import logs

log = logging.getLogger("mooncake_serve.test")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    root = logging.getLogger(logs.ROOT)
    root.handlers, root.propagate = [], True
    root.setLevel(logging.NOTSET)


def test_json_lines(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    with logs.request_context("req-1"):
        log.info("answered %d", 200, extra={"fields": {"tokens": 5}})
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, capfd.readouterr().err.splitlines())
    assert (first["request_id"], first["message"], first["tokens"]) == ("req-1", "answered 200", 5)
    assert first["level"] == "info"
    assert first["logger"] == "mooncake_serve.test"
    assert second["request_id"] == ""
    assert "ValueError: boom" in second["error"]


def test_lines_pass_by_what_took_the_place_of_stderr(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve puts a logger there, and adds a prefix of its own."""
    replaced = io.StringIO()
    monkeypatch.setattr(sys, "stderr", replaced)
    logs.configure("json")
    log.info("answered")
    assert json.loads(capfd.readouterr().err)["message"] == "answered"
    assert replaced.getvalue() == ""


def test_text_lines(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure("text")
    logs.configure("text")
    with logs.request_context("req-2"):
        log.warning("slow", extra={"fields": {"seconds": 3}})
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith("warning req-2 slow seconds=3")
