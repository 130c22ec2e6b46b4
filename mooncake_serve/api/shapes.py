"""OpenAI's response shapes: whole answers and the chunks of streamed ones.

A `Shape` belongs to one request of one or several choices; chat and text completions differ only in
their choices.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from mooncake_serve.api.gateway import Codec
from mooncake_serve.api.tools import Toolbox, ToolStream
from mooncake_serve.engine.protocol import FinishEvent, TokenEvent, TokenLogprob, Usage

DONE = b"data: [DONE]\n\n"

JSON = dict[str, Any]

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Choice:
    """All that one choice gave."""

    tokens: list[TokenEvent]
    finish: FinishEvent

    @property
    def text(self) -> str:
        """Its whole text."""
        return "".join(token.text for token in self.tokens) + self.finish.text


def sse(payload: JSON) -> bytes:
    """One server-sent event."""
    return f"data: {_ENCODER.encode(payload)}\n\n".encode()


class Frame:
    """A server-sent event with one text left open: writing a token is two joins, not a dump."""

    _OPEN = "\x00"

    def __init__(self, chunk: Callable[[str], JSON]) -> None:
        """`chunk` makes the event's object around a text."""
        written = sse(chunk(self._OPEN))
        self._before, self._after = written.split(msgspec.json.encode(self._OPEN))

    def fill(self, text: str) -> bytes:
        """The event with this text in it."""
        return self._before + msgspec.json.encode(text) + self._after


def usage_json(usage: Usage) -> JSON:
    """`usage`, with the tokens whose KV was not computed."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def total_usage(usages: Sequence[Usage], choices_per_prompt: int) -> Usage:
    """Of a whole request: a prompt counts once however many choices it got, and was cached as far
    as the choice that found the least."""
    groups = [
        usages[first : first + choices_per_prompt]
        for first in range(0, len(usages), choices_per_prompt)
    ]
    return Usage(
        sum(group[0].prompt_tokens for group in groups),
        sum(usage.completion_tokens for usage in usages),
        sum(min(usage.cached_tokens for usage in group) for group in groups),
    )


class Shape(Protocol):
    """How one request's answer is written. Choices are named by their index."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> JSON:
        """The answer to a request that is not streamed."""
        ...

    def opening(self) -> list[JSON]:
        """Chunks before the first token."""
        ...

    def token(self, index: int, event: TokenEvent) -> bytes:
        """The server-sent events of one token."""
        ...

    def closing(self, index: int, finish: FinishEvent) -> list[JSON]:
        """The chunks that end a choice."""
        ...

    def usage(self, usage: Usage) -> JSON:
        """The chunk after them, when the client asked for usage."""
        ...


class _Base:
    def __init__(
        self, prefix: str, kind: str, model: str, codec: Codec, request_id: str, *, usage: bool
    ) -> None:
        self._codec = codec
        self._head = {
            "id": f"{prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        # Where the last chunk has the usage, OpenAI's other chunks say null.
        self._tail: JSON = {"usage": None} if usage else {}

    def _chunk(self, choices: list[JSON]) -> JSON:
        return {**self._head, "choices": choices, **self._tail}

    def usage(self, usage: Usage) -> JSON:
        """A chunk without choices."""
        return {**self._head, "choices": [], "usage": usage_json(usage)}

    def _whole(self, choices: list[JSON], usage: Usage) -> JSON:
        return {**self._head, "choices": choices, "usage": usage_json(usage)}

    def _text(self, entry: TokenLogprob) -> str:
        return self._codec.decode([entry.token_id])


class ChatShape(_Base):
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(
        self,
        model: str,
        codec: Codec,
        request_id: str,
        *,
        choices: int = 1,
        stream: bool = False,
        usage: bool = False,
        tools: Toolbox | None = None,
    ) -> None:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__("chatcmpl", kind, model, codec, request_id, usage=usage)
        self._choices = choices
        self._tools = tools
        self._streams = [ToolStream(tools.names) for _ in range(choices)] if tools else []
        self._frames = [
            Frame(lambda text, index=index: self._delta(index, {"content": text}))
            for index in range(choices if stream else 0)
        ]

    def whole(self, choices: Sequence[Choice], usage: Usage) -> JSON:
        """The answer to a request that is not streamed."""
        written = [self._choice(index, choice) for index, choice in enumerate(choices)]
        return self._whole(written, usage)

    def opening(self) -> list[JSON]:
        """The role comes first, alone."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [self._delta(index, dict(delta)) for index in range(self._choices)]

    def token(self, index: int, event: TokenEvent) -> bytes:
        """The server-sent events of one token: mostly one."""
        if event.logprob is None and not self._streams:
            return self._frames[index].fill(event.text)
        logprobs = self._logprobs([event])
        deltas: list[JSON] = [{"content": event.text}]
        if self._streams:
            deltas = self._deltas(index, self._streams[index].push(event.text))
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        return b"".join(
            sse(self._delta(index, delta, logprobs=None if number else logprobs))
            for number, delta in enumerate(deltas)
        )

    def closing(self, index: int, finish: FinishEvent) -> list[JSON]:
        """The rest of the text, if any, and why the answer ends."""
        if not self._streams:
            rest = {"content": finish.text} if finish.text else {}
            return [self._delta(index, rest, finish_reason=finish.reason)]
        stream = self._streams[index]
        chunks = [
            self._delta(index, delta)
            for delta in self._deltas(index, stream.push(finish.text, final=True))
        ]
        reason = self._reason(stream, finish)
        return [*chunks, self._delta(index, {}, finish_reason=reason)]

    def _choice(self, index: int, choice: Choice) -> JSON:
        message: JSON = {"role": "assistant", "content": choice.text, "refusal": None}
        reason: str = choice.finish.reason
        if self._streams:
            stream = self._streams[index]
            parts = stream.push(choice.text, final=True)
            content = "".join(part for part in parts if isinstance(part, str))
            message["content"] = content if content.strip() or not stream.calls else None
            if stream.calls:
                message["tool_calls"] = stream.calls
            reason = self._reason(stream, choice.finish)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": reason,
        }

    def _reason(self, stream: ToolStream, finish: FinishEvent) -> str:
        named = self._tools is not None and self._tools.named
        called = bool(stream.calls) and finish.reason == "stop" and not named
        return "tool_calls" if called else finish.reason

    def _deltas(self, index: int, parts: list[str | JSON]) -> list[JSON]:
        """A call comes in two deltas, as OpenAI's do: its name, then its arguments."""
        deltas: list[JSON] = []
        number = len(self._streams[index].calls) - sum(isinstance(part, dict) for part in parts)
        for part in parts:
            if isinstance(part, str):
                deltas.append({"content": part})
                continue
            function = part["function"]
            name = {**part, "index": number, "function": {**function, "arguments": ""}}
            arguments = {"index": number, "function": {"arguments": function["arguments"]}}
            deltas += [{"tool_calls": [name]}, {"tool_calls": [arguments]}]
            number += 1
        return deltas

    def _delta(
        self,
        index: int,
        delta: JSON,
        logprobs: JSON | None = None,
        finish_reason: str | None = None,
    ) -> JSON:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._chunk([choice])

    def _logprobs(self, tokens: Iterable[TokenEvent]) -> JSON | None:
        content = [
            {
                **self._entry(token.logprob),
                "top_logprobs": [self._entry(entry) for entry in token.top_logprobs],
            }
            for token in tokens
            if token.logprob is not None
        ]
        return {"content": content, "refusal": None} if content else None

    def _entry(self, entry: TokenLogprob) -> JSON:
        text = self._text(entry)
        return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode())}


class TextShape(_Base):
    """`text_completion`, whole or in chunks."""

    def __init__(
        self,
        model: str,
        codec: Codec,
        request_id: str,
        *,
        choices: int = 1,
        stream: bool = False,
        usage: bool = False,
    ) -> None:
        super().__init__("cmpl", "text_completion", model, codec, request_id, usage=usage)
        self._offsets = [0] * choices
        self._frames = [
            Frame(lambda text, index=index: self._chunk([self._choice(index, text, None, None)]))
            for index in range(choices if stream else 0)
        ]

    def whole(self, choices: Sequence[Choice], usage: Usage) -> JSON:
        """The answer to a request that is not streamed."""
        written = [
            self._choice(
                index, choice.text, self._logprobs(index, choice.tokens), choice.finish.reason
            )
            for index, choice in enumerate(choices)
        ]
        return self._whole(written, usage)

    def opening(self) -> list[JSON]:
        """Nothing comes before the first token."""
        return []

    def token(self, index: int, event: TokenEvent) -> bytes:
        """The server-sent event of one token."""
        if event.logprob is None:
            return self._frames[index].fill(event.text)
        choice = self._choice(index, event.text, self._logprobs(index, [event]), None)
        return sse(self._chunk([choice]))

    def closing(self, index: int, finish: FinishEvent) -> list[JSON]:
        """The rest of the text, if any, and why the answer ends."""
        return [self._chunk([self._choice(index, finish.text, None, finish.reason)])]

    def _choice(self, index: int, text: str, logprobs: JSON | None, reason: str | None) -> JSON:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, tokens: Iterable[TokenEvent]) -> JSON | None:
        known = [token for token in tokens if token.logprob is not None]
        if not known:
            return None
        offsets = []
        for token in known:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token.text)
        chosen = [token.logprob for token in known if token.logprob is not None]
        return {
            "tokens": [self._text(entry) for entry in chosen],
            "token_logprobs": [entry.logprob for entry in chosen],
            "top_logprobs": [
                {self._text(entry): entry.logprob for entry in token.top_logprobs}
                for token in known
            ],
            "text_offset": offsets,
        }
