"""Spans across processes by `traceparent`; nothing at all while tracing is off."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mooncake_serve import tracing


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
        with tracing.under(inner):
            assert tracing.current() == inner.traceparent
    tracing.flush()
    first, second = exported.get_finished_spans()
    assert first.context is not None
    assert second.parent is not None
    assert second.parent.span_id == first.context.span_id
    assert dict(first.attributes or {}) == {"mooncake.tokens": 7}
    assert dict(second.attributes or {}) == {"mooncake.cached": 3}


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
