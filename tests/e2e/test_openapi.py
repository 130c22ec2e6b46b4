"""Requests made from the deployed server's own OpenAPI document: none ends in a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from tests.e2e.cluster import App
from tests.waiting import WAIT_S

EXAMPLES = 25
"""Requests per operation."""
EVERY_CHECK: Any = list(HealthCheck)


@pytest.mark.slow
def test_no_request_breaks_the_server(app: App) -> None:
    schema: Any = schemathesis.openapi.from_url(f"{app.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        answer_without_fault(operation)


def answer_without_fault(operation: Any) -> None:
    @given(case=operation.as_strategy())
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=EVERY_CHECK)
    def one(case: Any) -> None:
        response = case.call(timeout=WAIT_S)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    one()
