"""What a good request gets: OpenAI's shapes, whole and streamed, and our two headers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from mooncake_serve.api import create_app
from mooncake_serve.config import ApiConfig
from tests.api.fake import CONTEXT, MODEL, FakeGateway

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]
USAGE = {
    "prompt_tokens": len("<user>hi"),
    "completion_tokens": 3,
    "total_tokens": len("<user>hi") + 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 3, **more}


async def test_models(http: httpx.AsyncClient) -> None:
    card = (await http.get("/v1/models")).json()
    assert card["object"] == "list"
    assert card["data"] == [(await http.get(f"/v1/models/{MODEL}")).json()]
    assert card["data"][0]["id"] == MODEL
    assert card["data"][0]["max_model_len"] == CONTEXT


async def test_health_and_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}
    assert (await http.get("/version")).json()["version"]


async def test_chat(http: httpx.AsyncClient) -> None:
    answer = (await http.post(CHAT, json=chat())).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["usage"] == USAGE
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None


async def test_chat_stream(http: httpx.AsyncClient) -> None:
    got = chunks(await http.post(CHAT, json=chat(stream=True)))
    assert {chunk["object"] for chunk in got} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in got}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in got]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert [delta.get("content") for delta in deltas[1:]] == ["a", "b", "c", None]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in got]
    assert reasons == [None, None, None, None, "length"]
    assert all("usage" not in chunk for chunk in got)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_stream_with_usage(http: httpx.AsyncClient, path: str) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = (
        chat(**options)
        if path == CHAT
        else {"model": MODEL, "prompt": "<user>hi", "max_tokens": 3, **options}
    )
    got = chunks(await http.post(path, json=body))
    assert got[-1]["choices"] == []
    assert got[-1]["usage"] == USAGE
    assert all(chunk["usage"] is None for chunk in got[:-1])


async def test_completion(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    answer = (await http.post(TEXT, json={"model": MODEL, "prompt": "xy"})).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == "abcdefghijklmnop"
    assert gateway.requests[0].token_ids == (120, 121)


async def test_completion_stream(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "xy", "max_tokens": 2, "stream": True}
    got = chunks(await http.post(TEXT, json=body))
    choices = [chunk["choices"][0] for chunk in got]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [
        ("a", None),
        ("b", None),
        ("", "length"),
    ]


HEADS = {
    CHAT: '"id":"chatcmpl-*","object":"chat.completion.chunk","created":*,"model":"org/fake"',
    TEXT: '"id":"cmpl-*","object":"text_completion","created":*,"model":"org/fake"',
}
CHOICES = {
    CHAT: [
        '"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null',
        r'"delta":{"content":"ü\n"},"logprobs":null,"finish_reason":null',
        r'"delta":{"content":"\""},"logprobs":null,"finish_reason":null',
        '"delta":{},"logprobs":null,"finish_reason":"stop"',
    ],
    TEXT: [
        r'"text":"ü\n","logprobs":null,"finish_reason":null',
        r'"text":"\"","logprobs":null,"finish_reason":null',
        '"text":"","logprobs":null,"finish_reason":"stop"',
    ],
}
LAST = (
    '"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":9,"total_tokens":17,'
    '"prompt_tokens_details":{"cached_tokens":4}}'
)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_the_bytes_of_a_stream(
    http: httpx.AsyncClient, gateway: FakeGateway, path: str
) -> None:
    gateway.says = ["ü\n", '"']
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "<user>hi"}
    options = {"max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    response = await http.post(path, json={"model": MODEL, **asked, **options})
    masked = re.sub(rb'(?<="id":")(chatcmpl|cmpl)-[0-9a-f]{32}(?=")', rb"\1-*", response.content)
    masked = re.sub(rb'(?<="created":)\d{10}(?=,)', b"*", masked)
    events = [f'"choices":[{{"index":0,{choice}}}],"usage":null' for choice in CHOICES[path]]
    written = [f"{{{HEADS[path]},{event}}}" for event in (*events, LAST)]
    assert masked == "".join(f"data: {each}\n\n" for each in (*written, "[DONE]")).encode()


@pytest.mark.parametrize("prompt", [[120, 121], ["xy"], "xy"])
async def test_prompt_forms(http: httpx.AsyncClient, gateway: FakeGateway, prompt: Any) -> None:
    assert (await http.post(TEXT, json={"model": MODEL, "prompt": prompt})).status_code == 200
    assert gateway.requests[0].token_ids == (120, 121)


async def test_message_forms(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    messages = [
        {"role": "developer", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "name": "me"},
    ]
    await http.post(CHAT, json=chat(messages=messages))
    text = "".join(chr(token) for token in gateway.requests[0].token_ids)
    assert text == "<system>s<user>ab<assistant>c"


async def test_sampling_reaches_the_engine(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    await http.post(
        CHAT,
        json=chat(
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            seed=3,
            stop=["x", "y"],
            ignore_eos=True,
            max_tokens=None,
            max_completion_tokens=5,
            logprobs=True,
            top_logprobs=2,
        ),
    )
    sampling = gateway.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.seed, sampling.stop, sampling.ignore_eos) == (3, ("x", "y"), True)
    assert (sampling.max_tokens, sampling.logprobs) == (5, 2)


async def test_chat_without_a_limit_may_fill_the_context(
    http: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    await http.post(CHAT, json={"model": MODEL, "messages": HELLO})
    assert gateway.requests[0].sampling.max_tokens == CONTEXT - len("<user>hi")


async def test_chat_logprobs(http: httpx.AsyncClient) -> None:
    body = chat(logprobs=True, top_logprobs=2)
    whole = (await http.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in whole] == ["a", "b", "c"]
    assert whole[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "b", "logprob": -1.5, "bytes": [98]},
        ],
    }
    streamed = chunks(await http.post(CHAT, json={**body, "stream": True}))
    entries = [c["choices"][0]["logprobs"] for c in streamed if c["choices"][0]["logprobs"]]
    assert [entry["content"][0] for entry in entries] == whole


async def test_completion_logprobs(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "logprobs": 1}
    logprobs = (await http.post(TEXT, json=body)).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
        "text_offset": [0, 1],
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_pin_and_explain(http: httpx.AsyncClient, gateway: FakeGateway, stream: bool) -> None:
    headers = {"x-mooncake-replica": "1", "x-mooncake-explain": "1"}
    response = await http.post(CHAT, json=chat(stream=stream), headers=headers)
    assert json.loads(response.headers["x-mooncake-route"])["replica"] == "r1"
    response = await http.post(CHAT, json=chat(stream=stream))
    assert "x-mooncake-route" not in response.headers
    assert gateway.pins == [1, None]


async def test_tenants(gateway: FakeGateway, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of this test, and nobody else's")
    app = create_app(gateway, ApiConfig(tenant_secret_file=str(secret)))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        response = await http.post(CHAT, json=chat())
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        for key in ("one", "two", "one"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await http.post(CHAT, json=chat(), headers=headers)).status_code == 200
    one, two, again = gateway.requests
    assert (one.tenant, one.tenant_salt) == (again.tenant, again.tenant_salt)
    assert len({one.tenant_salt, two.tenant_salt}) == 2
    assert len(one.tenant_salt) == 32
    assert "one" not in one.tenant


async def test_a_request_id_used_twice_names_two_requests(
    http: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    for _ in range(2):
        await http.post(CHAT, json=chat(), headers={"x-request-id": "same"})
    assert len({request.request_id for request in gateway.requests}) == 2
