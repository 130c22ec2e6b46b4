"""What the official Python client must be able to do.

    python -m tests.conformance.check URL MODEL

`check.mjs` does the same with the official JavaScript client.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import openai
import pytest

HELLO: Any = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "paint", "description": "Paint it", "parameters": SCHEMA},
}
BATCH_WAIT_S = 120


def models(client: openai.OpenAI, model: str) -> None:
    assert [each.id for each in client.models.list()] == [model]
    assert client.models.retrieve(model).object == "model"


def chat(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_completion_tokens=5, n=2, seed=1, temperature=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    assert answer.usage.prompt_tokens_details is not None
    assert answer.choices[0].finish_reason == "length"


def stream(client: openai.OpenAI, model: str) -> None:
    options: Any = {"model": model, "messages": HELLO, "max_tokens": 5, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == whole
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5


def logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2, temperature=0
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 3
    assert all(len(each.top_logprobs) == 2 for each in found.content)
    assert found.content[0].logprob == max(top.logprob for top in found.content[0].top_logprobs)


def completions(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=["a", "b"], max_tokens=2, logprobs=1)
    assert len(answer.choices) == 2
    assert answer.choices[0].logprobs is not None


def structured(client: openai.OpenAI, model: str) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model=model, messages=HELLO, response_format=wanted, max_tokens=100
    )
    value = json.loads(answer.choices[0].message.content or "")
    assert value["colour"] in {"red", "green"}
    assert isinstance(value["sure"], bool)


def tools(client: openai.OpenAI, model: str) -> None:
    options: Any = {
        "model": model,
        "messages": HELLO,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    choice = client.chat.completions.create(**options).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    call: Any = choice.message.tool_calls[0]
    assert call.function.name == "paint"
    assert set(json.loads(call.function.arguments)) == {"colour", "sure"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    messages: Any = [*HELLO, choice.message.to_dict(), result]
    client.chat.completions.create(model=model, messages=messages, tools=[TOOL], max_tokens=3)
    arguments = ""
    for chunk in client.chat.completions.create(**options, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            arguments += (delta.function and delta.function.arguments) or ""
    assert set(json.loads(arguments)) == {"colour", "sure"}


def errors(client: openai.OpenAI, model: str) -> None:
    for wrong, kind, param in (
        ({"temperature": 9}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"colour": "red"}}, openai.BadRequestError, "colour"),
        ({"model": "nobody"}, openai.NotFoundError, "model"),
    ):
        options: Any = {"model": model, "messages": HELLO, **wrong}
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**options)
        assert caught.value.param == param
        assert caught.value.request_id


def batches(client: openai.OpenAI, model: str) -> None:
    body = {"model": model, "messages": HELLO, "max_tokens": 2}
    lines = [
        {"custom_id": f"j{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n in range(4)
    ]
    raw = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", raw), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    deadline = time.monotonic() + BATCH_WAIT_S
    while client.batches.retrieve(batch.id).status not in {"completed", "failed"}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert batch.output_file_id is not None
    text = client.files.content(batch.output_file_id).text
    assert {json.loads(line)["custom_id"] for line in text.splitlines()} == {"j0", "j1", "j2", "j3"}
    assert client.files.delete(file.id).deleted


CHECKS = (models, chat, stream, logprobs, completions, structured, tools, errors, batches)


def main(url: str, model: str) -> None:
    """Run every check; the first that fails ends it."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for check in CHECKS:
            check(client, model)
            print("ok", check.__name__, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
