"""Every way to be wrong gives OpenAI's envelope, a status, and the name of what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake_serve.api import create_app, keys
from mooncake_serve.api.observe import Observer
from mooncake_serve.config import ApiConfig
from mooncake_serve.errors import EngineFailed, Overloaded, Unavailable
from tests.api.fake import CONTEXT, MODEL, FakeGateway

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def assert_envelope(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["x-request-id"]
    return error


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 3, **more}


async def test_unknown_route(http: httpx.AsyncClient) -> None:
    error = assert_envelope(await http.get("/v2/nothing"), 404)
    assert "/v2/nothing" in error["message"]


async def test_wrong_method(http: httpx.AsyncClient) -> None:
    response = await http.get(CHAT)
    assert_envelope(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 50_000, b"nul"])
async def test_malformed_body(http: httpx.AsyncClient, raw: bytes) -> None:
    assert assert_envelope(await http.post(CHAT, content=raw), 400)["code"] == "invalid_json"


async def test_body_too_large(http: httpx.AsyncClient) -> None:
    error = assert_envelope(await http.post(CHAT, content=b"x" * (65 << 10)), 413)
    assert "api.max_body" in error["message"]


async def test_chunked_body_too_large(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    async def endless() -> Any:
        for _ in range(65):
            yield b"x" * 1024

    assert_envelope(await http.post(CHAT, content=endless()), 413)
    assert gateway.requests == []


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": 2**70}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"priority": "high"}, "priority"),
        ({"reuse": "always"}, "reuse"),
        ({"best_of": 2}, "best_of"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": None}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"colour": "red"}, "colour"),
        ({"model": None}, "model"),
    ],
)
async def test_wrong_parameter_is_named(
    http: httpx.AsyncClient, gateway: FakeGateway, more: dict[str, Any], param: str
) -> None:
    error = assert_envelope(await http.post(CHAT, json=chat(**more)), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param in error["message"]
    assert gateway.requests == []


async def test_nan_is_refused(http: httpx.AsyncClient) -> None:
    raw = json.dumps(chat(temperature=float("nan")))
    assert assert_envelope(await http.post(CHAT, content=raw), 400)["param"] == "temperature"


async def test_every_unknown_parameter_is_named(http: httpx.AsyncClient) -> None:
    error = assert_envelope(await http.post(CHAT, json=chat(zeta=1, alpha=None)), 400)
    assert "alpha, zeta" in error["message"]


@pytest.mark.parametrize(
    "more",
    [{"stream_options": {"include_usage": True}}, {"top_logprobs": 2}],
    ids=["stream_options without stream", "top_logprobs without logprobs"],
)
async def test_parameters_that_need_another(http: httpx.AsyncClient, more: dict[str, Any]) -> None:
    error = assert_envelope(await http.post(CHAT, json=chat(**more)), 400)
    assert next(iter(more)) in error["message"]


async def test_parameters_at_their_neutral_value_are_accepted(http: httpx.AsyncClient) -> None:
    body = chat(
        n=1,
        tools=[],
        tool_choice="auto",
        frequency_penalty=0,
        presence_penalty=0.0,
        response_format={"type": "text"},
        logit_bias=None,
        stop=None,
        seed=None,
        user="me",
        temperature=None,
    )
    assert (await http.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_unknown_model(http: httpx.AsyncClient, path: str) -> None:
    body = (
        {"model": "nobody/nothing", "messages": HELLO}
        if path == CHAT
        else {"model": "nobody/nothing", "prompt": "x"}
    )
    error = assert_envelope(await http.post(path, json=body), 404)
    assert error["code"] == "model_not_found"
    assert MODEL in error["message"]


async def test_unknown_model_card(http: httpx.AsyncClient) -> None:
    assert assert_envelope(await http.get("/v1/models/other"), 404)["param"] == "model"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param"),
    [("x" * CONTEXT, 1, "prompt"), ("x" * (CONTEXT - 2), 3, "max_tokens")],
)
async def test_context_too_long(
    http: httpx.AsyncClient, prompt: str, max_tokens: int, param: str
) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens}
    error = assert_envelope(await http.post(TEXT, json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert str(CONTEXT) in error["message"]


@pytest.mark.parametrize(
    "prompt", ["", [], ["a", ""], [1, -2], {"a": 1}, None, [[1, 2], []], [1, "a"], ["x"] * 17]
)
async def test_bad_prompt(http: httpx.AsyncClient, prompt: Any) -> None:
    error = assert_envelope(await http.post(TEXT, json={"model": MODEL, "prompt": prompt}), 400)
    assert error["param"] == "prompt"


@pytest.mark.parametrize("value", ["one", "-1", "1.0", ""])
async def test_bad_replica_header(http: httpx.AsyncClient, value: str) -> None:
    response = await http.post(CHAT, json=chat(), headers={"x-mooncake-replica": value})
    assert assert_envelope(response, 400)["param"] == "x-mooncake-replica"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (Overloaded("busy", retry_after_s=7.4), 429, "7"),
        (Unavailable("no replica"), 503, "1"),
        (RuntimeError("a secret detail"), 500, None),
    ],
)
async def test_refusal_at_the_start(
    http: httpx.AsyncClient,
    gateway: FakeGateway,
    error: Exception,
    status: int,
    retry_after: str | None,
    stream: bool,
) -> None:
    gateway.refusal = error
    response = await http.post(CHAT, json=chat(stream=stream))
    message = assert_envelope(response, status)["message"]
    assert response.headers.get("retry-after") == retry_after
    assert "secret" not in message


@pytest.mark.parametrize("stream", [False, True])
async def test_failure_before_the_first_token_has_a_status(
    http: httpx.AsyncClient, gateway: FakeGateway, stream: bool
) -> None:
    gateway.fail_after, gateway.error = 0, EngineFailed("gone", code="replica_died")
    response = await http.post(CHAT, json=chat(stream=stream))
    assert assert_envelope(response, 500)["code"] == "replica_died"
    assert len(gateway.closed) == 1


async def test_failure_after_a_token_is_a_stream_event(
    http: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.fail_after, gateway.error = 2, EngineFailed("gone", code="replica_died")
    response = await http.post(CHAT, json=chat(stream=True))
    assert response.status_code == 200
    events = [line[6:] for line in response.text.split("\n\n") if line]
    assert json.loads(events[-1])["error"]["code"] == "replica_died"
    assert "[DONE]" not in response.text


@pytest.mark.parametrize("hang_after", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_deadline(gateway: FakeGateway, hang_after: int, stream: bool) -> None:
    gateway.hang_after = hang_after
    app = create_app(gateway, ApiConfig(request_timeout_s=0.3))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.post(CHAT, json=chat(stream=stream))
    if stream and hang_after:
        last = json.loads(response.text.strip().split("\n\n")[-1][6:])
        assert last["error"]["code"] == "deadline_exceeded"
    else:
        assert assert_envelope(response, 504)["code"] == "deadline_exceeded"
    assert len(gateway.closed) == 1


async def test_request_id_is_echoed(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/nowhere"):
        response = await http.get(path, headers={"x-request-id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"
    response = await http.get("/health", headers={"x-request-id": "x" * 200})
    assert response.headers["x-request-id"].startswith("req-")


async def test_every_error_is_counted_once(tmp_path: Path) -> None:
    """Whoever answers it: the door, a route, the router, validation, the frame, a stream."""
    gateway, observer, file = FakeGateway(), Observer(), tmp_path / "keys.json"
    key = {"authorization": f"Bearer {keys.create(file, 'acme', requests_per_minute=7)}"}
    secret = tmp_path / "secret"
    secret.write_text("of this test, and nobody else's\n")
    settings = ApiConfig(keys_file=str(file), tenant_secret_file=str(secret))
    app = create_app(gateway, settings, observer=observer)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/v1/models")).status_code == 401
        for status, method, path, body in (
            (404, "GET", "/v2/nothing", None),
            (404, "GET", "/v1/models/other", None),
            (405, "GET", CHAT, None),
            (400, "POST", CHAT, chat(n=9)),
            (200, "POST", CHAT, chat()),
        ):
            answer = await http.request(method, path, json=body, headers=key)
            assert answer.status_code == status
        gateway.fail_after, gateway.error = 1, EngineFailed("gone")
        cut = await http.post(CHAT, json=chat(stream=True), headers=key)
        assert (cut.status_code, "error" in cut.text) == (200, True)
        gateway.refusal = RuntimeError("a bug")
        assert (await http.post(CHAT, json=chat(), headers=key)).status_code == 500
        assert (await http.post(CHAT, json=chat(), headers=key)).status_code == 429
    lines = observer.scrape.render().decode().splitlines()
    name = "mooncake_request_failures_total{"
    counted = {line[len(name) :] for line in lines if line.startswith(name)}
    assert counted == {
        'status="400"} 1.0',
        'status="401"} 1.0',
        'status="404"} 2.0',
        'status="405"} 1.0',
        'status="429"} 1.0',
        'status="500"} 2.0',
    }
