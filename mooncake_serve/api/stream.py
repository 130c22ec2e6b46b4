"""Consuming a running request: as one answer, or as server-sent events.

The engine's request ends when its event generator is closed, so both ways close it whatever
happens: the last token, an error, the deadline, a client that left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooncake_serve.api.middleware import ClientGone, unless_disconnected
from mooncake_serve.api.shapes import DONE, Shape, sse
from mooncake_serve.engine.protocol import Event, FailEvent, FinishEvent, TokenEvent
from mooncake_serve.errors import DeadlineExceeded, EngineFailed, RequestError

T = TypeVar("T")

log = logging.getLogger(__name__)


async def until(deadline: float, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` up to `deadline` on the loop's clock. Raises DeadlineExceeded."""
    try:
        async with asyncio.timeout_at(deadline):
            return await work
    except TimeoutError as err:
        raise DeadlineExceeded(
            "the request did not finish in time; ask for fewer tokens, or raise "
            "api.request_timeout_s",
            code="deadline_exceeded",
        ) from err


async def first_batch(events: AsyncGenerator[list[Event]]) -> list[Event]:
    """The first events. Raises what a FailEvent carries, having closed the generator."""
    try:
        batch = await anext(events)
        if isinstance(batch[0], FailEvent):
            _finished(batch[0])
        return batch
    except BaseException:
        await events.aclose()
        raise


async def collect(
    events: AsyncGenerator[list[Event]],
) -> tuple[list[TokenEvent], FinishEvent]:
    """All tokens and the end. Raises what a FailEvent carries."""
    tokens: list[TokenEvent] = []
    async for batch in events:
        for event in batch:
            if isinstance(event, TokenEvent):
                tokens.append(event)
            else:
                return tokens, _finished(event)
    raise _cut_short()


def _finished(event: FinishEvent | FailEvent) -> FinishEvent:
    if isinstance(event, FailEvent):
        if isinstance(event.error, RequestError):
            raise event.error
        raise EngineFailed(f"the replica failed: {event.error}") from event.error
    if event.reason == "cancelled":
        raise EngineFailed("the replica cancelled the request", code="cancelled")
    return event


def _cut_short() -> EngineFailed:
    return EngineFailed("the answer ended early", code="incomplete")


class EventStream(Response):
    """A streamed answer. The first batch of events has arrived; the rest is awaited here."""

    media_type = "text/event-stream"

    def __init__(
        self,
        shape: Shape,
        first: list[Event],
        events: AsyncGenerator[list[Event]],
        deadline: float,
        *,
        usage: bool,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._shape = shape
        self._first = first
        self._events = events
        self._deadline = deadline
        self._usage = usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, unless the client leaves."""
        try:
            async with aclosing(self._events):
                await unless_disconnected(receive, self._send(send))
        except ClientGone:
            log.info("the client left during the stream")

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        opening = b"".join(sse(chunk) for chunk in self._shape.opening())
        batch, ended = self._first, False
        while not ended:
            data, ended = self._render(batch)
            await _body(send, opening + data)
            opening = b""
            if not ended:
                batch = await self._next()
        await _body(send, b"", more=False)

    async def _next(self) -> list[Event]:
        """The next batch; whatever goes wrong from here on is an event of the stream."""
        try:
            return await until(self._deadline, anext(self._events, [FailEvent(_cut_short())]))
        except RequestError as err:
            return [FailEvent(err)]
        except Exception as err:
            log.exception("a stream failed")
            return [FailEvent(EngineFailed(f"the stream broke: {type(err).__name__}"))]

    def _render(self, batch: list[Event]) -> tuple[bytes, bool]:
        parts: list[bytes] = []
        for event in batch:
            if isinstance(event, TokenEvent):
                if event.text or event.logprob is not None:
                    parts.append(sse(self._shape.token(event)))
                continue
            try:
                finish = _finished(event)
            except RequestError as err:
                parts.append(sse(err.envelope()))
                return b"".join(parts), True
            parts.append(sse(self._shape.closing(finish)))
            if self._usage:
                parts.append(sse(self._shape.usage(finish.usage)))
            parts.append(DONE)
            return b"".join(parts), True
        return b"".join(parts), False


async def _body(send: Send, data: bytes, *, more: bool = True) -> None:
    if data or not more:
        await send({"type": "http.response.body", "body": data, "more_body": more})
