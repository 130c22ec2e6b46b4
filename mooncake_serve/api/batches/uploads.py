"""Receiving a file: multipart, bounded, straight to the disk, durable before it has a name."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request
from python_multipart.exceptions import FormParserError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.types import Message

from mooncake_serve.durable import place
from mooncake_serve.errors import InvalidRequest, PayloadTooLarge

CHUNK_BYTES = 1 << 20
FIELDS_MAX = 8
FILENAME_CHARS_MAX = 512
FORM_OVERHEAD_BYTES = 64 << 10
"""Boundaries and fields around the file."""


@dataclass(frozen=True, slots=True)
class Upload:
    """A file that is in place."""

    file_id: str
    filename: str
    size: int
    purpose: str


async def receive(request: Request, folder: Path, limit: int) -> Upload:
    """Take `file` and `purpose` from a form. Raises InvalidRequest or PayloadTooLarge."""
    bounded = Request(request.scope, _bounded(request, limit + FORM_OVERHEAD_BYTES))
    try:
        async with bounded.form(max_files=1, max_fields=FIELDS_MAX) as form:
            upload, purpose = form.get("file"), form.get("purpose")
            unknown = sorted(set(form) - {"file", "purpose"})
            if unknown:
                raise InvalidRequest(
                    f"unknown parameter: {unknown[0]}", param=unknown[0], code="unknown_parameter"
                )
            if not isinstance(upload, UploadFile):
                raise InvalidRequest("file: send it as a part of a form", param="file")
            if not isinstance(purpose, str) or purpose != "batch":
                raise InvalidRequest('purpose: only "batch" is supported', param="purpose")
            file_id = f"file-{uuid.uuid4().hex}"
            size = await _store(upload, folder / file_id)
    except (MultiPartException, FormParserError, HTTPException) as err:
        raise InvalidRequest(f"the form cannot be read: {_reason(err)}", param="file") from err
    filename = (upload.filename or "file")[:FILENAME_CHARS_MAX]
    return Upload(file_id, filename, size, purpose)


def _reason(err: Any) -> str:
    return str(getattr(err, "detail", None) or getattr(err, "message", None) or err)


def _bounded(request: Request, limit: int) -> Any:
    """The request's messages, up to a size."""
    size = 0

    async def receive_bounded() -> Message:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise PayloadTooLarge(
                f"the file is larger than {limit - FORM_OVERHEAD_BYTES} bytes; split it, or raise "
                "api.max_file",
                param="file",
                code="file_too_large",
            )
        return message

    return receive_bounded


async def _store(upload: UploadFile, path: Path) -> int:
    temporary = path.with_name(f".{path.name}")
    size = 0
    try:
        with temporary.open("wb") as file:
            while chunk := await upload.read(CHUNK_BYTES):
                size += len(chunk)
                await asyncio.to_thread(file.write, chunk)
            await asyncio.to_thread(place, file, path)
    finally:
        temporary.unlink(missing_ok=True)
    return size
