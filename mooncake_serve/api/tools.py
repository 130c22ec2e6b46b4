"""Tools: how a model is told of them, made to call them, and understood when it does.

A call is written `<tool_call>{"name": …, "arguments": …}</tool_call>`, as most open models with
tools write it. A chat template that knows tools gets them as data. One that does not (SmolLM2's)
gets the same text in the system message, so the model sees its tools either way. Every call follows
its function's schema by construction: a grammar takes over at `<tool_call>`, or from the first
token where a call is demanded. Pure.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mooncake_serve.api.chat_schemas import Message, NamedChoice, Tool, ToolChoice
from mooncake_serve.engine.grammar import JSON_SPACING
from mooncake_serve.errors import InvalidRequest

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PREAMBLE = (
    "You can call functions. Their signatures, one JSON object a line:\n"
    "<tools>\n{tools}\n</tools>\n"
    'To call one, answer with {{"name": ..., "arguments": {{...}}}} between <tool_call> and '
    "</tool_call>. Answer in words when no function helps."
)


@dataclass(frozen=True, slots=True)
class Toolbox:
    """What one request may call, and whether it must."""

    names: tuple[str, ...]
    grammar: str
    named: bool = False
    """One function was demanded by name: OpenAI then ends the answer with "stop"."""


def toolbox(tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool) -> Toolbox | None:
    """The functions of a request; None when it has none or forbids them. Raises InvalidRequest."""
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools: two functions of one name", param="tools")
    if isinstance(choice, NamedChoice):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            raise InvalidRequest(
                f"tool_choice: {choice.function.name!r} is not among the tools", param="tool_choice"
            )
    if choice == "required" and not tools:
        raise InvalidRequest("tool_choice: required, but there are no tools", param="tool_choice")
    if choice == "none" or not tools:
        return None
    grammar = _grammar(tools, forced=choice != "auto", parallel=parallel)
    kept = tuple(tool.function.name for tool in tools)
    return Toolbox(kept, grammar, named=isinstance(choice, NamedChoice))


def _grammar(tools: Sequence[Tool], *, forced: bool, parallel: bool) -> str:
    """llguidance's Lark: text, then calls; where a call is demanded, no text."""
    # `lazy` ends the text at the first `<tool_call>`; from there on the call is one of ours.
    lines = ["%llguidance {}"]
    bodies = []
    for number, tool in enumerate(tools):
        head = json.dumps(f'\n{{"name": "{tool.function.name}", "arguments": ')
        schema = {"type": "object", **(tool.function.parameters or {}), "x-guidance": JSON_SPACING}
        lines.append(f"args_{number}: %json {json.dumps(schema)}")
        bodies.append(f'{head} args_{number} "}}\\n{CLOSE}"')
    lines.append(f"call: {' | '.join(bodies)}")
    first = f'"{OPEN}" call'
    if forced:
        again = f'("\\n{OPEN}" call)*' if parallel else ""
        lines.append(f"start: {first} {again}")
    else:
        lines.append(f"start: (triggered call){'*' if parallel else '?'} TEXT")
        lines.append(f'triggered[lazy]: TEXT "{OPEN}"')
        lines.append(r"TEXT: /(.|\n)*/")
    return "\n".join(lines)


def conversation(
    messages: Sequence[Message], tools: Sequence[Tool], template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools as the model's template takes them. Raises InvalidRequest."""
    described = [
        tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools
    ]
    spoken = [_message(message) for message in messages]
    uses_tools = bool(tools) or any(
        each["role"] == "tool" or "tool_calls" in each for each in spoken
    )
    if not uses_tools:
        return spoken, []
    if "tools" not in template:
        return _prompted(spoken, described), []
    if OPEN not in template or "<function=" in template:
        raise InvalidRequest(
            "tools: this model writes calls in a form that this server does not read", param="tools"
        )
    return spoken, described


def _message(message: Message) -> dict[str, Any]:
    """`developer` is OpenAI's newer word for `system`; templates want arguments as objects."""
    role = "system" if message.role == "developer" else message.role
    form: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_calls:
        form["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": json.loads(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        form["tool_call_id"] = message.tool_call_id
    return form


def _prompted(spoken: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A conversation with tools in plain messages."""
    plain = [_plain(message) for message in spoken]
    if not tools:
        return plain
    text = PREAMBLE.format(tools="\n".join(json.dumps(tool["function"]) for tool in tools))
    if plain[0]["role"] == "system":
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = [
        f"{OPEN}\n{json.dumps(call['function'])}\n{CLOSE}" for call in message.get("tool_calls", ())
    ]
    content = "\n".join([*([message["content"]] if message["content"] else []), *calls])
    return {"role": message["role"], "content": content}


class ToolStream:
    """Splits one answer's text, as it comes, into content and calls."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._held = ""
        self._inside = False
        self.calls: list[dict[str, Any]] = []
        """Calls so far, in OpenAI's shape."""

    def push(self, text: str, *, final: bool = False) -> list[str | dict[str, Any]]:
        """Text, or calls in OpenAI's shape, that are certain now."""
        self._held += text
        parts: list[str | dict[str, Any]] = []
        while True:
            before, found, after = self._held.partition(CLOSE if self._inside else OPEN)
            if not found:
                break
            parts.append(self._call(before) if self._inside else before)
            self._held, self._inside = after, not self._inside
        if final:
            rest = OPEN + self._held if self._inside else self._held
            parts.append(rest)
            self._held, self._inside = "", False
        elif not self._inside:
            kept = _overlap(self._held, OPEN)
            cut = len(self._held) - kept
            parts.append(self._held[:cut])
            self._held = self._held[cut:]
        return [part for part in parts if part and not (self.calls and _blank(part))]

    def _call(self, text: str) -> str | dict[str, Any]:
        """A call; text that is none stays text."""
        try:
            written = json.loads(text)
            name, arguments = written["name"], written.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return f"{OPEN}{text}{CLOSE}"
        if name not in self._names or not isinstance(arguments, dict):
            return f"{OPEN}{text}{CLOSE}"
        call = {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        self.calls.append(call)
        return call


def _blank(part: str | dict[str, Any]) -> bool:
    """The line breaks around calls are no content."""
    return isinstance(part, str) and not part.strip()


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of `text` that `tag` begins with."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
