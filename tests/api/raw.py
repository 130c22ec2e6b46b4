"""A server on loopback, and requests byte by byte, as no client library would send them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

PATIENCE_S = 20.0


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    """Serve `app` in this loop; yields its port."""
    config = uvicorn.Config(app, port=0, log_level="error", lifespan="off", access_log=False)
    server = uvicorn.Server(config)
    running = asyncio.ensure_future(server.serve())
    async with asyncio.timeout(PATIENCE_S):
        while not server.started:
            await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, PATIENCE_S)


async def status(port: int, method: str, target: str, *lines: str, host: str | None = None) -> int:
    """Status of one request with these header lines; 0 if the server just hangs up."""
    head = [f"{method} {target} HTTP/1.1", f"Host: {host or f'127.0.0.1:{port}'}"]
    if method not in {"GET", "HEAD"}:
        head.append("Content-Length: 0")
    if not any(line.lower().startswith("connection:") for line in lines):
        head.append("Connection: close")
    raw = "\r\n".join([*head, *lines, "", ""]).encode("latin-1")
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(raw)
            first = await reader.readline()
        finally:
            writer.close()
    return int(first.split()[1]) if first else 0
