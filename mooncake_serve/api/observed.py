"""What became of each plan: a gateway in front of the real one that keeps the books.

It measures the decision, holds the plan against the outcome, and remembers both for the operators'
page. It changes nothing and hides no error; what it keeps is bounded and holds no text.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from mooncake_serve import metrics, tracing
from mooncake_serve.api.gateway import REROUTED, Answer, Codec, Gateway, Hints, ModelCard
from mooncake_serve.engine.protocol import Event, FinishEvent, GenerationRequest, TokenEvent, Usage
from mooncake_serve.metrics import Sink
from mooncake_serve.router.journal import Decision, Journal

ROUTE_FIELDS = ("replica", "reason", "queue_s", "load_s", "prefill_s", "matched_tokens")


class ObservedGateway:
    """Implements `Gateway` over another."""

    def __init__(self, gateway: Gateway, model: str, sink: Sink) -> None:
        self.journal = Journal()
        self._gateway = gateway
        self._model = model
        self._sink = sink

    async def card(self) -> ModelCard:
        """See Gateway."""
        return await self._gateway.card()

    async def codec(self) -> Codec:
        """See Gateway."""
        return await self._gateway.codec()

    async def start(self, request: GenerationRequest, timeout_s: float, hints: Hints) -> Answer:
        """See Gateway."""
        started = time.perf_counter()
        tokens = len(request.token_ids)
        with tracing.span("plan", prompt_tokens=tokens) as note:
            traced = replace(request, traceparent=note.traceparent) if note.traceparent else request
            answer = await self._gateway.start(traced, timeout_s, hints)
            route = _route(answer)
            if note.traceparent:
                note.set(**route)
        self._sink.observe(metrics.ROUTE_TIME, time.perf_counter() - started)
        decision = Decision(request.request_id, time.time(), tokens, **route)
        self.journal.planned(decision, answer.prefix)
        return _Answer(answer, decision, self)

    def begun(self, decision: Decision, answer: Answer) -> None:
        """A replica has begun to answer: the planned one, or another by a later plan or by none."""
        decision.become(**_route(answer))
        if decision.reason in REROUTED:
            self._sink.add(metrics.REROUTED, labels=(decision.reason,))

    def answered(self, decision: Decision, ttft_s: float, usage: Usage) -> None:
        """Compare a plan with what came of it."""
        self.journal.answered(decision, ttft_s, usage.cached_tokens, time.time())
        self._sink.add(metrics.PREDICTED_CACHED, decision.matched_tokens)
        self._sink.add(metrics.ACTUAL_CACHED, usage.cached_tokens)
        computed = decision.prompt_tokens - decision.matched_tokens
        saved = usage.cached_tokens * decision.prefill_s / max(1, computed) - decision.load_s
        self.journal.saved_prefill_s += max(0.0, saved)
        self._sink.add(metrics.SAVED_PREFILL, max(0.0, saved), (self._model,))


def _route(answer: Answer) -> dict[str, Any]:
    route = answer.route
    return {name: route[name] for name in ROUTE_FIELDS}


class _Answer:
    """Implements `Answer`: notes the first token and the end."""

    def __init__(self, answer: Answer, decision: Decision, books: ObservedGateway) -> None:
        self._answer = answer
        self._decision = decision
        self._books = books
        self._planned = time.perf_counter()
        self._ttft_s: float | None = None

    @property
    def route(self) -> dict[str, Any]:
        """See Answer."""
        return self._answer.route

    @property
    def prefix(self) -> bytes | None:
        """See Answer."""
        return self._answer.prefix

    def abandon(self) -> None:
        """See Answer."""
        self._answer.abandon()

    async def events(self) -> AsyncGenerator[list[Event]]:
        """See Answer."""
        async with aclosing(self._answer.events()) as batches:
            async for events in batches:
                self._see(events)
                yield events

    def _see(self, events: list[Event]) -> None:
        if self._ttft_s is None and isinstance(events[0], TokenEvent | FinishEvent):
            self._ttft_s = time.perf_counter() - self._planned
            self._books.begun(self._decision, self._answer)
        last = events[-1]
        if isinstance(last, FinishEvent) and self._ttft_s is not None:
            self._books.answered(self._decision, self._ttft_s, last.usage)
