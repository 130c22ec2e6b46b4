"""Routes. Every request has a deadline; a client that goes away ends its request.

Tokenising runs in a thread pool of its own: nothing here keeps the event loop for more than some
milliseconds.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from importlib.metadata import version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from mooncake_serve.api import envelope
from mooncake_serve.api.gateway import Answer, Codec, Gateway, ModelCard
from mooncake_serve.api.limits import BodyLimit, RequestIds
from mooncake_serve.api.render import Renderer, sse, sse_error
from mooncake_serve.api.schemas import ChatBody, CompletionBody
from mooncake_serve.config import ApiConfig
from mooncake_serve.engine.protocol import (
    Event,
    FailEvent,
    FinishEvent,
    GenerationRequest,
    TokenEvent,
)
from mooncake_serve.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    NotFound,
    RequestError,
)

T = TypeVar("T")

TOKENIZER_THREADS = 2
DISCONNECT_POLL_S = 0.5


def create_app(gateway: Gateway, config: ApiConfig) -> FastAPI:
    """The application over `gateway`."""
    app = FastAPI(title="mooncake_serve", version=version("mooncake-serve"), redoc_url=None)
    envelope.install(app)
    app.add_middleware(BodyLimit, max_body=config.max_body)
    app.add_middleware(RequestIds)
    front = Front(gateway, config)
    app.get("/health")(front.health)
    app.get("/version")(front.version)
    app.get("/v1/models")(front.models)
    app.get("/v1/models/{model_id:path}")(front.model)
    app.post("/v1/chat/completions", response_model=None)(front.chat)
    app.post("/v1/completions", response_model=None)(front.complete)
    return app


class Front:
    """The handlers, over one gateway."""

    def __init__(self, gateway: Gateway, config: ApiConfig) -> None:
        self._gateway = gateway
        self._config = config
        self._pool = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    async def health(self) -> dict[str, str]:
        """200 when a replica can answer."""
        await self._gateway.card()
        return {"status": "ok"}

    async def version(self) -> dict[str, str]:
        """The version of the server."""
        return {"version": version("mooncake-serve")}

    async def models(self) -> dict[str, Any]:
        """The models served."""
        return {"object": "list", "data": [_model_payload(await self._gateway.card())]}

    async def model(self, model_id: str) -> dict[str, Any]:
        """One model."""
        card = await self._gateway.card()
        _check_model(model_id, card)
        return _model_payload(card)

    async def chat(self, body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""

        def tokens(codec: Codec) -> list[int]:
            return codec.encode_chat([message.template_form() for message in body.messages])

        return await self._run(body, request, tokens)

    async def complete(self, body: CompletionBody, request: Request) -> Response:
        """Continue a text."""

        def tokens(codec: Codec) -> list[int]:
            prompt = body.prompt
            if isinstance(prompt, str):
                return codec.encode(prompt)
            ids = [token for token in prompt if isinstance(token, int)]
            return ids or codec.encode(str(prompt[0]) if prompt else "")

        return await self._run(body, request, tokens)

    async def _run(
        self,
        body: ChatBody | CompletionBody,
        http: Request,
        tokens: Callable[[Codec], list[int]],
    ) -> Response:
        deadline = time.monotonic() + self._config.request_timeout_s
        card = await self._gateway.card()
        _check_model(body.model, card)
        codec = await self._gateway.codec()
        token_ids = await self._in_pool(lambda: tokens(codec))
        sampling = body.sampling(card.max_context - len(token_ids))
        _check_context(len(token_ids), sampling.max_tokens, card)
        request = GenerationRequest(
            request_id=http.state.request_id, token_ids=tuple(token_ids), sampling=sampling
        )
        answer = await self._gateway.start(
            request, deadline - time.monotonic(), _pinned_replica(http)
        )
        renderer = Renderer(
            kind="chat" if isinstance(body, ChatBody) else "text",
            request_id=request.request_id,
            model=card.name,
            created=int(time.time()),
            token_text=lambda token: codec.decode([token]),
            logprobs=sampling.logprobs is not None,
        )
        events = _until(deadline, answer.events())
        headers = _route_header(http, answer)
        if not body.stream:
            payload = await _unless_disconnected(http, _whole(events, renderer))
            return JSONResponse(payload, headers=headers)
        first = await anext(events)
        if isinstance(first[0], FailEvent):
            await events.aclose()
            raise first[0].error
        return StreamingResponse(
            _stream(first, events, renderer, include_usage=body.include_usage),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", **headers},
        )

    async def _in_pool(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


async def _until(
    deadline: float, batches: AsyncIterator[list[Event]]
) -> AsyncIterator[list[Event]]:
    """The batches until the deadline; past it, one that fails."""
    try:
        while True:
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    batch = await anext(batches)
            except StopAsyncIteration:
                return
            except TimeoutError:
                yield [FailEvent(DeadlineExceeded("the request did not finish in time"))]
                return
            except RequestError as err:
                yield [FailEvent(err)]
                return
            yield batch
    finally:
        close = getattr(batches, "aclose", None)
        if close is not None:
            await close()


async def _whole(events: AsyncIterator[list[Event]], renderer: Renderer) -> dict[str, Any]:
    async with aclosing(events) as batches:  # pyright: ignore[reportArgumentType]
        async for batch in batches:
            for event in batch:
                if isinstance(event, TokenEvent):
                    renderer.add(event)
                elif isinstance(event, FailEvent):
                    raise event.error
                else:
                    return renderer.whole(event)
    raise EngineFailed("the answer ended without a reason")


async def _stream(
    first: list[Event],
    events: AsyncIterator[list[Event]],
    renderer: Renderer,
    *,
    include_usage: bool,
) -> AsyncIterator[str]:
    opening = renderer.first()
    if opening is not None:
        yield sse(opening)
    batch: list[Event] = first
    async with aclosing(events) as batches:  # pyright: ignore[reportArgumentType]
        while True:
            tokens = [event for event in batch if isinstance(event, TokenEvent)]
            chunk = renderer.tokens(tokens)
            if chunk is not None:
                yield sse(chunk)
            end = batch[-1]
            if isinstance(end, FailEvent):
                error = end.error
                known = isinstance(error, RequestError)
                yield sse_error(error if known else EngineFailed("the replica failed"))
                return
            if isinstance(end, FinishEvent):
                for chunk in renderer.last(end):
                    yield sse(chunk)
                if include_usage:
                    yield sse(renderer.usage(end))
                yield sse("[DONE]")
                return
            batch = await anext(batches)


async def _unless_disconnected(http: Request, work: Any) -> Any:
    """Await `work`, but cancel it when the client goes away."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=DISCONNECT_POLL_S)
            if not task.done() and await http.is_disconnected():
                raise InvalidRequest("the client closed the connection", code="client_closed")
        return task.result()
    finally:
        task.cancel()


def _check_model(asked: str, card: ModelCard) -> None:
    if asked != card.name:
        raise NotFound(
            f"no model {asked!r}; this server has {card.name!r}",
            param="model",
            code="model_not_found",
        )


def _check_context(prompt: int, max_tokens: int, card: ModelCard) -> None:
    if prompt + max_tokens > card.max_context:
        raise ContextTooLong(
            f"this model's context is {card.max_context} tokens; the prompt has {prompt} and "
            f"max_tokens asks for {max_tokens}",
            param="messages" if prompt >= card.max_context else "max_tokens",
            code="context_length_exceeded",
        )


def _pinned_replica(http: Request) -> int | None:
    value = http.headers.get("x-mooncake-replica")
    if value is None:
        return None
    if not value.isdecimal():
        raise InvalidRequest(
            f"x-mooncake-replica: {value!r} is not the index of a replica", code="invalid_value"
        )
    return int(value)


def _route_header(http: Request, answer: Answer) -> dict[str, str]:
    if http.headers.get("x-mooncake-explain") != "1":
        return {}
    return {"x-mooncake-route": json.dumps(answer.route)}


def _model_payload(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "mooncake_serve",
        "max_model_len": card.max_context,
        "exact": card.exact,
    }
