"""The OpenAI-compatible application over a `Gateway`.

Every request has one deadline, `api.request_timeout_s`, from its first byte to its last token. A
request runs only while its client listens: leaving cancels it down to the engine. Nothing slow runs
on the event loop. The first events are awaited before the status line is sent, so that an error
before the first token has a status of its own; later ones become an SSE `error` event.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import mooncake_serve
from mooncake_serve.api import envelope
from mooncake_serve.api.gateway import Answer, Gateway, ModelCard
from mooncake_serve.api.middleware import Frame, read_body, unless_disconnected
from mooncake_serve.api.prepare import Prepared, check_model, prepare
from mooncake_serve.api.schemas import ChatBody, CompletionBody
from mooncake_serve.api.shapes import ChatShape, Shape, TextShape
from mooncake_serve.api.stream import EventStream, collect, first_batch, until
from mooncake_serve.api.tenancy import Tenant, tenant_of
from mooncake_serve.config import ApiConfig
from mooncake_serve.engine.protocol import GenerationRequest
from mooncake_serve.errors import InvalidRequest

PREPARE_THREADS = 2
PIN, EXPLAIN, ROUTE = "x-mooncake-replica", "x-mooncake-explain", "x-mooncake-route"

B = TypeVar("B", ChatBody, CompletionBody)


def create_app(gateway: Gateway, settings: ApiConfig, *, echo_request_id: bool = True) -> FastAPI:
    """The application; `gateway` is used from its event loop only.

    `echo_request_id=False` leaves the response's `x-request-id` to a server that sets it itself.
    """
    app = FastAPI(title="mooncake_serve", version=mooncake_serve.__version__)
    front = _Front(gateway, settings)
    app.add_api_route("/health", front.health, methods=["GET"])
    app.add_api_route("/version", front.version, methods=["GET"])
    app.add_api_route("/v1/models", front.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", front.model, methods=["GET"])
    app.add_api_route(
        "/v1/chat/completions",
        front.chat,
        methods=["POST"],
        response_model=None,
        openapi_extra=_body_schema(ChatBody),
    )
    app.add_api_route(
        "/v1/completions",
        front.complete,
        methods=["POST"],
        response_model=None,
        openapi_extra=_body_schema(CompletionBody),
    )
    envelope.install(app)
    app.add_middleware(Frame, echo_request_id=echo_request_id)
    return app


def _body_schema(kind: type[ChatBody | CompletionBody]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


class _Front:
    """The routes."""

    def __init__(self, gateway: Gateway, settings: ApiConfig) -> None:
        self._gateway = gateway
        self._settings = settings
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")

    async def health(self) -> dict[str, str]:
        """200 while a replica can answer, else 503."""
        await self._gateway.card()
        return {"status": "ok"}

    async def version(self) -> dict[str, str]:
        """The version of this server."""
        return {"version": mooncake_serve.__version__}

    async def models(self) -> dict[str, Any]:
        """The one model served here."""
        return {"object": "list", "data": [_model_json(await self._gateway.card())]}

    async def model(self, name: str) -> dict[str, Any]:
        """It, by its name."""
        card = await self._gateway.card()
        check_model(name, card)
        return _model_json(card)

    async def chat(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, ChatBody)

    async def complete(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._answer(request, CompletionBody)

    async def _answer(self, request: Request, kind: type[B]) -> Response:
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s
        tenant = tenant_of(request, self._settings.tenant_secret)
        raw = await until(deadline, read_body(request, self._settings.max_body))
        work = until(deadline, self._respond(request, kind, raw, tenant, deadline))
        return await unless_disconnected(request.receive, work)

    async def _respond(
        self, request: Request, kind: type[B], raw: bytes, tenant: Tenant, deadline: float
    ) -> Response:
        card, codec = await asyncio.gather(self._gateway.card(), self._gateway.codec())
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._pool, prepare, raw, kind, card, codec)
        # Not the client's x-request-id, which may come twice.
        request_id = uuid.uuid4().hex
        answer = await self._gateway.start(
            _generation(request_id, prepared, tenant), deadline - loop.time(), _pin(request)
        )
        body = prepared.body
        shape: Shape
        if isinstance(body, ChatBody):
            shape = ChatShape(card.name, codec, request_id, stream=body.stream)
        else:
            shape = TextShape(card.name, codec, request_id)
        events = answer.events()
        if body.stream:
            first = await first_batch(events)
            stream = EventStream(shape, first, events, deadline, usage=body.include_usage)
            stream.headers.update(_route_headers(request, answer))
            return stream
        async with aclosing(events):
            tokens, finish = await collect(events)
        whole = await loop.run_in_executor(self._pool, shape.whole, tokens, finish)
        return JSONResponse(whole, headers=_route_headers(request, answer))


def _generation(request_id: str, prepared: Prepared[Any], tenant: Tenant) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        token_ids=prepared.token_ids,
        sampling=prepared.sampling,
        tenant=tenant.name,
        tenant_salt=tenant.salt,
    )


def _model_json(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "mooncake_serve",
        "max_model_len": card.max_context,
        "exact": card.exact,
    }


def _pin(request: Request) -> int | None:
    """The replica that a test or demonstration asks for, by its index."""
    value = request.headers.get(PIN)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 6:
        raise InvalidRequest(f"{PIN} must be the index of a replica, such as 0", param=PIN)
    return int(value)


def _route_headers(request: Request, answer: Answer) -> dict[str, str]:
    if request.headers.get(EXPLAIN) != "1":
        return {}
    return {ROUTE: json.dumps(answer.route, separators=(",", ":"))}
