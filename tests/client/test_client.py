"""Both clients against a real HTTP server: answers, streams, errors, retries."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mooncake_serve import AsyncClient, Client, errors
from mooncake_serve.errors import APIConnectionError, APIStatusError, APITimeoutError
from tests.client.server import Script, answer, chunk, events, running

USAGE = {"prompt_tokens": 7, "completion_tokens": 2}


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with running(script) as address:
        yield address


def refusal(status: int, **headers: str) -> JSONResponse:
    error = {"message": "no", "type": "t", "param": "p", "code": "c"}
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def test_chat_returns_text_usage_and_request_id(script: Script, url: str) -> None:
    script.handlers = [lambda _: answer("red")]
    with Client(url) as client:
        got = client.chat("a colour", temperature=0, max_tokens=3)
    assert (got.text, got.finish_reason, got.request_id) == ("red", "stop", "req-1")
    assert (got.usage.prompt_tokens, got.usage.cached_tokens) == (7, 4)
    assert script.bodies == [
        {
            "messages": [{"role": "user", "content": "a colour"}],
            "temperature": 0,
            "max_tokens": 3,
            "model": "tiny",
        }
    ]


def test_complete_takes_token_ids(script: Script, url: str) -> None:
    payload = {"id": "x", "model": "m", "choices": [{"text": "!", "finish_reason": "length"}]}
    script.handlers = [lambda _: JSONResponse(payload)]
    with Client(url, model="m") as client:
        assert client.complete([1, 2, 3]).text == "!"
    assert script.bodies[0]["prompt"] == [1, 2, 3]


def test_a_stream_yields_pieces_and_then_the_whole(script: Script, url: str) -> None:
    end = {"model": "tiny", "choices": [], "usage": USAGE}
    script.handlers = [
        lambda _: events(chunk("re"), chunk("d"), chunk(None, "stop"), end, "[DONE]")
    ]
    with Client(url, model="tiny") as client, client.chat("a colour", stream=True) as stream:
        pieces = [piece.text for piece in stream]
        whole = stream.result()
    assert pieces == ["re", "d", ""]
    assert (whole.text, whole.finish_reason, whole.usage.completion_tokens) == ("red", "stop", 2)
    assert whole.ttft_s is not None
    assert whole.ttft_s > 0


def test_a_cut_stream_is_an_error_not_a_short_answer(script: Script, url: str) -> None:
    script.handlers = [lambda _: events(chunk("re"))]
    with Client(url, model="tiny") as client, client.chat("x", stream=True) as stream:
        with pytest.raises(APIConnectionError, match="ended before"):
            stream.result()


def test_an_error_inside_a_stream_is_raised(script: Script, url: str) -> None:
    script.handlers = [lambda _: events(chunk("re"), {"error": {"message": "died", "code": "c"}})]
    with Client(url, model="tiny") as client, client.chat("x", stream=True) as stream:
        with pytest.raises(APIStatusError, match="died"):
            stream.result()


def test_errors_carry_the_envelope(script: Script, url: str) -> None:
    script.handlers = [lambda _: refusal(400, **{"x-request-id": "req-9"})]
    with Client(url, model="tiny") as client, pytest.raises(APIStatusError) as caught:
        client.chat("x")
    err = caught.value
    assert (err.status, err.type, err.param, err.code) == (400, "t", "p", "c")
    assert (err.request_id, err.retry) == ("req-9", False)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.APIInvalidRequest),
        (401, errors.APIUnauthorized),
        (403, errors.APIForbidden),
        (404, errors.APINotFound),
        (405, APIStatusError),
        (413, errors.APIInvalidRequest),
        (429, errors.APIOverloaded),
        (500, errors.APIServerError),
        (503, errors.APIUnavailable),
        (504, errors.APIDeadlineExceeded),
    ],
)
def test_a_status_has_its_class(script: Script, url: str, status: int, kind: type) -> None:
    script.handlers = [lambda _: refusal(status, **{"retry-after": "2"})]
    with Client(url, model="tiny", max_retries=0) as client:
        with pytest.raises(APIStatusError) as caught:
            client.chat("x")
    assert type(caught.value) is kind
    assert (caught.value.status, caught.value.retry_after_s) == (status, 2.0)
    assert caught.value.retry == (status in {429, 503})


@pytest.mark.parametrize("status", [429, 503])
def test_overload_is_retried(script: Script, url: str, status: int) -> None:
    script.handlers = [lambda _: refusal(status, **{"retry-after": "0"}), lambda _: answer("ok")]
    with Client(url, model="tiny") as client:
        assert client.chat("x").text == "ok"
    assert len(script.bodies) == 2


def test_retries_end(script: Script, url: str) -> None:
    script.handlers = [lambda _: refusal(503, **{"retry-after": "0"})] * 2
    with Client(url, model="tiny", max_retries=1) as client:
        with pytest.raises(APIStatusError, match="503"):
            client.chat("x")
    assert len(script.bodies) == 2


async def test_more_calls_at_once_than_a_default_pool() -> None:
    """All 150 are with the server before any is answered."""
    arrived = asyncio.Event()

    class Waiting(Script):
        async def handle(self, request: Request) -> Response:
            self.bodies.append(await request.json())
            if len(self.bodies) == 150:
                arrived.set()
            await arrived.wait()
            return answer("ok")

    with running(Waiting()) as address:
        async with AsyncClient(address, model="m", max_retries=0) as client:
            async with asyncio.timeout(60):
                got = await asyncio.gather(*(client.chat("x") for _ in range(150)))
    assert {each.text for each in got} == {"ok"}


def test_no_server_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", model="m", max_retries=0) as client:
        assert client.health() is False
        with pytest.raises(APIConnectionError, match=str(port)):
            client.chat("x")


def test_a_timeout_is_not_retried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(address, model="m", timeout_s=0.2) as client:
            with pytest.raises(APITimeoutError, match="timeout_s"):
                client.chat("x")


def test_headers_and_environment(script: Script, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_URL", url)
    script.handlers = [lambda _: answer("ok")]
    with Client(api_key="secret", model="m") as client:
        client.chat("x", explain=True, replica=1)
    sent = script.headers[0]
    assert sent["authorization"] == "Bearer secret"
    assert (sent["x-mooncake-explain"], sent["x-mooncake-replica"]) == ("1", "1")


async def test_async_client_does_the_same(script: Script, url: str) -> None:
    script.handlers = [
        lambda _: refusal(429, **{"retry-after": "0"}),
        lambda _: answer("red"),
        lambda _: events(chunk("bl"), chunk("ue"), chunk(None, "stop"), "[DONE]"),
        lambda _: refusal(404),
    ]
    async with AsyncClient(url) as client:
        assert await client.health()
        assert (await client.chat("x")).text == "red"
        async with await client.chat("x", stream=True) as stream:
            assert [piece.text async for piece in stream] == ["bl", "ue", ""]
            assert (await stream.result()).text == "blue"
        with pytest.raises(APIStatusError, match="404"):
            await client.complete("x")
