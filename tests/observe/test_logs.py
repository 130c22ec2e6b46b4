"""Log lines carry their request, in both styles."""

from __future__ import annotations

import json
import logging
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


def test_json_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("json")
    with logs.request_context("req-1"):
        log.info("answered %d", 200, extra={"fields": {"tokens": 5}})
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("failed")
    logs.stop()
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["request_id"], first["message"], first["tokens"]) == ("req-1", "answered 200", 5)
    assert first["level"] == "info"
    assert first["logger"] == "mooncake_serve.test"
    assert second["request_id"] == ""
    assert "ValueError: boom" in second["error"]


def test_text_lines(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text")
    logs.configure("text")
    with logs.request_context("req-2"):
        log.warning("slow", extra={"fields": {"seconds": 3}})
    logs.stop()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("warning req-2 slow seconds=3")
