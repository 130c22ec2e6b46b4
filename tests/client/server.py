"""A small OpenAI-like server on loopback, scripted by the test."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Handler = Callable[[dict[str, Any]], Response]
START_TIMEOUT_S = 20.0


def answer(text: str) -> JSONResponse:
    """A whole chat completion."""
    payload = {
        "id": "chatcmpl-1",
        "model": "tiny",
        "choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    return JSONResponse(payload, headers={"x-request-id": "req-1"})


def events(*payloads: dict[str, Any] | str) -> StreamingResponse:
    """A stream of server-sent events."""

    def lines() -> Iterator[str]:
        for payload in payloads:
            yield f"data: {payload if isinstance(payload, str) else json.dumps(payload)}\n\n"

    return StreamingResponse(
        lines(), media_type="text/event-stream", headers={"x-request-id": "req-2"}
    )


def chunk(text: str | None, reason: str | None = None) -> dict[str, Any]:
    """One chunk of a chat stream."""
    delta = {} if text is None else {"content": text}
    return {"model": "tiny", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


class Script:
    """What the server answers, and what it was asked."""

    def __init__(self) -> None:
        self.handlers: list[Handler] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    async def handle(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        return self.handlers.pop(0)(body)


@contextmanager
def running(script: Script) -> Iterator[str]:
    """The server's address while it runs."""
    routes = [
        Route("/v1/chat/completions", script.handle, methods=["POST"]),
        Route("/v1/completions", script.handle, methods=["POST"]),
        Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "tiny"}]})),
        Route("/health", lambda _: JSONResponse({"status": "ok"})),
    ]
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
        listener.close()
