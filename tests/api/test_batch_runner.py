"""The runner in this process: what fails around it, what expires, what a tenant may run at once."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ByteSize

from mooncake_serve.api import create_app, keys
from mooncake_serve.api.batches import Batches, routes, runner
from mooncake_serve.api.gateway import Hints
from mooncake_serve.api.generate import Generator
from mooncake_serve.api.observe import Observer
from mooncake_serve.api.tenancy import Doorkeeper
from mooncake_serve.client.batch.pace import START
from mooncake_serve.config import ApiConfig
from mooncake_serve.engine.protocol import GenerationRequest
from mooncake_serve.errors import Unavailable
from tests.api.fake import FakeAnswer, FakeGateway
from tests.api.test_answers import CHAT, chat
from tests.api.test_errors import assert_envelope
from tests.waiting import WAIT_S

ENDED = {"completed", "failed", "expired", "cancelled"}


class Gateway(FakeGateway):
    """Raises what it is told to, waits when asked to, and counts who is inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bug: Exception | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.inside: dict[str, int] = {}
        self.most: dict[str, int] = {}

    async def start(self, request: GenerationRequest, timeout_s: float, hints: Hints) -> FakeAnswer:
        if self.bug is not None:
            raise self.bug
        name = request.tenant
        self.inside[name] = self.inside.get(name, 0) + 1
        self.most[name] = max(self.most.get(name, 0), self.inside[name])
        await self.open.wait()
        self.inside[name] -= 1
        return await super().start(request, timeout_s, hints)


class Server:
    """An application and the runner beside it."""

    def __init__(self, folder: Path, settings: ApiConfig) -> None:
        self.gateway = Gateway()
        observer, keeper = Observer(), Doorkeeper(settings)
        generator = Generator(self.gateway, observer)
        self.batches = Batches(folder / "state", generator, keeper, settings)
        app = create_app(
            self.gateway,
            settings,
            observer=observer,
            keeper=keeper,
            generator=generator,
            batches=self.batches,
        )
        self.http = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", timeout=WAIT_S
        )
        self.running = asyncio.ensure_future(self.batches.run())

    async def upload(self, raw: bytes, **headers: str) -> httpx.Response:
        files = {"file": ("in.jsonl", raw)}
        form = {"purpose": "batch"}
        return await self.http.post("/v1/files", files=files, data=form, headers=headers)

    async def create(self, lines: int, **headers: str) -> str:
        rows = [
            {"custom_id": f"j{n}", "method": "POST", "url": CHAT, "body": chat()}
            for n in range(lines)
        ]
        sent = await self.upload("\n".join(map(json.dumps, rows)).encode(), **headers)
        body = {
            "input_file_id": sent.json()["id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        made = await self.http.post("/v1/batches", json=body, headers=headers)
        assert made.status_code == 200, made.text
        return made.json()["id"]

    async def batch(self, name: str, **headers: str) -> dict[str, Any]:
        return (await self.http.get(f"/v1/batches/{name}", headers=headers)).json()

    async def ended(self, name: str, **headers: str) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while (batch := await self.batch(name, **headers))["status"] not in ENDED:
                await asyncio.sleep(0.02)
        return batch

    async def lines(self, file: str) -> list[dict[str, Any]]:
        text = (await self.http.get(f"/v1/files/{file}/content")).text
        return [json.loads(line) for line in text.splitlines()]

    async def close(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.http.aclose()


@pytest.fixture
def settings() -> ApiConfig:
    return ApiConfig(max_file=4096)


@pytest.fixture
async def server(
    tmp_path: Path, settings: ApiConfig, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Server]:
    monkeypatch.setattr(runner, "RETRY_S", 0.01)
    made = Server(tmp_path, settings)
    yield made
    await made.close()


async def test_a_line_that_breaks_the_server_is_answered_so(server: Server) -> None:
    server.gateway.bug = TypeError("a secret detail")
    batch = await server.ended(await server.create(2))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
    for line in await server.lines(batch["error_file_id"]):
        assert line["response"]["status_code"] == 500
        assert "secret" not in json.dumps(line)


def failing(times: int, error: Exception, then: Callable[..., Any]) -> Callable[..., Any]:
    left = [error] * times

    def call(*args: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return then(*args, **named)

    return call


@pytest.mark.parametrize("step", ["waiting", "record", "end"])
async def test_a_disk_that_fails_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    works = getattr(server.batches._ledger, step)
    monkeypatch.setattr(server.batches._ledger, step, failing(3, full, works))
    batch = await server.ended(await server.create(3))
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
    assert len(await server.lines(batch["output_file_id"])) == 3


async def test_a_bug_fails_the_batch_and_keeps_what_was_answered(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    works, first = server.batches._ledger.record, threading.Event()

    def record(batch: str, number: int, outcome: str, result: Any) -> None:
        if number == 1 and outcome == "completed":
            assert first.wait(WAIT_S)
            raise KeyError("a bug")
        works(batch, number, outcome, result)
        first.set()

    monkeypatch.setattr(server.batches._ledger, "record", record)
    batch = await server.ended(await server.create(2))
    assert batch["status"] == "failed"
    assert batch["failed_at"] >= batch["in_progress_at"]
    [error] = batch["errors"]["data"]
    assert error["code"] == "internal_error"
    assert "KeyError" in error["message"]
    [good] = await server.lines(batch["output_file_id"])
    [bad] = await server.lines(batch["error_file_id"])
    assert (good["custom_id"], bad["custom_id"]) == ("j0", "j1")
    assert bad["error"]["code"] == "batch_failed"


async def test_a_batch_expires(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "WINDOW_S", 0)
    monkeypatch.setattr(runner, "LOCK_POLL_S", 0.01)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(runner, "_write", failing(1, full, runner._write))
    server.gateway.refusal = Unavailable("no replica")
    batch = await server.ended(await server.create(3))
    assert batch["status"] == "expired"
    assert batch["expired_at"] >= batch["expires_at"]
    assert batch["output_file_id"] is None
    codes = {line["error"]["code"] for line in await server.lines(batch["error_file_id"])}
    assert codes == {"batch_expired"}


async def test_a_file_that_is_too_large(server: Server) -> None:
    refused = await server.upload(b"x" * (4096 + (65 << 10)))
    error = assert_envelope(refused, 413)
    assert (error["code"], error["param"]) == ("file_too_large", "file")
    assert (await server.http.get("/v1/files")).json()["data"] == []


async def test_pages_hold_only_the_purpose_asked_for(server: Server) -> None:
    await server.ended(await server.create(1))
    await server.ended(await server.create(1))
    files = "/v1/files?limit=1&purpose=batch_output"
    first = (await server.http.get(files)).json()
    assert [each["purpose"] for each in first["data"]] == ["batch_output"]
    assert first["has_more"]
    second = (await server.http.get(f"{files}&after={first['last_id']}")).json()
    assert [each["purpose"] for each in second["data"]] == ["batch_output"]
    assert not second["has_more"]
    unknown = (await server.http.get("/v1/files?after=file-of-nobody")).json()
    assert (unknown["data"], unknown["has_more"]) == ([], False)


async def test_a_tenants_lines_keep_to_its_concurrency(tmp_path: Path) -> None:
    file, secret = tmp_path / "keys.json", tmp_path / "secret"
    secret.write_text("of these tests, and nobody else's\n")
    narrow = {"authorization": f"Bearer {keys.create(file, 'narrow', concurrency=2)}"}
    wide = {"authorization": f"Bearer {keys.create(file, 'wide')}"}
    server = Server(
        tmp_path, ApiConfig(keys_file=str(file), tenant_secret_file=str(secret), concurrency=3)
    )
    server.gateway.open.clear()
    try:
        made = [(await server.create(12, **headers), headers) for headers in (narrow, narrow, wide)]
        async with asyncio.timeout(WAIT_S):
            while sum(server.gateway.inside.values()) < START:
                await asyncio.sleep(0.01)
        server.gateway.open.set()
        for name, headers in made:
            assert (await server.ended(name, **headers))["status"] == "completed"
        assert server.gateway.most["narrow"] == 2
        assert server.gateway.most["wide"] in {2, 3}
    finally:
        await server.close()


async def test_a_tenants_files_and_batches_are_bounded(tmp_path: Path) -> None:
    file, secret = tmp_path / "keys.json", tmp_path / "secret"
    secret.write_text("of these tests, and nobody else's\n")
    one, other = ({"authorization": f"Bearer {keys.create(file, name)}"} for name in "ab")
    settings = ApiConfig(
        keys_file=str(file),
        tenant_secret_file=str(secret),
        tenant_files=3,
        tenant_file_bytes=ByteSize(1000),
        tenant_batches=2,
    )
    server = Server(tmp_path, settings)
    server.gateway.open.clear()
    try:
        sent = [(await server.upload(b"x" * 400, **one)).json()["id"] for _ in range(2)]
        refused = assert_envelope(await server.upload(b"x" * 201, **one), 400)
        assert (refused["code"], refused["param"]) == ("storage_exceeded", "file")
        assert "api.tenant_file_bytes" in refused["message"]
        assert len(list((tmp_path / "state" / "files").iterdir())) == 2
        sent.append((await server.upload(b"x" * 200, **one)).json()["id"])
        refused = assert_envelope(await server.upload(b"", **one), 400)
        assert (refused["code"], refused["param"]) == ("too_many_files", "file")
        assert "api.tenant_files" in refused["message"]
        assert (await server.upload(b"x" * 400, **other)).status_code == 200
        for name in sent:
            await server.http.delete(f"/v1/files/{name}", headers=one)

        made = [await server.create(1, **one) for _ in range(2)]
        body = {"input_file_id": sent[0], "endpoint": CHAT, "completion_window": "24h"}
        response = await server.http.post("/v1/batches", json=body, headers=one)
        refused = assert_envelope(response, 429)
        assert "api.tenant_batches" in refused["message"]
        assert int(response.headers["retry-after"]) > 1
        made_by_other = await server.create(1, **other)
        server.gateway.open.set()
        # What a batch writes is kept, though the tenant has as many files as it may.
        for name in made:
            batch = await server.ended(name, **one)
            assert batch["status"] == "completed"
            assert batch["output_file_id"]
        assert (await server.ended(made_by_other, **other))["status"] == "completed"
    finally:
        await server.close()
