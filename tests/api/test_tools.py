"""Tools: what the model is shown, what it may write, and how its calls are answered."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from mooncake_serve.api.chat_schemas import Message, Tool
from mooncake_serve.api.tools import ToolStream, conversation, toolbox
from mooncake_serve.engine.grammar import check_grammar
from mooncake_serve.errors import InvalidRequest
from tests.api.fake import FakeGateway
from tests.api.test_answers import CHAT, chat, chunks

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TOOLS = [Tool.model_validate(WEATHER), Tool.model_validate(CLOCK)]


def turn(**fields: Any) -> Message:
    return Message.model_validate(fields)


def test_a_template_without_tools_gets_them_in_words() -> None:
    messages, tools = conversation([turn(role="user", content="hi")], TOOLS, "{{ m }}")
    assert tools == []
    assert [message["role"] for message in messages] == ["system", "user"]
    assert '"name": "weather"' in messages[0]["content"]
    assert "<tool_call>" in messages[0]["content"]


def test_a_template_with_tools_gets_data() -> None:
    call = {"id": "c1", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    spoken = [
        turn(role="user", content="hi"),
        turn(role="assistant", tool_calls=[call]),
        turn(role="tool", tool_call_id="c1", content="12:00"),
    ]
    messages, tools = conversation(spoken, TOOLS, "{% for t in tools %}<tool_call>")
    assert [tool["function"]["name"] for tool in tools] == ["weather", "clock"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    plain, _ = conversation(spoken, [], "{{ m }}")
    assert plain[1]["content"].startswith("<tool_call>")
    assert plain[2]["role"] == "user"
    assert "12:00" in plain[2]["content"]


def test_an_unreadable_template_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="tools"):
        conversation([turn(role="user", content="hi")], TOOLS, "{% for t in tools %}[TOOL_CALLS]")


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("parallel", [True, False])
def test_grammars_compile(choice: Any, parallel: bool) -> None:
    box = toolbox(TOOLS, choice, parallel=parallel)
    assert box is not None
    check_grammar(box.grammar, "tools")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_calls_are_found_however_the_text_is_cut(size: int) -> None:
    text = f"Let me see.\n{CALL}\n{CALL}\n"
    stream = ToolStream(["weather"])
    parts: list[Any] = []
    for start in range(0, len(text), size):
        parts += stream.push(text[start : start + size])
    parts += stream.push("", final=True)
    assert "".join(part for part in parts if isinstance(part, str)) == "Let me see.\n"
    calls = [part for part in parts if not isinstance(part, str)]
    assert calls == stream.calls
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"city": "Ulm"}] * 2
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>nonsense</tool_call>",
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
        "<tool_call>\n{",
        "a < b <tool_",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    stream = ToolStream(["weather"])
    parts = [*stream.push(text), *stream.push("", final=True)]
    assert "".join(str(part) for part in parts) == text
    assert stream.calls == []


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("auto", "tool_calls"),
        ("required", "tool_calls"),
        ({"type": "function", "function": {"name": "weather"}}, "stop"),
    ],
)
async def test_calls_are_answered(
    http: httpx.AsyncClient, gateway: FakeGateway, choice: Any, reason: str
) -> None:
    gateway.says = CALL
    body = chat(tools=[WEATHER, CLOCK], tool_choice=choice, max_tokens=100)
    whole = (await http.post(CHAT, json=body)).json()["choices"][0]
    assert whole["finish_reason"] == reason
    assert whole["message"]["content"] is None
    function = whole["message"]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("weather", {"city": "Ulm"})
    got = chunks(await http.post(CHAT, json={**body, "stream": True}))
    deltas = [
        chunk["choices"][0]["delta"]["tool_calls"][0]
        for chunk in got
        if "tool_calls" in chunk["choices"][0]["delta"]
    ]
    assert deltas[0]["function"] == {"name": "weather", "arguments": ""}
    assert deltas[0]["id"].startswith("call_")
    assert json.loads("".join(delta["function"]["arguments"] for delta in deltas)) == {
        "city": "Ulm"
    }
    assert got[-1]["choices"][0]["finish_reason"] == reason
    assert gateway.requests[0].sampling.grammar


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "rm"}}},
            "tool_choice",
        ),
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [CLOCK], "ignore_eos": True}, "ignore_eos"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages"),
    ],
)
async def test_wrong_tools_are_named(
    http: httpx.AsyncClient, more: dict[str, Any], param: str
) -> None:
    response = await http.post(CHAT, json=chat(**more))
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_tools_that_may_not_be_called_change_nothing(
    http: httpx.AsyncClient, gateway: FakeGateway
) -> None:
    await http.post(CHAT, json=chat())
    await http.post(CHAT, json=chat(tools=[WEATHER], tool_choice="none"))
    plain, forbidden = gateway.requests
    assert plain.token_ids == forbidden.token_ids
    assert plain.sampling == forbidden.sampling
