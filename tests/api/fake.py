"""A gateway over no model: a token is a character, the answer is the alphabet."""

from __future__ import annotations

import asyncio
import string
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from mooncake_serve.api.gateway import Hints, ModelCard
from mooncake_serve.engine.protocol import (
    Event,
    FailEvent,
    FinishEvent,
    GenerationRequest,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from mooncake_serve.errors import Unavailable

MODEL = "org/fake"
CONTEXT = 2048


class CharCodec:
    """Token ids are code points."""

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    chat_template = "{% for m in messages %}"

    def encode_chat(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        assert not tools
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(token) for token in token_ids)


class FakeAnswer:
    """The alphabet, one letter a batch, then whatever the gateway was told to do."""

    def __init__(self, gateway: FakeGateway, request: GenerationRequest, replica: int) -> None:
        self._gateway = gateway
        self._request = request
        self.route: dict[str, Any] = {
            "replica": f"r{replica}",
            "reason": "least_time",
            "queue_s": 0.0,
            "load_s": 0.05,
            "prefill_s": 2.0,
            "matched_tokens": 64,
        }

    @property
    def prefix(self) -> bytes | None:
        return bytes(32) if len(self._request.token_ids) > 16 else None

    def abandon(self) -> None:
        if self._request.request_id not in self._gateway.closed:
            self._gateway.closed.append(self._request.request_id)

    async def events(self) -> AsyncGenerator[list[Event]]:
        gateway, sampling = self._gateway, self._request.sampling
        try:
            for index in range(sampling.max_tokens):
                if index == gateway.fail_after:
                    yield [FailEvent(gateway.error)]
                    return
                if index == gateway.hang_after:
                    gateway.hanging.set()
                    await asyncio.Event().wait()
                if gateway.says is not None and index == len(gateway.says):
                    yield [FinishEvent("stop", self._usage())]
                    return
                yield [self._token(index)]
            yield [FinishEvent("length", self._usage())]
        finally:
            gateway.closed.append(self._request.request_id)

    def _token(self, index: int) -> TokenEvent:
        letters = self._gateway.says or string.ascii_lowercase
        letter = letters[index % len(letters)]
        if self._request.sampling.logprobs is None:
            return TokenEvent(ord(letter[0]), letter)
        tops = tuple(
            TokenLogprob(ord(letter) + rank, -0.5 - rank)
            for rank in range(self._request.sampling.logprobs)
        )
        return TokenEvent(ord(letter), letter, TokenLogprob(ord(letter), -0.5), tops)

    def _usage(self) -> Usage:
        return Usage(len(self._request.token_ids), self._request.sampling.max_tokens, 4)


class FakeGateway:
    """Records requests; fails, hangs or refuses on demand."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.answers: list[FakeAnswer] = []
        self.closed: list[str] = []
        self.pins: list[int | None] = []
        self.hints: list[Hints] = []
        self.fail_after: int | None = None
        self.hang_after: int | None = None
        self.error: Exception = RuntimeError("boom")
        self.refusal: Exception | None = None
        self.refuse_after: int | None = None
        self.says: Sequence[str] | None = None
        """The answer's tokens, instead of the alphabet; it ends with "stop"."""
        self.hanging = asyncio.Event()

    async def card(self) -> ModelCard:
        return ModelCard(MODEL, CONTEXT, 0x110000, True, 1_700_000_000)

    async def codec(self) -> CharCodec:
        return CharCodec()

    async def start(self, request: GenerationRequest, timeout_s: float, hints: Hints) -> FakeAnswer:
        assert timeout_s > 0
        if self.refusal is not None:
            raise self.refusal
        if len(self.requests) == self.refuse_after:
            raise Unavailable("no replica")
        self.requests.append(request)
        self.pins.append(hints.pin)
        self.hints.append(hints)
        self.answers.append(FakeAnswer(self, request, hints.pin or 0))
        return self.answers[-1]
