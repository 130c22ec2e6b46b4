from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from mooncake_serve.api import create_app
from mooncake_serve.config import ApiConfig
from tests.api.fake import FakeGateway


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture
def settings() -> ApiConfig:
    return ApiConfig(max_body=64 << 10, request_timeout_s=20)


@pytest.fixture
async def http(gateway: FakeGateway, settings: ApiConfig) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(gateway, settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
