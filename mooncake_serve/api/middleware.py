"""What surrounds every request: its id, the size of its body, and a client that leaves.

`Frame` is plain ASGI: it sets `x-request-id` on every response, counts those that are errors,
whoever gave them, and is the last resort for errors that no handler took, so that a client never
sees anything but OpenAI's envelope.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mooncake_serve import tracing
from mooncake_serve.api.envelope import respond
from mooncake_serve.api.observe import Observer
from mooncake_serve.errors import EngineFailed, PayloadTooLarge, RequestError
from mooncake_serve.logs import request_context, write_info

T = TypeVar("T")

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
PATH_MAX = 200
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ClientGone(RequestError):
    """The client closed the connection; nobody reads this answer."""

    status = 499
    type = "client_closed_request"


class Frame:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, *, observer: Observer, echo_request_id: bool) -> None:
        self._app = app
        self._observer = observer
        self._echo = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        started, status = False, 0

        async def send_with_id(message: Message) -> None:
            nonlocal started, status
            if message["type"] == "http.response.start":
                started, status = True, message["status"]
                if status >= 400:
                    self._observer.failed(status)
                if self._echo:
                    MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        with (
            request_context(request_id),
            tracing.span("request", headers.get("traceparent", "")) as note,
            tracing.under(note.traceparent),
        ):
            begun = time.perf_counter()
            try:
                await self._app(scope, receive, send_with_id)
            except Exception as err:
                if started:
                    raise
                if not isinstance(err, RequestError):
                    log.exception("request %s failed", request_id)
                    err = EngineFailed("internal error; the server's log has the details")
                await respond(err)(scope, receive, send_with_id)
            finally:
                seconds = round(time.perf_counter() - begun, 4)
                note.set(request_id=request_id, status=status)
                write_info(
                    log,
                    "answered",
                    request_id,
                    method=scope["method"],
                    status=status,
                    seconds=seconds,
                    path=scope["path"][:PATH_MAX],
                )


def _request_id(headers: Headers) -> str:
    given = headers.get(REQUEST_ID, "")
    return given if _ID.fullmatch(given) else f"req-{new_id()}"


def new_id() -> str:
    """A name that no other request has; no secret. uuid4 asks the kernel each time, which can take
    longer than planning a request."""
    return f"{random.getrandbits(128):032x}"


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; PayloadTooLarge as soon as it is certain to exceed `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the body is larger than {limit} bytes; shorten it, or raise api.max_body",
        code="body_too_large",
    )


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, cancelling it when the client leaves. The body must have been read before.

    `work` runs in the caller's task, as below `asyncio.timeout`: a task of its own would cost every
    request some turns of the loop. Raises ClientGone.
    """
    worker = asyncio.current_task()
    assert worker is not None
    cancelled_before = worker.cancelling()
    watch = asyncio.ensure_future(_cancel_when_gone(worker, receive))
    try:
        return await work
    except asyncio.CancelledError:
        if watch.done() and worker.cancelling() == cancelled_before + 1:  # By the watch alone.
            raise ClientGone("the client closed the connection") from None
        raise
    finally:
        if watch.done():
            worker.uncancel()
        watch.cancel()


async def _cancel_when_gone(worker: asyncio.Task[Any], receive: Receive) -> None:
    with suppress(Exception):  # A connection that cannot be read is gone as well.
        while (await receive())["type"] != "http.disconnect":
            pass
    worker.cancel()
