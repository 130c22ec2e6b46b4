"""Every parameter reaches the engine, or is refused by name; several choices make one answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.api.fake import CONTEXT, MODEL, FakeGateway
from tests.api.test_answers import CHAT, HELLO, TEXT, chat, chunks


async def test_new_sampling_settings(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    body = chat(
        min_p=0.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"5": -100, "7": 2.5},
        priority=-3,
        reuse="none",
    )
    assert (await http.post(CHAT, json=body)).status_code == 200
    request = gateway.requests[0]
    sampling = request.sampling
    assert (sampling.min_p, sampling.presence_penalty) == (0.1, 0.5)
    assert (sampling.frequency_penalty, sampling.repetition_penalty) == (-0.5, 1.2)
    assert sampling.logit_bias == ((5, -100.0), (7, 2.5))
    assert (request.priority, request.reuse) == (-3, False)


async def test_cache_salt_separates(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    for salt in ("a", "b", "a", None):
        await http.post(CHAT, json=chat(cache_salt=salt))
    salts = [request.tenant_salt for request in gateway.requests]
    assert salts[0] == salts[2]
    assert len(set(salts)) == 3
    assert {len(salt) for salt in salts} == {0, 32}


async def test_session_hints(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    await http.post(CHAT, json=chat(session_id="one"))
    await http.post(CHAT, json=chat(), headers={"x-session-id": "two"})
    assert [hints.session for hints in gateway.hints] == ["one", "two"]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices(http: httpx.AsyncClient, gateway: FakeGateway, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await http.post(CHAT, json=chat(n=3, seed=7, temperature=1, **options))
    if stream:
        got = chunks(response)
        texts = {0: "", 1: "", 2: ""}
        for chunk in got[:-1]:
            choice = chunk["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
        usage = got[-1]["usage"]
    else:
        answer = response.json()
        texts = {c["index"]: c["message"]["content"] for c in answer["choices"]}
        usage = answer["usage"]
    assert texts == {0: "abc", 1: "abc", 2: "abc"}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len("<user>hi"), 9)
    assert [request.sampling.seed for request in gateway.requests] == [7, 8, 9]
    assert [hints.beside for hints in gateway.hints] == [None, "r0", "r0"]
    assert len(gateway.closed) == 3


@pytest.mark.parametrize("prompt", [["xy", "z"], [[120, 121], [122]]])
async def test_several_prompts(http: httpx.AsyncClient, gateway: FakeGateway, prompt: Any) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "n": 2}
    answer = (await http.post(TEXT, json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [request.token_ids for request in gateway.requests]
    assert prompts == [(120, 121), (120, 121), (122,), (122,)]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 8


async def test_one_failing_choice_fails_the_answer(
    http: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.fail_after = 1
    response = await http.post(CHAT, json=chat(n=4))
    assert response.status_code == 500
    assert len(gateway.closed) == 4


async def test_a_refused_choice_gives_back_the_others(
    http: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    gateway.refuse_after = 2
    assert (await http.post(CHAT, json=chat(n=3))).status_code == 503
    assert len(gateway.closed) == 2


async def test_json_formats_become_grammars(http: httpx.AsyncClient, gateway: FakeGateway) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    formats = [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
    ]
    for wanted in formats:
        assert (await http.post(CHAT, json=chat(response_format=wanted))).status_code == 200
    grammars = [request.sampling.grammar for request in gateway.requests]
    assert grammars[0] is None
    assert "json_schema" in str(grammars[1])
    assert '"integer"' in str(grammars[2])


@pytest.mark.parametrize(
    "schema", [{"type": "objekt"}, {"type": "string", "pattern": "("}, {"$ref": "#/nowhere"}]
)
async def test_a_bad_schema_is_named(http: httpx.AsyncClient, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = await http.post(CHAT, json=chat(response_format=wanted))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "response_format"


async def test_structured_output_needs_an_end(http: httpx.AsyncClient) -> None:
    body = chat(response_format={"type": "json_object"}, ignore_eos=True)
    response = await http.post(CHAT, json=body)
    assert response.json()["error"]["param"] == "ignore_eos"


async def test_tokenize_and_back(http: httpx.AsyncClient) -> None:
    got = (await http.post("/tokenize", json={"prompt": "xy"})).json()
    assert got == {"count": 2, "max_model_len": CONTEXT, "tokens": [120, 121]}
    back = (await http.post("/detokenize", json={"tokens": got["tokens"]})).json()
    assert back == {"prompt": "xy"}
    messages = (await http.post("/tokenize", json={"model": MODEL, "messages": HELLO})).json()
    assert messages["count"] == len("<user>hi")
    for body in ({}, {"prompt": "a", "messages": HELLO}, {"prompt": "a", "colour": 1}):
        assert (await http.post("/tokenize", json=body)).status_code == 400
    wrong = await http.post("/detokenize", json={"tokens": [2**31 - 1]})
    assert wrong.json()["error"]["param"] == "tokens"


async def test_metrics_count(http: httpx.AsyncClient) -> None:
    await http.post(CHAT, json=chat())
    chunks(await http.post(CHAT, json=chat(stream=True)))
    await http.post(CHAT, json=chat(temperature=9))
    text = (await http.get("/metrics")).text
    label = f'model_name="{MODEL}"'
    assert f"vllm:num_requests_running{{{label}}} 0.0" in text
    assert f"vllm:generation_tokens_total{{{label}}} 6.0" in text
    assert f'vllm:request_success_total{{finished_reason="length",{label}}} 2.0' in text
    assert f"vllm:time_to_first_token_seconds_count{{{label}}} 2.0" in text
    assert f"vllm:e2e_request_latency_seconds_count{{{label}}} 2.0" in text
    assert 'mooncake_request_failures_total{status="400"} 1.0' in text


async def test_the_openapi_document_is_whole(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    text = json.dumps(document)
    names = set(document["components"]["schemas"])
    assert "#/$defs/" not in text
    for part in text.split('"#/components/schemas/')[1:]:
        assert part.split('"')[0] in names
