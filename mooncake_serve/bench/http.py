"""A lean HTTP/1.1 client for measuring: one connection, no parsing beyond what is counted.

The SDK's client would measure itself: at 10,000 events a second its parsing takes more CPU than the
server's writing.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

EVENT = b"data: "
DONE = b"data: [DONE]"
READ_BYTES = 1 << 16
TIMEOUT_S = 120.0


class Connection:
    """One keep-alive connection to a server."""

    def __init__(self, url: str) -> None:
        self._parts = urlsplit(url)

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed. Raises RuntimeError unless it is a 200."""
        length = await self._send(path, body)
        if length is None:
            raise RuntimeError("the answer has no length")
        return await self._reader.readexactly(length)

    async def count_events(self, path: str, body: dict[str, Any]) -> int:
        """Server-sent events of a streamed answer, `[DONE]` included."""
        await self._send(path, body)
        count, tail = 0, b""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                data = await self._reader.read(READ_BYTES)
                if not data:
                    raise RuntimeError("the stream ended early")
                data = tail + data
                # An event's beginning may be cut in two.
                keep = len(DONE) - 1
                done = DONE in data
                count += data.count(EVENT) - tail.count(EVENT)
                if done:
                    return count
                tail = data[-keep:]

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(
            self._parts.hostname, self._parts.port
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()

    async def _send(self, path: str, body: dict[str, Any]) -> int | None:
        """Send a request and read the head of its answer: the body's length, if it says so."""
        raw = json.dumps(body).encode()
        head = (
            f"POST {self._parts.path}{path} HTTP/1.1\r\nhost: {self._parts.netloc}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
        )
        self._writer.write(head.encode() + raw)
        async with asyncio.timeout(TIMEOUT_S):
            answer = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = answer.split("\r\n")
        if " 200 " not in f"{status} ":
            rest = await self._reader.read(READ_BYTES)
            raise RuntimeError(f"{status}: {rest[:500]!r}")
        for line in lines:
            name, _, value = line.partition(":")
            if name.lower() == "content-length":
                return int(value)
        return None
