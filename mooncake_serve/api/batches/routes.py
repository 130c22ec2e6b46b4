"""The routes of files and batches. A tenant sees its own; anything else does not exist."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse
from pydantic import Field

from mooncake_serve.api import openapi
from mooncake_serve.api.batches.ledger import ENDED, Ledger
from mooncake_serve.api.batches.quota import Quota
from mooncake_serve.api.batches.runner import Runner, file_object
from mooncake_serve.api.batches.uploads import receive
from mooncake_serve.api.middleware import read_body
from mooncake_serve.api.prepare import parse
from mooncake_serve.api.schemas import Body
from mooncake_serve.config import ApiConfig
from mooncake_serve.errors import InvalidRequest, NotFound

WINDOW_S = 24 * 3600
LIMIT_DEFAULT, LIMIT_MAX = 20, 100
FILES_LIMIT_MAX = 10_000

JSON = dict[str, Any]


class BatchBody(Body):
    """`POST /v1/batches`."""

    input_file_id: str = Field(min_length=1, max_length=128)
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = Field(default=None, max_length=16)


def add_routes(app: FastAPI, ledger: Ledger, runner: Runner, settings: ApiConfig) -> None:
    """Add `/v1/files` and `/v1/batches`."""
    files, batches = _Files(ledger, settings), _Batches(ledger, runner, settings)
    form = {"multipart/form-data": {"schema": _FORM}}
    upload = {"requestBody": {"required": True, "content": form}}
    one_file, one_batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
    routes: list[tuple[str, str, Any, JSON | None]] = [
        ("POST", "/v1/files", files.upload, upload),
        ("GET", "/v1/files", files.list, None),
        ("GET", one_file, files.retrieve, None),
        ("DELETE", one_file, files.delete, None),
        ("GET", f"{one_file}/content", files.content, None),
        ("POST", "/v1/batches", batches.create, openapi.takes(BatchBody)),
        ("GET", "/v1/batches", batches.list, None),
        ("GET", one_batch, batches.retrieve, None),
        ("POST", f"{one_batch}/cancel", batches.cancel, None),
    ]
    for method, path, endpoint, extra in routes:
        app.add_api_route(
            path, endpoint, methods=[method], response_model=None, openapi_extra=extra
        )


_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
    },
}


def _tenant(request: Request) -> str:
    return request.state.tenant.name


class _Files:
    def __init__(self, ledger: Ledger, settings: ApiConfig) -> None:
        self._ledger = ledger
        self._settings = settings

    async def upload(self, request: Request) -> JSON:
        """Upload an input file."""
        tenant, quota = _tenant(request), Quota.of(self._settings)
        await asyncio.to_thread(self._ledger.check_room, tenant, quota)
        took = await receive(request, self._ledger.path(""), self._settings.max_file)
        document = file_object(took.file_id, took.filename, took.size, took.purpose)
        try:
            await asyncio.to_thread(self._ledger.add_file, tenant, document, quota)
        except InvalidRequest:
            self._ledger.path(took.file_id).unlink()
            raise
        return document

    async def list(
        self,
        request: Request,
        after: str | None = None,
        limit: int = FILES_LIMIT_MAX,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> JSON:
        """Files, newest first unless `order` says asc."""
        _check_limit(limit, FILES_LIMIT_MAX)
        found = await asyncio.to_thread(
            lambda: self._ledger.list(
                "files",
                _tenant(request),
                after,
                limit,
                newest_first=order == "desc",
                purpose=purpose,
            )
        )
        return _page(found[:limit], more=len(found) > limit)

    async def retrieve(self, request: Request, file_id: str) -> JSON:
        """A file's object."""
        found = await asyncio.to_thread(self._ledger.file, _tenant(request), file_id)
        if found is None:
            raise NotFound(f"no file {file_id!r}", param="file_id")
        return found

    async def content(self, request: Request, file_id: str) -> FileResponse:
        """A file's bytes."""
        await self.retrieve(request, file_id)
        return FileResponse(self._ledger.path(file_id), media_type="application/octet-stream")

    async def delete(self, request: Request, file_id: str) -> JSON:
        """Delete a file that no unfinished batch reads."""
        await self.retrieve(request, file_id)
        if not await asyncio.to_thread(self._ledger.drop_file, _tenant(request), file_id):
            raise InvalidRequest("a batch that has not ended reads this file", param="file_id")
        return {"id": file_id, "object": "file", "deleted": True}


class _Batches:
    def __init__(self, ledger: Ledger, runner: Runner, settings: ApiConfig) -> None:
        self._ledger = ledger
        self._runner = runner
        self._settings = settings

    async def create(self, request: Request) -> JSON:
        """Start a batch."""
        body = parse(await read_body(request, self._settings.max_body), BatchBody)
        document, quota = _document(body), Quota.of(self._settings)
        if not await asyncio.to_thread(self._ledger.add_batch, _tenant(request), document, quota):
            raise NotFound(f"no file {body.input_file_id!r}", param="input_file_id")
        self._runner.wake()
        return document

    async def retrieve(self, request: Request, batch_id: str) -> JSON:
        """A batch, with its counts of this moment."""
        found = await asyncio.to_thread(self._ledger.batch, _tenant(request), batch_id)
        if found is None:
            raise NotFound(f"no batch {batch_id!r}", param="batch_id")
        return found

    async def list(
        self, request: Request, after: str | None = None, limit: int = LIMIT_DEFAULT
    ) -> JSON:
        """Batches, newest first."""
        _check_limit(limit, LIMIT_MAX)

        def read() -> list[JSON]:
            found = self._ledger.list("batches", _tenant(request), after, limit)
            return [{**each, "request_counts": self._ledger.counts(each["id"])} for each in found]

        found = await asyncio.to_thread(read)
        return _page(found[:limit], more=len(found) > limit)

    async def cancel(self, request: Request, batch_id: str) -> JSON:
        """Stop a batch; what was answered stays in its output."""
        await self.retrieve(request, batch_id)
        kept = (*ENDED, "cancelling", "finalizing")
        await asyncio.to_thread(
            lambda: self._ledger.update(
                batch_id, unless=kept, status="cancelling", cancelling_at=int(time.time())
            )
        )
        self._runner.wake()
        return await self.retrieve(request, batch_id)


def _document(body: BatchBody) -> JSON:
    now = int(time.time())
    moments = (
        "in_progress_at",
        "finalizing_at",
        "completed_at",
        "failed_at",
        "expired_at",
        "cancelling_at",
        "cancelled_at",
    )
    return {
        "id": f"batch_{uuid.uuid4().hex}",
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        **dict.fromkeys(moments),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
    }


def _check_limit(limit: int, most: int) -> None:
    if not 1 <= limit <= most:
        raise InvalidRequest(f"limit: between 1 and {most}", param="limit", code="invalid_value")


def _page(found: list[JSON], *, more: bool) -> JSON:
    return {
        "object": "list",
        "data": found,
        "first_id": found[0]["id"] if found else None,
        "last_id": found[-1]["id"] if found else None,
        "has_more": more,
    }
