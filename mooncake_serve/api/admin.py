"""Operators' routes, on a port of their own: nothing here is reachable where clients come in.

Who may ask is decided in `operators.py`, before any route. `serve` binds `api.admin_host` (loopback
unless told otherwise) and runs in the ingress's own loop. The port is shared while a new ingress
replaces an old one (SO_REUSEPORT).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import Response

import mooncake_serve
from mooncake_serve.api import envelope
from mooncake_serve.api.middleware import Frame
from mooncake_serve.api.observe import Observer
from mooncake_serve.api.operators import OperatorsDoor
from mooncake_serve.api.tenancy import Doorkeeper
from mooncake_serve.errors import ConfigError, InvalidRequest
from mooncake_serve.prometheus import CONTENT_TYPE

Replicas = Callable[[], Awaitable[dict[str, Any]]]


def create_admin_app(
    observer: Observer, keeper: Doorkeeper, replicas: Replicas, token: bytes | None = None
) -> FastAPI:
    """The operators' application; `replicas` says what runs and how much it has to do.

    `token` is asked of every request; None asks for none.
    """
    app = FastAPI(title="mooncake_serve admin", version=mooncake_serve.__version__)

    async def scrape() -> Response:
        return Response(observer.scrape.render(), media_type=CONTENT_TYPE)

    async def tenants() -> dict[str, Any]:
        uses = keeper.limiter.uses().items()
        fields = ("running", "requests", "refused")
        return {name: {field: asdict(use)[field] for field in fields} for name, use in uses}

    async def reload_keys() -> dict[str, int]:
        if keeper.ring is None:
            raise InvalidRequest("no api.keys_file is configured", param="api.keys_file")
        try:
            return {"keys": keeper.ring.reload()}
        except ConfigError as err:
            raise InvalidRequest(str(err), param="api.keys_file") from err

    app.add_api_route("/metrics", scrape, methods=["GET"], response_model=None)
    app.add_api_route("/tenants", tenants, methods=["GET"])
    app.add_api_route("/replicas", replicas, methods=["GET"])
    app.add_api_route("/keys/reload", reload_keys, methods=["POST"])
    envelope.install(app)
    app.add_middleware(OperatorsDoor, token=token)
    app.add_middleware(Frame, observer=observer, echo_request_id=True)
    return app


class _Server(uvicorn.Server):
    """A server inside another program: signals are not its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: FastAPI, host: str, port: int) -> None:
    """Answer on `host:port` until cancelled. Raises ConfigError when it cannot listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
    except OSError as err:
        listener.close()
        raise ConfigError("api.admin_port", f"{host}:{port}: {err.strerror}") from err
    config = uvicorn.Config(app, log_level="warning", lifespan="off", access_log=False)
    await _Server(config).serve(sockets=[listener])
