"""Traces across ingress, router, replica and store, by OpenTelemetry; off unless configured.

A request's place in its trace travels as a W3C `traceparent` string. While tracing is off, `span`
costs a function call and nothing is imported. Attributes hold ids, counts and times, never text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

from mooncake_serve.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

Value = str | int | float | bool

_tracer: Tracer | None = None
_provider: TracerProvider | None = None
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
"""The span that new ones belong below, or nothing."""


class Note:
    """A span, or nothing: `set` adds an attribute, `traceparent` names it to other processes."""

    def __init__(self, span: Span | None, traceparent: str) -> None:
        self._span = span
        self.traceparent = traceparent

    def set(self, **attributes: Value) -> None:
        """Add attributes."""
        if self._span is not None:
            self._span.set_attributes({f"mooncake.{name}": one for name, one in attributes.items()})


def configure(endpoint: str | None, service: str, exporter: SpanExporter | None = None) -> None:
    """Send spans to an OTLP/HTTP `endpoint`, or to `exporter`; None for both turns tracing off.

    Raises ConfigError when the SDK is not installed.
    """
    global _provider, _tracer
    if endpoint is None and exporter is None:
        _provider = _tracer = None
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if endpoint is not None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=endpoint)
    except ImportError as err:
        raise ConfigError(
            "observe.traces", f"{err.name} is missing: pip install 'mooncake-serve[traces]'"
        ) from err
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    assert exporter is not None
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _provider, _tracer = provider, provider.get_tracer("mooncake_serve")


def flush(timeout_s: float = 5.0) -> None:
    """Wait until every ended span has been exported."""
    if _provider is not None:
        _provider.force_flush(int(1000 * timeout_s))


_OFF = nullcontext(Note(None, ""))


def span(
    name: str, parent: str | None = None, **attributes: Value
) -> AbstractContextManager[Note, bool | None]:
    """A span around the block, below `parent` or below `current()`. Errors are recorded.

    Blocks of an async generator may enter and leave in different contexts, so a span never becomes
    the current one by itself: see `under`.
    """
    return _OFF if _tracer is None else _span(_tracer, name, parent, attributes)


@contextmanager
def _span(
    tracer: Tracer, name: str, parent: str | None, attributes: dict[str, Value]
) -> Iterator[Note]:
    from opentelemetry.trace import Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    above = current() if parent is None else parent
    propagator = TraceContextTextMapPropagator()
    started = tracer.start_span(name, context=propagator.extract({"traceparent": above}))
    carrier: dict[str, str] = {}
    propagator.inject(carrier, set_span_in_context(started))
    note = Note(started, carrier["traceparent"])
    note.set(**attributes)
    try:
        yield note
    except Exception as err:
        # The class only: messages may quote what a client sent.
        started.set_status(Status(StatusCode.ERROR, type(err).__name__))
        raise
    finally:
        started.end()


def current() -> str:
    """The `traceparent` of `under`, or nothing."""
    return TRACEPARENT.get()


@contextmanager
def under(traceparent: str) -> Iterator[None]:
    """Spans begun inside, without a parent of their own, belong below this one."""
    token = TRACEPARENT.set(traceparent)
    try:
        yield
    finally:
        TRACEPARENT.reset(token)
