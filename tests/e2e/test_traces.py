"""One request's spans from ingress and replica meet at a collector, and hold no text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.cluster import BLOCK_TOKENS, MODEL, Cluster
from tests.waiting import WAIT_S, eventually

PROMPT = "a prompt that no span may hold, " * BLOCK_TOKENS
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
"""Of the caller, who is the parent of it all."""


class Collector:
    """Takes spans as an OTLP collector does."""

    def __init__(self) -> None:
        self.raw = b""
        self.spans: dict[str, list[tuple[str, Span]]] = {}
        """By trace: service and span."""
        taken = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                taken.take(self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                del format, args

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, body: bytes) -> None:
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            (service,) = [
                one.value.string_value
                for one in resource.resource.attributes
                if one.key == "service.name"
            ]
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.setdefault(span.trace_id.hex(), []).append((service, span))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.close()


def test_a_trace_goes_through_ingress_replica_and_store(
    cluster: Cluster, collector: Collector
) -> None:
    app = cluster.deploy("traced", cluster.build(observe={"traces": collector.url}))
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    for replica in ("0", "1"):  # The second one loads from the store.
        headers = {"x-mooncake-replica": replica, "traceparent": f"00-{TRACE}-{'1' * 16}-01"}
        answer = httpx.post(f"{app.url}/v1/completions", json=body, headers=headers, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
    wanted = {
        ("mooncake-ingress", "request"),
        ("mooncake-ingress", "plan"),
        ("mooncake-replica", "generate"),
        ("mooncake-replica", "store.load"),
    }

    def complete() -> bool:
        return wanted <= {(who, span.name) for who, span in collector.spans.get(TRACE, [])}

    eventually(complete)
    spans = {span.span_id: span for _, span in collector.spans[TRACE]}
    for _, span in collector.spans[TRACE]:
        above = span.parent_span_id
        assert above in spans or above == b"\x11" * 8, f"{span.name} hangs in the air"
    assert PROMPT[:20].encode() not in collector.raw
