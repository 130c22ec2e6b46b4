"""Consuming a running request: as one answer, or as server-sent events.

The engine's requests end when their event generators are closed, so both ways close them whatever
happens: the last token, an error, the deadline, a client that left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from contextvars import Context
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mooncake_serve.api.gateway import Answer
from mooncake_serve.api.middleware import ClientGone, unless_disconnected
from mooncake_serve.api.observe import Observation
from mooncake_serve.api.shapes import DONE, Choice, Shape, sse, total_usage
from mooncake_serve.engine.protocol import Event, FailEvent, FinishEvent, TokenEvent, Usage
from mooncake_serve.errors import DeadlineExceeded, EngineFailed, RequestError
from mooncake_serve.logs import REQUEST
from mooncake_serve.tracing import TRACEPARENT

T = TypeVar("T")
Batch = tuple[int, list[Event]]
"""The index of a choice, and events of it."""

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


async def merge(answers: Sequence[Answer]) -> AsyncGenerator[Batch]:
    """Batches of all choices as they come. Closing it ends every choice."""
    if len(answers) == 1:
        async with aclosing(answers[0].events()) as only:
            async for events in only:
                yield 0, events
        return
    ready: asyncio.Queue[Batch | Exception] = asyncio.Queue(maxsize=2 * len(answers))
    pumps = [
        asyncio.get_running_loop().create_task(
            _pump(index, answer.events(), ready), context=_own_context()
        )
        for index, answer in enumerate(answers)
    ]
    try:
        running = len(answers)
        while running:
            got = await ready.get()
            if isinstance(got, Exception):
                raise got
            running -= isinstance(got[1][-1], FinishEvent | FailEvent)
            yield got
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for answer in answers:  # One whose pump never ran was never asked for its events.
            answer.abandon()


def _own_context() -> Context:
    """A context of its own for each choice, with what is ours of this one and nothing of Serve's:
    Serve 2.60 names handle calls after the HTTP request in the context, takes a second call of the
    same name for a retry of the first, and never sends it."""
    context = Context()
    for variable in (REQUEST, TRACEPARENT):
        context.run(variable.set, variable.get())
    return context


async def _pump(
    index: int, source: AsyncGenerator[list[Event]], ready: asyncio.Queue[Batch | Exception]
) -> None:
    ended = False
    try:
        async with aclosing(source):
            async for events in source:
                await ready.put((index, events))
                ended = isinstance(events[-1], FinishEvent | FailEvent)
        if not ended:
            await ready.put(_cut_short())
    except Exception as err:  # noqa: BLE001 - raised where the batches are read
        await ready.put(err)


async def first_batch(batches: AsyncGenerator[Batch]) -> Batch:
    """The first events. Raises what a FailEvent carries, having closed the generator."""
    try:
        batch = await anext(batches)
        if isinstance(batch[1][0], FailEvent):
            _finished(batch[1][0])
        return batch
    except BaseException:
        await batches.aclose()
        raise


async def collect(
    batches: AsyncGenerator[Batch], choices: int, observed: Observation
) -> list[Choice]:
    """All tokens and the ends. Raises what a FailEvent carries."""
    tokens: list[list[TokenEvent]] = [[] for _ in range(choices)]
    ends: dict[int, FinishEvent] = {}
    async for index, events in batches:
        observed.events(events)
        for event in events:
            if isinstance(event, TokenEvent):
                tokens[index].append(event)
            else:
                ends[index] = _finished(event)
        if len(ends) == choices:
            return [Choice(each, ends[index]) for index, each in enumerate(tokens)]
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
        first: Batch,
        batches: AsyncGenerator[Batch],
        deadline: float,
        observed: Observation,
        *,
        prompts: int,
        choices_per_prompt: int,
        usage: bool,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._shape = shape
        self._first = first
        self._batches = batches
        self._deadline = deadline
        self._observed = observed
        self._choices = prompts * choices_per_prompt
        self._choices_per_prompt = choices_per_prompt
        self._usage = usage
        self._usages: dict[int, Usage] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, unless the client leaves."""
        try:
            with self._observed:
                async with aclosing(self._batches):
                    await unless_disconnected(receive, self._send(send))
        except ClientGone:
            log.info("the client left during the stream")

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        try:
            last = await until(self._deadline, self._pass_on(send))
        except RequestError as err:
            last = self._failed(err)
        except Exception as err:
            log.exception("a stream failed")
            last = self._failed(EngineFailed(f"the stream broke: {type(err).__name__}"))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pass_on(self, send: Send) -> bytes:
        """Send each batch as it comes, but for the last: its bytes are returned."""
        opening = b"".join(sse(chunk) for chunk in self._shape.opening())
        index, events = self._first
        while True:
            self._observed.events(events)
            data, ended = self._render(index, events)
            data, opening = opening + data, b""
            if ended:
                return data
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            batch = await anext(self._batches, None)
            if batch is None:
                raise _cut_short()
            index, events = batch

    def _render(self, index: int, events: list[Event]) -> tuple[bytes, bool]:
        parts: list[bytes] = []
        for event in events:
            if isinstance(event, TokenEvent):
                if event.text or event.logprob is not None:
                    parts.append(self._shape.token(index, event))
                continue
            try:
                finish = _finished(event)
            except RequestError as err:
                parts.append(self._failed(err))
                return b"".join(parts), True
            parts += map(sse, self._shape.closing(index, finish))
            self._usages[index] = finish.usage
            if len(self._usages) == self._choices:
                parts.append(self._end())
                return b"".join(parts), True
        return b"".join(parts), False

    def _failed(self, error: RequestError) -> bytes:
        """Whatever goes wrong after the first byte is an event of the stream."""
        self._observed.failed(error)
        return sse(error.envelope())

    def _end(self) -> bytes:
        if not self._usage:
            return DONE
        usages = [self._usages[index] for index in range(self._choices)]
        return sse(self._shape.usage(total_usage(usages, self._choices_per_prompt))) + DONE
