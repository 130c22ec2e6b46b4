"""Nobody comes in by a side door: every route of both ports, every method, every trick we know."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mooncake_serve import dashboard
from mooncake_serve.api import admin, create_app, keys
from mooncake_serve.api.batches import Batches
from mooncake_serve.api.generate import Generator
from mooncake_serve.api.observe import Observer
from mooncake_serve.api.tenancy import OPEN_ROUTES, Doorkeeper
from mooncake_serve.config import ApiConfig, load_app_config
from mooncake_serve.errors import ConfigError
from tests.api.fake import FakeGateway
from tests.api.raw import serving, status
from tests.api.test_answers import CHAT, chat

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")
TOKEN = "a token that operators know"


class Front:
    """The clients' application with files, batches and keys, and the operators'."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.json"
        self.key = keys.create(self.file, "acme")
        self.other = keys.create(self.file, "umbrella")
        secret = folder / "secret"
        secret.write_text("a secret that nobody can guess\n")
        settings = ApiConfig(keys_file=str(self.file), tenant_secret_file=str(secret))
        gateway, observer, keeper = FakeGateway(), Observer(), Doorkeeper(settings)
        generator = Generator(gateway, observer)
        batches = Batches(folder / "state", generator, keeper, settings)
        self.clients = create_app(
            gateway,
            settings,
            observer=observer,
            keeper=keeper,
            generator=generator,
            batches=batches,
        )
        self._parts = (observer, keeper)

    def operators(self, token: str | None) -> FastAPI:
        async def replicas() -> dict[str, Any]:
            return {}

        app = admin.create_admin_app(*self._parts, replicas, token.encode() if token else None)
        dashboard.install(app, replicas)
        return app


@pytest.fixture
def front(tmp_path: Path) -> Front:
    return Front(tmp_path)


def routes(app: FastAPI) -> Iterator[str]:
    """The path of every route, parameters filled in."""
    for route in app.routes:
        yield re.sub(r"\{[^}]+\}", "x", getattr(route, "path"))  # noqa: B009


def test_no_route_runs_code(front: Front) -> None:
    """All there is to ask. Whoever adds a route looks at what it lets a caller do."""
    documents = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
    assert set(routes(front.clients)) - documents == {
        "/health",
        "/version",
        "/v1/models",
        "/v1/models/x",
        CHAT,
        "/v1/completions",
        "/tokenize",
        "/detokenize",
        "/v1/files",
        "/v1/files/x",
        "/v1/files/x/content",
        "/v1/batches",
        "/v1/batches/x",
        "/v1/batches/x/cancel",
    }
    assert set(routes(front.operators(None))) - documents == {
        "/metrics",
        "/tenants",
        "/replicas",
        "/keys/reload",
        "/dashboard",
        "/dashboard/",
        "/dashboard/data",
        "/dashboard/static/x",
    }


def without_a_key(key: str) -> list[tuple[str, ...]]:
    """Header lines that are no key, though some hold one."""
    wrong = f"{key[:-1]}{'a' if key[-1] != 'a' else 'b'}"
    tricks = ["Bearer", "Bearer ", f"Bearer {wrong}", f"Bearer {key}x", f"Basic {key}", key]
    tricks += [f"Token {key}", "Bearer mk-" + key.split("-")[1], "Bearer null", "Bearer *"]
    lines: list[tuple[str, ...]] = [(f"Authorization: {trick}",) for trick in tricks]
    lines += [(), (f"X-Api-Key: {key}",), (f"Cookie: authorization=Bearer {key}",)]
    lines += [(f"Proxy-Authorization: Bearer {key}",), ("X-Forwarded-For: 127.0.0.1",)]
    lines += [("X-Original-URL: /health", "X-Rewrite-URL: /health", "X-Forwarded-Prefix: /health")]
    lines += [("X-HTTP-Method-Override: GET", "X-Forwarded-User: acme", "X-Tenant: acme")]
    return [*lines, (f"Authorization: Bearer {wrong}", f"Authorization: Bearer {key}")]


async def test_every_route_and_method_wants_a_key(front: Front) -> None:
    paths = sorted(set(routes(front.clients)) - OPEN_ROUTES)
    assert {"/v1/models", CHAT, "/v1/files", "/v1/batches/x/cancel", "/docs"} <= set(paths)
    async with serving(front.clients) as port:
        for path in paths:
            for method in METHODS:
                assert await status(port, method, path) in {400, 401}, (method, path)
            for lines in without_a_key(front.key):
                assert await status(port, "GET", path, *lines) == 401, (path, lines)
        assert await status(port, "GET", "/v1/models", f"Authorization: Bearer {front.key}") == 200


@pytest.mark.parametrize(
    "target",
    [
        "//v1/models",
        "/v1//models",
        "/v1/models/",
        "/v1/models?api_key={key}",
        "/v1/models?/health",
        "/v1/models#/health",
        "/health/../v1/models",
        "/health/..%2fv1/models",
        "/health%2f..%2fv1%2fmodels",
        "/v1/%6dodels",
        "/v1/models%00/health",
        "/version/",
        "/health;/../v1/models",
        "/HEALTH",
        "/health%20",
        "http://127.0.0.1/v1/models",
        "http://127.0.0.1/health/../v1/models",
        "/./v1/models",
        "/admin",
        "/metrics",
        "/tenants",
        "/replicas",
        "/keys/reload",
        "/dashboard/",
        "/dashboard/data",
        "*",
    ],
)
async def test_no_spelling_of_a_path_is_open(front: Front, target: str) -> None:
    async with serving(front.clients) as port:
        for method in ("GET", "POST", "OPTIONS"):
            answer = await status(port, method, target.format(key=front.key))
            assert answer in {0, 400, 401}, (method, answer)


async def test_a_websocket_is_no_way_in(front: Front) -> None:
    upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
    async with serving(front.clients) as port:
        for path in ("/v1/models", "/health", CHAT):
            key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
            assert await status(port, "GET", path, *upgrade, key) not in {101, 200}, path


async def test_a_file_of_another_tenant_does_not_exist(front: Front) -> None:
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": chat()}
    mine, theirs = ({"authorization": f"Bearer {key}"} for key in (front.key, front.other))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(front.clients), base_url="http://test"
    ) as http:
        upload = {"file": ("in.jsonl", json.dumps(line).encode())}
        sent = await http.post("/v1/files", files=upload, data={"purpose": "batch"}, headers=mine)
        file = sent.json()["id"]
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=body, headers=mine)).json()["id"]
        for method, path in [
            ("GET", f"/v1/files/{file}"),
            ("GET", f"/v1/files/{file}/content"),
            ("DELETE", f"/v1/files/{file}"),
            ("GET", f"/v1/batches/{batch}"),
            ("POST", f"/v1/batches/{batch}/cancel"),
        ]:
            answer = await http.request(method, path, headers=theirs)
            assert answer.status_code == 404, (method, path)
        refused = await http.post("/v1/batches", json=body, headers=theirs)
        assert refused.status_code in {400, 404}
        for path in ("/v1/files", "/v1/batches"):
            assert (await http.get(path, headers=theirs)).json()["data"] == []
            assert len((await http.get(path, headers=mine)).json()["data"]) == 1


async def test_every_route_of_the_operators_port_wants_its_token(front: Front) -> None:
    app = front.operators(TOKEN)
    paths = sorted(set(routes(app)))
    assert {"/metrics", "/tenants", "/keys/reload", "/dashboard/data", "/docs"} <= set(paths)
    basic = base64.b64encode(f"anybody:{TOKEN}".encode()).decode()
    wrong = base64.b64encode(f"{TOKEN}:".encode()).decode()
    async with serving(app) as port:
        for path in paths:
            for method in METHODS:
                assert await status(port, method, path) in {400, 401}, (method, path)
            for lines in [
                (f"Authorization: Bearer {front.key}",),
                (f"Authorization: Bearer {TOKEN}x",),
                (f"Authorization: Basic {wrong}",),
                ("Authorization: Basic not base64",),
                (f"Authorization: Basic {TOKEN}",),
                (f"X-Api-Key: {TOKEN}",),
                (f"Cookie: token={TOKEN}",),
            ]:
                assert await status(port, "GET", path, *lines) == 401, (path, lines)
        for given in (f"Bearer {TOKEN}", f"Basic {basic}"):
            assert await status(port, "GET", "/metrics", f"Authorization: {given}") == 200
        for path in (CHAT, "/v1/models", "/v1/files"):
            assert await status(port, "GET", path, f"Authorization: Bearer {TOKEN}") == 404


async def test_a_web_page_does_not_reach_the_operators_port(front: Front) -> None:
    """Neither under a name of its own that resolves to this machine, nor by a form of its own."""
    async with serving(front.operators(None)) as port:
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", "[::1"):
            refused = await status(port, "GET", "/metrics", host=host or " ")
            assert refused in {400, 403}, host
        for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}"):
            assert await status(port, "GET", "/metrics", host=host) == 200
        for origin in ("https://evil.example", "null", f"https://evil.example:{port}"):
            sent = await status(port, "POST", "/keys/reload", f"Origin: {origin}")
            assert sent == 403, origin
        own = f"Origin: http://127.0.0.1:{port}"
        assert await status(port, "POST", "/keys/reload", own) == 200


def test_an_open_operators_port_needs_a_token(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org"):
        with pytest.raises(ConfigError, match="admin_token_file"):
            load_app_config({"api": {"admin_host": host, "admin_port": 8001}})
    for host in ("127.0.0.1", "::1", "localhost"):
        load_app_config({"api": {"admin_host": host, "admin_port": 8001}})
    token = str(tmp_path / "token")
    load_app_config({"api": {"admin_host": "0.0.0.0", "admin_token_file": token}})
