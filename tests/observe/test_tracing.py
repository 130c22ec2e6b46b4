"""Spans of a request, across processes by `traceparent`; nothing while tracing is off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mooncake_serve import tracing
from mooncake_serve.api import create_app
from mooncake_serve.api.observed import ObservedGateway
from mooncake_serve.config import ApiConfig
from mooncake_serve.prometheus import PrometheusSink
from mooncake_serve.store import NodeStore, StoreServer
from tests.api.fake import MODEL, FakeGateway
from tests.engine.chain_backend import ChainBackend
from tests.engine.support import DictStore, chain_engine, generate, request, start
from tests.waiting import WAIT_S

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exported() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    tracing.configure(None, "test", exporter)
    yield exporter
    tracing.configure(None, "test")


def test_a_trace_goes_on_in_another_process(exported: InMemorySpanExporter) -> None:
    with tracing.span("ingress", tokens=7) as outer:
        sent = outer.traceparent
    with tracing.span("replica", sent) as inner:
        inner.set(cached=3)
        with tracing.under(inner.traceparent):
            assert tracing.current() == inner.traceparent
    tracing.flush()
    first, second = exported.get_finished_spans()
    assert first.context is not None
    assert second.parent is not None
    assert second.parent.span_id == first.context.span_id
    assert dict(first.attributes or {}) == {"mooncake.tokens": 7}
    assert dict(second.attributes or {}) == {"mooncake.cached": 3}


def test_what_a_caller_does_not_sample_is_not_sent(exported: InMemorySpanExporter) -> None:
    unsampled = CALLER.removesuffix("1") + "0"
    with tracing.span("ingress", unsampled) as outer, tracing.under(outer.traceparent):
        assert outer.traceparent.split("-")[1] == CALLER.split("-")[1]
        with tracing.span("replica") as inner:
            inner.set(cached=3)
    tracing.flush()
    assert not exported.get_finished_spans()


def spans(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """By name."""
    tracing.flush()
    return {span.name: span for span in exporter.get_finished_spans()}


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Ours, without their prefix."""
    return {name.removeprefix("mooncake."): one for name, one in (span.attributes or {}).items()}


def parent(span: ReadableSpan) -> str:
    return f"{span.parent.span_id:016x}" if span.parent else ""


def own(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


async def test_a_request_continues_its_callers_trace(exported: InMemorySpanExporter) -> None:
    """The caller's span, the request, its plan, and what a replica is given."""
    gateway = FakeGateway()
    app = create_app(ObservedGateway(gateway, MODEL, PrometheusSink()), ApiConfig())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        body = {"model": MODEL, "prompt": "once upon a time", "max_tokens": 3}
        headers = {"traceparent": CALLER, "x-request-id": "r-1"}
        answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    _, trace, caller, _ = CALLER.split("-")
    found = spans(exported)
    assert found.keys() == {"request", "plan"}
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {trace}
    assert parent(found["request"]) == caller
    assert parent(found["plan"]) == own(found["request"])
    assert gateway.requests[0].traceparent.split("-")[1:3] == [trace, own(found["plan"])]
    assert (found["request"].attributes or {})["mooncake.request_id"] == "r-1"
    assert (found["plan"].attributes or {})["mooncake.reason"] == "least_time"


def test_a_load_from_the_store_belongs_to_its_request(exported: InMemorySpanExporter) -> None:
    store, prompt = DictStore(), list(range(100))
    with chain_engine(ChainBackend(block_tokens=16), store) as first:
        generate(first, [prompt], 2)
    tracing.flush()
    exported.clear()
    with chain_engine(ChainBackend(block_tokens=16), store) as second:
        result = start(second, replace(request(prompt, 2), traceparent=CALLER))
        assert result.finish().usage.cached_store_tokens == 96
    (load,) = spans(exported).values()
    assert load.name == "store.load"
    assert parent(load) == CALLER.split("-")[2]
    assert (load.attributes or {})["mooncake.loaded_blocks"] == 6


def test_a_trace_shows_what_the_store_did(exported: InMemorySpanExporter, tmp_path: Path) -> None:
    """Computed and put; read from disk by another engine: blocks, bytes and tier."""
    prompt, block = list(range(100)), ChainBackend(block_tokens=16).layout.block_bytes
    disk: dict[str, Any] = {"nvme_path": tmp_path / "blocks", "nvme_bytes": 64 << 20}
    socket = tmp_path / "private" / "store.sock"
    with StoreServer(socket=socket, dram_bytes=64 << 20, **disk) as server:
        store = NodeStore(str(socket))
        assert store.wait_until_healthy(WAIT_S)
        with chain_engine(ChainBackend(block_tokens=16), store) as first:
            start(first, replace(request(prompt, 2), traceparent=CALLER)).finish()
            assert first.flush()
        tracing.flush()
        puts = [span for span in exported.get_finished_spans() if span.name == "store.put"]
        assert {parent(span) for span in puts} == {CALLER.split("-")[2]}
        assert [attributes(span)["stored_blocks"] for span in puts] == [1] * 6
        assert {attributes(span)["put_bytes"] for span in puts} == {block}
        assert server.drain() == 6
        assert store.lend(lambda client: client.cool()) == 6
        exported.clear()
        with chain_engine(ChainBackend(block_tokens=16), store) as second:
            start(second, replace(request(prompt, 2), traceparent=CALLER)).finish()
        store.close()
    found = spans(exported)
    load, match, read = (found[f"store.{name}"] for name in ("load", "match", "read"))
    assert parent(load) == CALLER.split("-")[2]
    assert parent(match) == parent(read) == own(load)
    assert attributes(match)["matched_blocks"] == 6
    assert attributes(read)["nvme_blocks"] == attributes(read)["read_blocks"] == 6
    assert attributes(read)["read_bytes"] == 6 * block


def test_an_error_is_recorded_and_raised(exported: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="boom"), tracing.span("plan"):
        raise ValueError("boom")
    tracing.flush()
    (span,) = exported.get_finished_spans()
    assert not span.status.is_ok


def test_off_is_off() -> None:
    with tracing.span("ingress", "given") as note:
        note.set(tokens=1)
        assert note.traceparent == ""
    code = (
        "import sys; from mooncake_serve import tracing\n"
        "with tracing.span('a'): pass\n"
        "print('opentelemetry' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert ran.stdout.strip() == b"False"
