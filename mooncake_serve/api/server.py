"""The OpenAI-compatible application over a `Gateway`.

Every request has one deadline, `api.request_timeout_s`, from its first byte to its last token. A
request runs only while its client listens: leaving cancels it down to the engine.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

import mooncake_serve
from mooncake_serve.api import envelope, openapi
from mooncake_serve.api.batches import Batches
from mooncake_serve.api.gateway import Gateway, ModelCard
from mooncake_serve.api.generate import Asked, Generator
from mooncake_serve.api.middleware import Frame, read_body, unless_disconnected
from mooncake_serve.api.observe import Observer
from mooncake_serve.api.prepare import check_model, parse, tokenize
from mooncake_serve.api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from mooncake_serve.api.stream import until
from mooncake_serve.api.tenancy import Door, Doorkeeper
from mooncake_serve.config import ApiConfig
from mooncake_serve.errors import InvalidRequest
from mooncake_serve.prometheus import CONTENT_TYPE

PIN, EXPLAIN, ROUTE = "x-mooncake-replica", "x-mooncake-explain", "x-mooncake-route"
SESSION, SESSION_CHARS_MAX = "x-session-id", 256

M = TypeVar("M", bound=BaseModel)
B = TypeVar("B", ChatBody, CompletionBody)


def create_app(
    gateway: Gateway,
    settings: ApiConfig,
    *,
    observer: Observer | None = None,
    keeper: Doorkeeper | None = None,
    generator: Generator | None = None,
    batches: Batches | None = None,
    echo_request_id: bool = True,
) -> FastAPI:
    """The application; `gateway` is used from its event loop only.

    `observer` and `keeper` may be shared with an admin application, `generator` with a runner of
    batches; without `batches` there are no such routes. `echo_request_id=False` leaves the
    response's `x-request-id` to a server that sets it itself. Raises ConfigError.
    """
    app = FastAPI(title="mooncake_serve", version=mooncake_serve.__version__)
    observer = observer or Observer()
    keeper = keeper or Doorkeeper(settings)
    front = _Front(gateway, settings, observer, generator or Generator(gateway, observer))
    gets = {
        "/health": front.health,
        "/version": front.version,
        "/v1/models": front.models,
        "/v1/models/{name:path}": front.model,
    }
    if keeper.ring is None:  # With keys, what all tenants do is for operators: the admin port.
        gets["/metrics"] = front.metrics
    # First and without FastAPI's handling of parameters, of which these have none: a tenth of a
    # millisecond. Their routes below document them.
    for path, generate in {
        "/v1/chat/completions": front.chat,
        "/v1/completions": front.complete,
    }.items():
        app.router.add_route(path, generate, methods=["POST"], include_in_schema=False)
    for path, get in gets.items():
        app.add_api_route(path, get, methods=["GET"], response_model=None)
    posts = {
        "/v1/chat/completions": (front.chat, ChatBody),
        "/v1/completions": (front.complete, CompletionBody),
        "/tokenize": (front.tokenize, TokenizeBody),
        "/detokenize": (front.detokenize, DetokenizeBody),
    }
    for path, (post, body) in posts.items():
        app.add_api_route(
            path, post, methods=["POST"], response_model=None, openapi_extra=openapi.takes(body)
        )
    if batches is not None:
        batches.add_routes(app)
    openapi.install(app)
    envelope.install(app)
    app.add_middleware(Door, keeper=keeper)
    app.add_middleware(Frame, observer=observer, echo_request_id=echo_request_id)
    return app


class _Front:
    """The routes."""

    def __init__(
        self, gateway: Gateway, settings: ApiConfig, observer: Observer, generator: Generator
    ) -> None:
        self._gateway = gateway
        self._settings = settings
        self._observer = observer
        self._generator = generator

    async def health(self) -> dict[str, str]:
        """200 while a replica can answer, else 503."""
        await self._gateway.card()
        return {"status": "ok"}

    async def version(self) -> dict[str, str]:
        """The version of this server."""
        return {"version": mooncake_serve.__version__}

    async def metrics(self) -> Response:
        """What this ingress has seen, for Prometheus."""
        return Response(self._observer.scrape.render(), media_type=CONTENT_TYPE)

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

    async def tokenize(self, request: Request) -> dict[str, Any]:
        """`POST /tokenize`: the token ids a completion would have."""
        body, card = await self._small(request, TokenizeBody)
        tokens = await self._generator.in_thread(tokenize, body, await self._gateway.codec())
        return {"count": len(tokens), "max_model_len": card.max_context, "tokens": tokens}

    async def detokenize(self, request: Request) -> dict[str, Any]:
        """`POST /detokenize`: the text of token ids."""
        body, card = await self._small(request, DetokenizeBody)
        if any(token >= card.vocab_size for token in body.tokens):
            raise InvalidRequest(
                f"tokens: ids must be between 0 and {card.vocab_size - 1}", param="tokens"
            )
        codec = await self._gateway.codec()
        return {"prompt": await self._generator.in_thread(codec.decode, body.tokens)}

    async def _small(self, request: Request, kind: type[M]) -> tuple[M, ModelCard]:
        raw = await until(self._deadline(), read_body(request, self._settings.max_body))
        body: Any = await self._generator.in_thread(parse, raw, kind)
        card = await self._gateway.card()
        if body.model is not None:
            check_model(body.model, card)
        return body, card

    async def _answer(self, request: Request, kind: type[B]) -> Response:
        deadline = self._deadline()
        return await until(deadline, self._answer_by(deadline, request, kind))

    async def _answer_by(self, deadline: float, request: Request, kind: type[B]) -> Response:
        raw = await read_body(request, self._settings.max_body)
        asked = Asked(request.state.tenant, deadline, _pin(request), _session(request))
        return await unless_disconnected(request.receive, self._respond(request, kind, raw, asked))

    async def _respond(self, request: Request, kind: type[B], raw: bytes, asked: Asked) -> Response:
        running = await self._generator.start(raw, kind, asked)
        if running.prepared.body.stream:
            response = await self._generator.stream(running, asked.deadline)
        else:
            whole = msgspec.json.encode(await self._generator.whole(running))
            response = Response(whole, media_type="application/json")
        if request.headers.get(EXPLAIN) == "1":
            response.headers[ROUTE] = json.dumps(running.route, separators=(",", ":"))
        return response

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._settings.request_timeout_s


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


def _session(request: Request) -> str | None:
    value = request.headers.get(SESSION)
    if value is not None and not 0 < len(value) <= SESSION_CHARS_MAX:
        raise InvalidRequest(
            f"{SESSION} must have 1 to {SESSION_CHARS_MAX} characters", param=SESSION
        )
    return value
