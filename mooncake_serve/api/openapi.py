"""The OpenAPI document of routes that parse their bodies themselves, off the event loop."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

_REF = "#/components/schemas/{model}"
_ERROR = {
    "description": "OpenAI's error envelope",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}
_STATUSES = ("400", "401", "404", "413", "429", "503")


def takes(body: type[BaseModel]) -> dict[str, Any]:
    """Extra entries of a route whose body is JSON of this model."""
    schema = body.model_json_schema(ref_template=_REF)
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": schema}}
    return {
        "requestBody": {"required": True, "content": content},
        "x-definitions": definitions,
    }


def install(app: FastAPI) -> None:
    """Gather the definitions of all bodies, and name the errors every route may answer."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            built = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = built.setdefault("components", {}).setdefault("schemas", {})
            for path in built["paths"].values():
                for operation in path.values():
                    schemas.update(operation.pop("x-definitions", {}))
                    operation["responses"].pop("422", None)
                    for status in _STATUSES:
                        operation["responses"].setdefault(status, _ERROR)
            app.openapi_schema = built
        return app.openapi_schema

    app.openapi = document
