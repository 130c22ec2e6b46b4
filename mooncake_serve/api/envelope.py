"""Errors in OpenAI's shape on every path: ours, FastAPI's, Starlette's, and the unexpected."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mooncake_serve.errors import (
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestError,
    Unavailable,
)

RETRY_UNAVAILABLE_S = 1


def install(app: FastAPI) -> None:
    """Register the handlers."""
    app.add_exception_handler(RequestError, _request_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)


def respond(err: RequestError) -> JSONResponse:
    """An error as a response."""
    headers = {}
    if isinstance(err, Overloaded):
        headers["retry-after"] = str(max(1, round(err.retry_after_s)))
    elif isinstance(err, Unavailable):
        headers["retry-after"] = str(RETRY_UNAVAILABLE_S)
    return JSONResponse(err.envelope(), status_code=err.status, headers=headers)


def invalid_body(errors: list[Any]) -> InvalidRequest:
    """pydantic's report as one sentence about one field."""
    first = errors[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    # A union reports each member's name in the path; the first part is the field a person wrote.
    param = where[0] if where else None
    if first["type"] == "json_invalid":
        return InvalidRequest("the body is not valid JSON", code="invalid_json")
    if first["type"] == "extra_forbidden":
        message = f"unknown or unsupported parameter: {'.'.join(where)}"
        return InvalidRequest(message, param=param, code="unsupported_parameter")
    if first["type"] == "missing":
        return InvalidRequest(f"missing parameter: {'.'.join(where)}", param=param, code="missing")
    message = f"{param}: {first['msg']}" if param else str(first["msg"])
    return InvalidRequest(message, param=param, code="invalid_value")


async def _request_error(_: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, RequestError)
    return respond(err)


async def _validation_error(_: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, RequestValidationError)
    return respond(invalid_body(list(err.errors())))


async def _http_error(request: Request, err: Exception) -> JSONResponse:
    assert isinstance(err, HTTPException)
    if err.status_code == 404:
        return respond(NotFound(f"no such route: {request.method} {request.url.path}"))
    ours = InvalidRequest(f"{err.detail}: {request.method} {request.url.path}")
    ours.status = err.status_code
    response = respond(ours)
    response.headers.update(err.headers or {})
    return response
