"""The echo in the engine's place keeps the engine's promises."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mooncake_serve.bench.echo import WORD, EchoEngine
from mooncake_serve.engine.protocol import (
    Event,
    FinishEvent,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
    Usage,
)

WAIT_S = 20


@pytest.fixture
def engine() -> Iterator[EchoEngine]:
    made = EchoEngine()
    yield made
    made.close()
    assert not made.healthy


class Receiver:
    def __init__(self, engine: EchoEngine, name: str, tokens: int) -> None:
        self.events: list[Event] = []
        self.some, self.ended = threading.Event(), threading.Event()
        request = GenerationRequest(name, (1, 2, 3), SamplingParams(max_tokens=tokens))
        engine.submit(request, self.take)

    def take(self, event: Event) -> None:
        self.events.append(event)
        self.some.set()
        if isinstance(event, FinishEvent):
            self.ended.set()


@pytest.mark.parametrize("tokens", [1, 50])
def test_every_request_gets_its_tokens_and_one_end(engine: EchoEngine, tokens: int) -> None:
    receivers = [Receiver(engine, f"r{n}", tokens) for n in range(4)]
    for receiver in receivers:
        assert receiver.ended.wait(WAIT_S)
        *words, end = receiver.events
        assert [word.text for word in words if isinstance(word, TokenEvent)] == [WORD] * tokens
        assert end == FinishEvent("length", Usage(3, tokens, 0))
    assert engine.stats().running == 0


def test_a_cancelled_request_ends(engine: EchoEngine) -> None:
    receiver = Receiver(engine, "long", 1_000_000)
    assert receiver.some.wait(WAIT_S)
    engine.cancel("long")
    seen = len(receiver.events)
    other = Receiver(engine, "short", 20)
    assert other.ended.wait(WAIT_S)
    assert len(receiver.events) == seen
    engine.cancel("nobody")
