"""ASGI middleware around every route: body size, request ids.

A body over the limit is refused while it arrives, so that memory stays bounded whatever its
headers said.
"""

from __future__ import annotations

import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake_serve.api.envelope import respond
from mooncake_serve.errors import PayloadTooLarge

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """Echoes `x-request-id`, or makes one; `scope["state"]["request_id"]` holds it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                message["headers"] = [*headers, (b"x-request-id", request_id.encode("latin-1"))]
            await send(message)

        await self._app(scope, receive, send_with_id)


class BodyLimit:
    """Refuses bodies over `max_body` bytes with 413."""

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self._app = app
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages: list[Message] = []
        size = 0
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > self._max_body:
                await respond(self._error())(scope, receive, send)
                return
            if message["type"] != "http.request" or not message.get("more_body", False):
                break

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, replay, send)

    def _error(self) -> PayloadTooLarge:
        return PayloadTooLarge(
            f"the body is larger than {self._max_body} bytes (api.max_body)",
            code="payload_too_large",
        )
