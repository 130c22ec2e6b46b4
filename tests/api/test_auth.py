"""Keys and limits: deny by default, tenants from keys, refusals that say when to come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from mooncake_serve.api import admin, create_app, keys
from mooncake_serve.api.limits import Limiter, Limits
from mooncake_serve.api.observe import Observer
from mooncake_serve.api.tenancy import Doorkeeper
from mooncake_serve.cli import app as cli
from mooncake_serve.config import ApiConfig, load_app_config
from mooncake_serve.errors import ConfigError, RateLimited, Unauthorized
from tests.api.fake import FakeGateway
from tests.api.test_answers import CHAT, chat
from tests.api.test_errors import assert_envelope


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def open_client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("of these tests, and nobody else's\n")
    return str(path)


@pytest.fixture
async def guarded(
    gateway: FakeGateway, file: Path, secret: str
) -> AsyncIterator[httpx.AsyncClient]:
    keys.create(file, "nobody")
    settings = ApiConfig(keys_file=str(file), tenant_secret_file=secret, concurrency=2)
    async with open_client(create_app(gateway, settings)) as client:
        yield client


def test_the_file_holds_no_key(file: Path) -> None:
    key = keys.create(file, "acme")
    assert key.split("-", 2)[2] not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    ring = keys.KeyRing(file)
    assert ring.authenticate(key).tenant == "acme"
    for wrong in ("", "mk", "mk--", key[:-1], key + "x", key.replace("mk-", "mk-x"), "mk-é-ü"):
        with pytest.raises(Unauthorized):
            ring.authenticate(wrong)


def test_keys_need_a_secret_and_a_file(file: Path, secret: str) -> None:
    with pytest.raises(ConfigError, match="tenant_secret_file"):
        load_app_config({"api": {"keys_file": str(file)}})
    with pytest.raises(ConfigError, match=r"api\.tenant_secret_file: .*openssl"):
        Doorkeeper(ApiConfig(tenant_secret_file=f"{secret}.absent"))
    Path(secret).write_text("short\n")
    with pytest.raises(ConfigError, match="less than 16 bytes"):
        Doorkeeper(ApiConfig(tenant_secret_file=secret))
    Path(secret).write_text("long enough for anybody")
    with pytest.raises(ConfigError, match="mooncake-serve keys create"):
        Doorkeeper(ApiConfig(keys_file=str(file), tenant_secret_file=secret))
    file.write_text("{}")
    with pytest.raises(ConfigError, match=r"api\.keys_file"):
        Doorkeeper(ApiConfig(keys_file=str(file), tenant_secret_file=secret))


def test_a_running_server_follows_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "RELOAD_S", 0.0)
    first = keys.create(file, "acme")
    ring = keys.KeyRing(file)
    second = keys.create(file, "other")
    assert ring.authenticate(second).tenant == "other"
    keys.revoke(file, first.split("-")[1])
    with pytest.raises(Unauthorized):
        ring.authenticate(first)
    file.write_text("torn")
    with pytest.raises(Unauthorized):
        ring.authenticate(second)


def test_the_command_line(file: Path) -> None:
    runner = CliRunner()
    made = runner.invoke(cli, ["keys", "create", str(file), "acme", "--concurrency", "3"])
    key = made.stdout.strip()
    assert keys.KeyRing(file).authenticate(key).concurrency == 3
    listed = runner.invoke(cli, ["keys", "list", str(file)]).stdout
    assert key.split("-")[1] in listed
    assert "acme" in listed
    assert key not in listed
    assert runner.invoke(cli, ["keys", "revoke", str(file), key.split("-")[1]]).exit_code == 0
    assert json.loads(file.read_text()) == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("POST", CHAT),
        ("POST", "/tokenize"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/metrics"),
        ("GET", "/no/such/route"),
        ("GET", "/health/x"),
        ("GET", "//health"),
    ],
)
async def test_every_route_is_closed(guarded: httpx.AsyncClient, method: str, path: str) -> None:
    response = await guarded.request(method, f"http://127.0.0.1{path}")
    assert assert_envelope(response, 401)["code"] == "missing_api_key"
    wrong = await guarded.request(method, f"http://127.0.0.1{path}", headers=bearer("mk-1-2"))
    assert assert_envelope(wrong, 401)["code"] == "invalid_api_key"


async def test_the_open_routes(guarded: httpx.AsyncClient) -> None:
    assert (await guarded.get("/health")).status_code == 200
    assert (await guarded.get("/version")).status_code == 200


async def test_tenants_come_from_keys(
    guarded: httpx.AsyncClient, gateway: FakeGateway, file: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(keys, "RELOAD_S", 0.0)
    made = [keys.create(file, tenant) for tenant in ("acme", "acme", "other")]
    for key in made:
        assert (await guarded.post(CHAT, json=chat(), headers=bearer(key))).status_code == 200
    salts = [request.tenant_salt for request in gateway.requests]
    assert [request.tenant for request in gateway.requests] == ["acme", "acme", "other"]
    assert salts[0] == salts[1] != salts[2]
    assert (await guarded.get("/metrics", headers=bearer(made[0]))).status_code == 404


async def test_concurrency_is_the_tenants_own(
    guarded: httpx.AsyncClient, gateway: FakeGateway, file: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(keys, "RELOAD_S", 0.0)
    busy, other = keys.create(file, "busy"), keys.create(file, "other")
    gateway.hang_after = 1
    running = [
        asyncio.ensure_future(guarded.post(CHAT, json=chat(), headers=bearer(busy)))
        for _ in range(2)
    ]
    await asyncio.wait_for(gateway.hanging.wait(), 10)
    while len(gateway.requests) < 2:
        await asyncio.sleep(0.01)
    refused = await guarded.post(CHAT, json=chat(), headers=bearer(busy))
    assert assert_envelope(refused, 429)["code"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"] == "1"
    assert (await guarded.get("/v1/models", headers=bearer(other))).status_code == 200
    for each in running:
        each.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert (await guarded.get("/v1/models", headers=bearer(busy))).status_code == 200


def test_rates_come_back_with_time() -> None:
    limiter, limits = Limiter(), Limits(requests_per_minute=60)
    for _ in range(60):
        limiter.enter("a", limits, 0.0)
        limiter.leave("a")
    with pytest.raises(RateLimited) as caught:
        limiter.enter("a", limits, 0.25)
    assert caught.value.retry_after_s == pytest.approx(0.75)
    limiter.enter("b", limits, 0.25)
    limiter.enter("a", limits, 1.0)
    with pytest.raises(RateLimited):
        limiter.enter("a", limits, 1.0)
    assert (limiter.uses()["a"].requests, limiter.uses()["a"].refused) == (61, 2)


async def test_admin_routes(gateway: FakeGateway, file: Path, secret: str) -> None:
    key = keys.create(file, "acme")
    settings = ApiConfig(keys_file=str(file), tenant_secret_file=secret)
    observer, keeper = Observer(), Doorkeeper(settings)

    async def replicas() -> dict[str, Any]:
        return {"r0": {"active": 0}}

    app = create_app(gateway, settings, observer=observer, keeper=keeper)
    async with (
        open_client(app) as http,
        open_client(admin.create_admin_app(observer, keeper, replicas)) as operators,
    ):
        await http.post(CHAT, json=chat(), headers=bearer(key))
        assert "vllm:generation_tokens_total" in (await operators.get("/metrics")).text
        uses = (await operators.get("/tenants")).json()
        assert uses == {"acme": {"running": 0, "requests": 1, "refused": 0}}
        assert (await operators.get("/replicas")).json() == {"r0": {"active": 0}}
        keys.revoke(file, key.split("-")[1])
        assert (await operators.post("/keys/reload")).json() == {"keys": 0}
        assert_envelope(await http.post(CHAT, json=chat(), headers=bearer(key)), 401)
        assert_envelope(await operators.get(CHAT), 404)


async def test_the_admin_port_listens_and_stops(gateway: FakeGateway) -> None:
    from tests.e2e.cluster import free_port

    async def replicas() -> dict[str, Any]:
        return {}

    app = admin.create_admin_app(Observer(), Doorkeeper(ApiConfig()), replicas)
    port = free_port()
    serving = asyncio.ensure_future(admin.serve(app, "127.0.0.1", port))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        for _ in range(200):
            try:
                assert (await http.get("/replicas")).json() == {}
                break
            except httpx.ConnectError:
                await asyncio.sleep(0.02)
        else:
            pytest.fail("nothing listens")
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
