"""The operators' page: nodes, tiers, replicas, hit rate, hot prefixes, routes; live.

Static files out of the package, no other origin, no build step. `install` adds the page and its
data to an application that only operators reach. The data comes from one callable, asked at most
once a second however many pages are open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse, Response

from mooncake_serve.errors import NotFound

STATIC = Path(__file__).with_name("static")
FRESH_S = 1.0
ASSETS = {
    "dashboard.js": "text/javascript",
    "charts.js": "text/javascript",
    "dashboard.css": "text/css",
    "uplot/uPlot.iife.min.js": "text/javascript",
    "uplot/uPlot.min.css": "text/css",
}
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

Overview = Callable[[], Awaitable[dict[str, Any]]]


def install(app: FastAPI, overview: Overview) -> None:
    """Add `/dashboard/` and what belongs to it."""
    recent = _Recent(overview)

    async def page() -> Response:
        return FileResponse(STATIC / "index.html", media_type="text/html", headers=HEADERS)

    async def data() -> Response:
        return JSONResponse(await recent.get(), headers=HEADERS)

    async def asset(name: str) -> Response:
        if name not in ASSETS:
            raise NotFound(f"no such file: {name}")
        return FileResponse(STATIC / name, media_type=ASSETS[name], headers=HEADERS)

    async def start() -> Response:
        return RedirectResponse("/dashboard/")

    app.add_api_route("/dashboard", start, methods=["GET"], include_in_schema=False)
    app.add_api_route("/dashboard/", page, methods=["GET"], include_in_schema=False)
    app.add_api_route("/dashboard/data", data, methods=["GET"], response_model=None)
    app.add_api_route(
        "/dashboard/static/{name:path}", asset, methods=["GET"], include_in_schema=False
    )


class _Recent:
    """The overview, collected once for all who ask within `FRESH_S`."""

    def __init__(self, overview: Overview) -> None:
        self._overview = overview
        self._lock = asyncio.Lock()
        self._value: dict[str, Any] = {}
        self._until = 0.0

    async def get(self) -> dict[str, Any]:
        """At most `FRESH_S` old."""
        async with self._lock:
            if time.monotonic() >= self._until:
                self._value = await self._overview()
                self._until = time.monotonic() + FRESH_S
            return self._value
