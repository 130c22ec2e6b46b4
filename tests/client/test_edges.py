"""What goes wrong between a client and a server: foreign answers, waits, crowds, early leavers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import tenacity
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from mooncake_serve import AsyncClient, Client
from mooncake_serve.client import TokenLogprob, _core
from mooncake_serve.errors import APIError, APIStatusError
from tests.client.server import Script, answer, chunk, events, running

WAIT_S = 20.0


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with running(script) as address:
        yield address


@pytest.mark.parametrize(
    "foreign",
    [
        PlainTextResponse("<html>hello</html>"),
        JSONResponse([]),
        JSONResponse({"choices": []}),
        JSONResponse({"id": "1", "model": "m", "choices": [{"message": None}]}),
    ],
)
def test_a_foreign_answer_is_an_error_of_ours(script: Script, url: str, foreign: Response) -> None:
    script.handlers = [lambda _: foreign]
    with Client(url, model="m") as client, pytest.raises(APIError, match="base_url"):
        client.chat("x")


@pytest.mark.parametrize("event", ["not json", "[]", '{"choices": [{}, 1]', '{"model": "m"}'])
def test_a_foreign_stream_is_an_error_of_ours(script: Script, url: str, event: str) -> None:
    script.handlers = [lambda _: events(event, "[DONE]")]
    with Client(url, model="m") as client, client.chat("x", stream=True) as stream:
        with pytest.raises(APIError, match="base_url"):
            stream.result()


@pytest.mark.parametrize("body", ["", "Bad Gateway", '{"detail": "x"}', '{"error": "x"}', "[]"])
def test_an_error_without_envelope_keeps_its_status(script: Script, url: str, body: str) -> None:
    script.handlers = [lambda _: PlainTextResponse(body, status_code=502)]
    with Client(url, model="m") as client, pytest.raises(APIStatusError) as caught:
        client.chat("x")
    assert caught.value.status == 502
    assert not caught.value.retry
    assert caught.value.message


def waits(err: BaseException, attempts: int) -> list[float]:
    """Seconds that the policy would sleep after each of `attempts` failures."""
    retrying = tenacity.Retrying(**_core.retry_options(attempts))
    state = tenacity.RetryCallState(retrying, None, (), {})
    slept = []
    for number in range(1, attempts + 1):
        state.attempt_number = number
        state.set_exception((type(err), err, None))
        slept.append(retrying.wait(state))
    return slept


def test_the_servers_wait_is_kept_and_jittered() -> None:
    refused = APIStatusError("busy", status=429, retry_after_s=3.0)
    slept = waits(refused, 20)
    assert all(3.0 <= seconds <= 4.0 for seconds in slept)
    assert len(set(slept)) > 1


def test_an_absurd_wait_is_capped() -> None:
    refused = APIStatusError("busy", status=503, retry_after_s=1e9)
    assert max(waits(refused, 3)) <= _core.RETRY_AFTER_MAX_S + 1


def test_a_wait_that_is_no_number_is_ignored(script: Script, url: str) -> None:
    refusal = JSONResponse({"error": {"message": "busy"}}, 429, {"retry-after": "tomorrow"})
    script.handlers = [lambda _: refusal]
    with Client(url, model="m", max_retries=0) as client:
        with pytest.raises(APIStatusError) as caught:
            client.chat("x")
    assert caught.value.retry_after_s is None


async def test_a_crowd_of_retries_keeps_apart(script: Script, url: str) -> None:
    """Each call is refused once and then gets its own answer, all at the same time."""
    seen: set[str] = set()

    def once(body: dict[str, Any]) -> Response:
        text = body["messages"][0]["content"]
        if text in seen:
            return answer(text)
        seen.add(text)
        return JSONResponse({"error": {"message": "busy"}}, 429, {"retry-after": "0"})

    names = [f"call {number}" for number in range(16)]
    script.handlers = [once] * (2 * len(names))
    async with AsyncClient(url, model="m") as client:
        answers = await asyncio.gather(*(client.chat(name) for name in names))
    assert [got.text for got in answers] == names


def test_leaving_a_stream_early_closes_the_connection(script: Script, url: str) -> None:
    ended = threading.Event()

    async def forever() -> AsyncIterator[str]:
        try:
            while True:
                yield f"data: {json.dumps(chunk('x'))}\n\n"
                await asyncio.sleep(0.01)
        finally:
            ended.set()

    script.handlers = [lambda _: StreamingResponse(forever(), media_type="text/event-stream")]
    with Client(url, model="m") as client:
        with client.chat("x", stream=True) as stream:
            assert next(iter(stream)).text == "x"
        assert ended.wait(WAIT_S)


def test_logprobs_of_chat_and_text(script: Script, url: str) -> None:
    entry = {"token": "re", "logprob": -0.5, "bytes": [], "top_logprobs": []}
    first = chunk("re")
    first["choices"][0]["logprobs"] = {"content": [entry]}
    text = {
        "id": "1",
        "model": "m",
        "choices": [
            {
                "text": "red",
                "finish_reason": "stop",
                "logprobs": {"tokens": ["re", "d"], "token_logprobs": [-0.5, -1.0]},
            }
        ],
    }
    script.handlers = [lambda _: events(first, chunk(None, "stop")), lambda _: JSONResponse(text)]
    with Client(url, model="m") as client:
        with client.chat("x", stream=True, logprobs=True) as stream:
            assert stream.result().logprobs == (TokenLogprob("re", -0.5),)
        got = client.complete("x", logprobs=1)
    assert got.logprobs == (TokenLogprob("re", -0.5), TokenLogprob("d", -1.0))


def test_a_server_without_models_says_so() -> None:
    with pytest.raises(APIError, match="model="):
        _core.first_model([])
