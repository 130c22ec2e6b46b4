"""Requests made from the deployed server's own OpenAPI document: none ends in a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.e2e.cluster import App
from tests.waiting import WAIT_S


@pytest.fixture
def schema_of_the_app(app: App) -> Any:
    return schemathesis.openapi.from_url(f"{app.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("schema_of_the_app")


@pytest.mark.slow
@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_the_server(case: Any) -> None:
    response = case.call(timeout=WAIT_S)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
