"""The official `openai` client over a real socket, and a client that leaves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import uvicorn

from mooncake_serve.api import create_app
from mooncake_serve.config import ApiConfig
from mooncake_serve.errors import EngineFailed, Overloaded
from tests.api.fake import MODEL, FakeGateway

HELLO = [{"role": "user", "content": "hi"}]
WAIT_S = 20


@pytest.fixture
async def url(gateway: FakeGateway, settings: ApiConfig) -> AsyncIterator[str]:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(gateway, settings), log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    await asyncio.wait_for(task, WAIT_S)
    listener.close()


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=3)
    assert answer.choices[0].message.content == "abc"
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "abc"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 3


async def test_completion_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt="x", max_tokens=3, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "abc"


async def test_errors_have_the_clients_classes(
    client: openai.AsyncOpenAI, gateway: FakeGateway
) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="best_of: only 1"):
        await client.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"best_of": 2})
    gateway.refusal = Overloaded("busy", retry_after_s=2)
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(model=MODEL, messages=HELLO)
    assert caught.value.response.headers["retry-after"] == "2"


async def test_a_broken_stream_raises(client: openai.AsyncOpenAI, gateway: FakeGateway) -> None:
    gateway.fail_after, gateway.error = 2, EngineFailed("the replica died")
    stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="the replica died"):
        async for _ in stream:
            pass


@pytest.mark.parametrize(("stream", "hang_after"), [(False, 1), (True, 0), (True, 1)])
async def test_leaving_cancels(
    url: str, gateway: FakeGateway, stream: bool, hang_after: int
) -> None:
    gateway.hang_after = hang_after
    body = {"model": MODEL, "messages": HELLO, "stream": stream}
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as http:
        call = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await asyncio.wait_for(gateway.hanging.wait(), WAIT_S)
        assert gateway.closed == []
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    async with asyncio.timeout(WAIT_S):
        while not gateway.closed:
            await asyncio.sleep(0.01)
