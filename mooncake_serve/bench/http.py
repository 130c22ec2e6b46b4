"""A lean HTTP/1.1 client for measuring: one keep-alive connection, parsed by httptools.

The SDK's client would measure itself: at ten thousand events a second its parsing takes more CPU
than the server's writing. Here bytes go from the socket through two C parsers, of HTTP and of JSON,
and nothing is awaited between them.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import httptools
from msgspec import Struct, json

EVENT, END_OF_EVENT, DONE = b"data: ", b"\n\n", b"[DONE]"
TIMEOUT_S = 120.0


class StreamedChoice(Struct):
    """What is counted of a choice in a chunk."""

    text: str
    finish_reason: str | None = None


class StreamedChunk(Struct):
    """What is counted of a text completion's chunk."""

    choices: list[StreamedChoice]


class Connection:
    """One connection to a server, one request at a time."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)

    def encode(self, path: str, body: bytes) -> bytes:
        """A POST of a JSON body as it goes over the wire: made once, sent often."""
        head = (
            f"POST {self._parts.path}{path} HTTP/1.1\r\nhost: {self._parts.netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def ask(self, request: bytes) -> bytes:
        """The whole body of the answer. Raises RuntimeError unless it is a 200."""
        return b"".join(await self._protocol.exchange(request))

    async def stream(self, request: bytes) -> list[StreamedChunk]:
        """The chunks of a streamed answer, each parsed when it arrives."""
        self._protocol.events = events = _Events()
        await self._protocol.exchange(request)
        if not events.done:
            raise RuntimeError("the stream ended without [DONE]")
        return events.chunks

    async def __aenter__(self) -> Self:
        host, port = self._parts.hostname or "", self._parts.port or 80
        loop = asyncio.get_running_loop()
        _, self._protocol = await loop.create_connection(_Protocol, host, port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._protocol.close()


class _Events:
    """Server-sent events out of a body's pieces."""

    def __init__(self) -> None:
        self.chunks: list[StreamedChunk] = []
        self.done = False
        self._rest = b""
        self._decode = json.Decoder(StreamedChunk).decode

    def take(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(END_OF_EVENT)
        for event in whole:
            payload = event.removeprefix(EVENT)
            if payload == DONE:
                self.done = True
            else:
                self.chunks.append(self._decode(payload))


class _Protocol(asyncio.Protocol):
    """Also what httptools calls back; both name their methods."""

    def __init__(self) -> None:
        self.events: _Events | None = None
        self._answered: asyncio.Future[list[bytes]] | None = None
        self._body: list[bytes] = []

    async def exchange(self, request: bytes) -> list[bytes]:
        self._parser = httptools.HttpResponseParser(self)
        self._body = []
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        async with asyncio.timeout(TIMEOUT_S):
            return await self._answered

    def close(self) -> None:
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(error=RuntimeError(f"the server closed the connection: {exc}"))

    def on_body(self, data: bytes) -> None:
        if self.events is not None and self._parser.get_status_code() == 200:
            self.events.take(data)
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        wrong = RuntimeError(f"{status}: {b''.join(self._body)[:500]!r}") if status != 200 else None
        self._end(error=wrong)

    def _end(self, *, error: Exception | None) -> None:
        answered, self._answered, self.events = self._answered, None, None
        if answered is None or answered.done():
            return
        if error is not None:
            answered.set_exception(error)
        else:
            answered.set_result(self._body)
