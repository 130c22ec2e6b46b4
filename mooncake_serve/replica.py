"""The model deployment: one engine on its own thread behind asyncio.

Events come from the engine's thread. They are collected in a list and the loop is woken once per
batch of them, so that a slow consumer gets longer lists, not more wake-ups. When the consumer of a
stream goes away, Ray cancels the generator and the request is cancelled in the engine.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from typing import Any

import ray
from ray import serve

from mooncake_serve import logs, tracing
from mooncake_serve.config import load_app_config
from mooncake_serve.engine.protocol import (
    Engine,
    Event,
    FailEvent,
    FinishEvent,
    GenerationRequest,
    SamplingParams,
)
from mooncake_serve.engine.wire import pack
from mooncake_serve.errors import EngineFailed, RequestError
from mooncake_serve.load_report import LoadReporter
from mooncake_serve.logs import write_info
from mooncake_serve.metrics import Sample, engine_samples, store_client_samples
from mooncake_serve.models import load_tokenizer, resolve_model
from mooncake_serve.parity import check_parity, parity_card
from mooncake_serve.ray_metrics import RaySink, Reporter
from mooncake_serve.store_actor import attach, check_node

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 256
WARM_UP_TIMEOUT_S = 60.0


class EventBuffer:
    """Events of one request on their way from the engine's thread to the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._ready = asyncio.Event()

    def put(self, event: Event) -> None:
        """Add an event; called on the engine's thread."""
        with self._lock:
            self._events.append(event)
            first = len(self._events) == 1
        if first:
            with suppress(RuntimeError):  # The loop is closed: nobody listens any more.
                self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> list[Event]:
        """All events that have arrived, at least one: at once if it has."""
        while True:
            with self._lock:
                events, self._events = self._events, []
            if events:
                return events
            await self._ready.wait()
            self._ready.clear()


async def stream_events(engine: Engine, request: GenerationRequest) -> AsyncGenerator[list[Event]]:
    """Run a request; yields its events in batches, the last one ending in a Finish or FailEvent.

    Errors are events too: an exception that crosses Serve would lose its class.
    """
    buffer = EventBuffer(asyncio.get_running_loop())
    ended = False
    try:
        if request.sampling.grammar is None:
            engine.submit(request, buffer.put)
        else:  # Compiling a grammar takes longer than the loop may stall.
            await asyncio.to_thread(engine.submit, request, buffer.put)
    except RequestError as err:
        yield [FailEvent(err)]
        return
    try:
        while not ended:
            events = await buffer.take()
            ended = isinstance(events[-1], FinishEvent | FailEvent)
            yield [_portable(event) for event in events]
    finally:
        if not ended:
            engine.cancel(request.request_id)


def _portable(event: Event) -> Event:
    """Only errors of our tree cross processes."""
    if isinstance(event, FailEvent) and not isinstance(event.error, RequestError):
        return FailEvent(EngineFailed(f"{type(event.error).__name__}: {event.error}"))
    return event


def warm_up(engine: Engine) -> None:
    """Compute one block that is published nowhere, so that what prefill costs is known from the
    start. A failure shows again at the first request, with its reason."""
    info = engine.info
    length = min(WARM_UP_TOKENS, info.layout.block_tokens, info.max_context) - 2
    if length < 1:
        return
    tokens = tuple(token % info.vocab_size for token in range(length))
    ended = threading.Event()
    request = GenerationRequest("warm-up", tokens, SamplingParams(max_tokens=1))

    def note(event: Event) -> None:
        if isinstance(event, FinishEvent | FailEvent):
            ended.set()

    engine.submit(request, note)
    ended.wait(WARM_UP_TIMEOUT_S)


def _account(note: tracing.Note, request: GenerationRequest, event: Event) -> None:
    """How a request ended and what it used, on its span and in the log."""
    request_id = request.logged["request_id"]
    if isinstance(event, FinishEvent):
        used = event.usage
        counts = {
            "prompt_tokens": used.prompt_tokens,
            "generated_tokens": used.completion_tokens,
            "cached_pool_tokens": used.cached_pool_tokens,
            "cached_store_tokens": used.cached_store_tokens,
        }
        note.set(**counts)
        write_info(log, "generated", request_id, **counts, reason=event.reason)
    elif isinstance(event, FailEvent):
        write_info(log, "not generated", request_id, error=type(event.error).__name__)


class ModelReplica:
    """One model replica: a pool, an engine, a connection to the node's store."""

    def __init__(self, config: dict[str, Any]) -> None:
        from mooncake_serve.engine.build import build_engine

        app = load_app_config(config)
        logs.configure(app.observe.logs)
        tracing.configure(app.observe.traces, "mooncake-replica")
        resolve_model(app.model)  # Weights are counted once they are here.
        check_node(app)
        self._store = attach(app.store)
        self._engine = build_engine(app, self._store)
        self._id = serve.get_replica_context().replica_id.unique_id
        self._node = ray.get_runtime_context().get_node_id()
        self._reporter = Reporter(RaySink({"replica": self._id}), self._samples)
        if self._store is not None:
            check_parity(app, parity_card(self._engine.info, load_tokenizer(app.model)))
        warm_up(self._engine)
        self._loads = LoadReporter(self._id, self._engine, self._store) if self._store else None

    async def describe(self) -> dict[str, Any]:
        """What the ingress needs to know of the model."""
        info = self._engine.info
        return {
            "name": info.name,
            "namespace": info.namespace,
            "block_tokens": info.layout.block_tokens,
            "token_bytes": info.layout.block_bytes // info.layout.block_tokens,
            "max_context": info.max_context,
            "vocab_size": info.vocab_size,
            "exact": info.exact,
            "backend": info.backend,
            "device": info.device,
        }

    async def generate(
        self, request: GenerationRequest, timeout_s: float, replica: str | None = None
    ) -> AsyncGenerator[bytes]:
        """Messages of `engine/wire.py`. `replica` is the plan, read by the router."""
        del replica
        deadline_s = time.monotonic() + timeout_s
        with tracing.span("generate", request.traceparent, replica=self._id) as note:
            bounded = replace(request, deadline_s=deadline_s, traceparent=note.traceparent)
            async with aclosing(stream_events(self._engine, bounded)) as batches:
                async for events in batches:
                    _account(note, request, events[-1])
                    yield pack(self._id, events)

    async def stats(self, replica: str | None = None) -> dict[str, Any]:
        """Counters of the engine and of its view of the store; `replica` is for the router."""
        del replica
        store = asdict(self._store.stats()) if self._store else None
        return {
            "replica": self._id,
            "node": self._node,
            "engine": asdict(self._engine.stats()),
            "store": store,
        }

    def _samples(self) -> Iterator[Sample]:
        yield from engine_samples(asdict(self._engine.stats()), self._engine.info.name)
        if self._store is not None:
            yield from store_client_samples(asdict(self._store.stats()))

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if not self._engine.healthy:
            raise EngineFailed("the engine's thread has ended")

    def __del__(self) -> None:
        loads = getattr(self, "_loads", None)
        if loads is not None:
            loads.close()
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.close()
        store = getattr(self, "_store", None)
        if store is not None:
            store.close()
