"""Requests made from the server's own OpenAPI document: no 5xx, and every error in its envelope."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings

from mooncake_serve.api import create_app
from mooncake_serve.api.batches import Batches
from mooncake_serve.api.generate import Generator
from mooncake_serve.api.observe import Observer
from mooncake_serve.api.tenancy import Doorkeeper
from mooncake_serve.config import ApiConfig
from tests.api.fake import FakeGateway

_folder = tempfile.TemporaryDirectory()


def _app() -> Any:
    options, gateway, observer = ApiConfig(), FakeGateway(), Observer()
    keeper, generator = Doorkeeper(options), Generator(gateway, observer)
    batches = Batches(Path(_folder.name), generator, keeper, options)
    return create_app(
        gateway, options, observer=observer, keeper=keeper, generator=generator, batches=batches
    )


schema = schemathesis.openapi.from_asgi("/openapi.json", _app())


@schema.parametrize()
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_the_server(case: Any) -> None:
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
