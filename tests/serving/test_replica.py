"""Events on their way from the engine's thread to the loop."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mooncake_serve import tracing
from mooncake_serve.engine.protocol import (
    FailEvent,
    FinishEvent,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)
from mooncake_serve.errors import ContextTooLong, EngineFailed
from mooncake_serve.replica import EventBuffer, ModelReplica, stream_events
from tests.serving.fake_engine import FakeEngine

WAIT_S = 20


def request(tokens: int = 50) -> GenerationRequest:
    return GenerationRequest("r1", (1, 2), SamplingParams(max_tokens=tokens))


async def test_every_event_arrives_in_order_and_nothing_follows_the_end() -> None:
    batches = [batch async for batch in stream_events(FakeEngine(), request())]
    events = [event for batch in batches for event in batch]
    assert [e.token_id for e in events if isinstance(e, TokenEvent)] == list(range(50))
    assert isinstance(events[-1], FinishEvent)


async def test_many_streams_at_once() -> None:
    async def tokens() -> int:
        batches = [batch async for batch in stream_events(FakeEngine(), request())]
        return sum(isinstance(event, TokenEvent) for batch in batches for event in batch)

    assert await asyncio.gather(*(tokens() for _ in range(20))) == [50] * 20


async def test_a_slow_consumer_gets_longer_lists() -> None:
    buffer = EventBuffer(asyncio.get_running_loop())
    for token in range(5):
        buffer.put(TokenEvent(token, ""))
    assert [event.token_id for event in await buffer.take()] == list(range(5))
    buffer.put(TokenEvent(5, ""))
    assert len(await asyncio.wait_for(buffer.take(), WAIT_S)) == 1


async def test_closing_the_stream_cancels_the_request() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    stream = stream_events(engine, request())
    await anext(stream)
    assert engine.cancelled == []
    await stream.aclose()
    assert engine.cancelled == ["r1"]
    engine.gate.set()


async def test_cancelling_the_consumer_cancels_the_request() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    started = asyncio.Event()

    async def consume() -> None:
        async for _ in stream_events(engine, request()):
            started.set()

    task = asyncio.create_task(consume())
    await asyncio.wait_for(started.wait(), WAIT_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert engine.cancelled == ["r1"]
    engine.gate.set()


async def test_a_finished_request_is_not_cancelled() -> None:
    engine = FakeEngine()
    async for _ in stream_events(engine, request(3)):
        pass
    assert engine.cancelled == []


async def test_a_refused_request_is_an_event() -> None:
    engine = FakeEngine()
    engine.refusal = ContextTooLong("too long", param="prompt")
    assert [batch async for batch in stream_events(engine, request())] == [
        [FailEvent(engine.refusal)]
    ]


@pytest.mark.parametrize("error", [MemoryError("no room"), EngineFailed("no room")])
async def test_only_errors_of_our_tree_leave_the_replica(error: Exception) -> None:
    engine = FakeEngine()
    engine.failure = error
    batches = [batch async for batch in stream_events(engine, request(2))]
    last = batches[-1][-1]
    assert isinstance(last, FailEvent)
    assert isinstance(last.error, EngineFailed)
    assert "no room" in str(last.error)


def replica(engine: FakeEngine) -> ModelReplica:
    """One without Ray and without a model."""
    made = object.__new__(ModelReplica)
    vars(made).update(_engine=engine, _id="a", _loads=None, _store=None)
    return made


async def test_the_log_says_how_each_request_ended(caplog: pytest.LogCaptureFixture) -> None:
    """Under the id of the HTTP request, in the process that did the work."""
    caplog.set_level(logging.INFO, logger="mooncake_serve")
    engine = FakeEngine()
    asked = replace(request(3), log_id="req-7")
    assert [message async for message in replica(engine).generate(asked, 10.0)]
    engine.failure = EngineFailed("no room")
    assert [message async for message in replica(engine).generate(request(3), 10.0)]
    generated, failed = (vars(record) for record in caplog.records)
    assert (generated["message"], generated["request_id"]) == ("generated", "req-7")
    assert generated["fields"] == {
        "prompt_tokens": 2,
        "generated_tokens": 3,
        "cached_pool_tokens": 0,
        "cached_store_tokens": 0,
        "reason": "length",
    }
    assert (failed["message"], failed["request_id"]) == ("not generated", "r1")
    assert failed["fields"] == {"error": "EngineFailed"}


async def test_the_engines_spans_are_below_the_replicas() -> None:
    exporter = InMemorySpanExporter()
    tracing.configure(None, "test", exporter)
    engine = FakeEngine()
    try:
        with tracing.span("plan") as plan:
            asked = replace(request(3), traceparent=plan.traceparent)
            assert [message async for message in replica(engine).generate(asked, 10.0)]
        tracing.flush()
    finally:
        tracing.configure(None, "test")
    generate, planned = exporter.get_finished_spans()
    assert generate.name == "generate"
    assert generate.parent is not None
    assert generate.parent.span_id == planned.context.span_id
    assert (generate.attributes or {})["mooncake.generated_tokens"] == 3
    (given,) = engine.requests
    assert given.traceparent.split("-")[2] == f"{generate.context.span_id:016x}"
