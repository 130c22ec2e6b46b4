"""Answers in OpenAI's shapes: whole and streamed, for chat and for text completions.

Pure: events in, dictionaries out. `Shape` is what differs between the two endpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from mooncake_serve.engine.protocol import FinishEvent, TokenEvent, TokenLogprob, Usage
from mooncake_serve.errors import RequestError

TokenText = Callable[[int], str]
Kind = Literal["chat", "text"]

_OBJECTS = {
    "chat": ("chat.completion", "chat.completion.chunk"),
    "text": ("text_completion", "text_completion"),
}


def usage_payload(usage: Usage) -> dict[str, Any]:
    """Token counts; `cached_tokens` is what was reused instead of computed."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def sse(payload: dict[str, Any] | str) -> str:
    """One server-sent event."""
    data = payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":"))
    return f"data: {data}\n\n"


def sse_error(err: RequestError) -> str:
    """An error after the stream has begun."""
    return sse(err.envelope())


@dataclass(slots=True)
class Renderer:
    """Builds the answer of one request."""

    kind: Kind
    request_id: str
    model: str
    created: int
    token_text: TokenText
    logprobs: bool
    _text: list[str] = field(default_factory=list)
    _tokens: list[TokenEvent] = field(default_factory=list)
    _offset: int = 0

    def add(self, event: TokenEvent) -> None:
        """Collect a token of an answer that is not streamed."""
        self._text.append(event.text)
        self._tokens.append(event)

    def whole(self, finish: FinishEvent) -> dict[str, Any]:
        """The complete answer."""
        text = "".join(self._text) + finish.text
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish.reason}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(self._tokens) if self.logprobs else None
        payload = self._envelope(streamed=False)
        return {**payload, "choices": [choice], "usage": usage_payload(finish.usage)}

    def first(self) -> dict[str, Any] | None:
        """The chunk that opens a stream: chat names the role."""
        if self.kind == "text":
            return None
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None)

    def tokens(self, events: Iterable[TokenEvent]) -> dict[str, Any] | None:
        """One chunk for a batch of tokens; None while all their text is held back."""
        self._tokens.extend(events)
        text = "".join(event.text for event in self._tokens)
        if not text:
            return None
        held, self._tokens = self._tokens, []
        return self._chunk(self._piece(text), None, held)

    def last(self, finish: FinishEvent) -> list[dict[str, Any]]:
        """What ends a stream: text that was held back, then the reason."""
        chunks = []
        held, self._tokens = self._tokens, []
        if finish.text or (held and self.logprobs):
            chunks.append(self._chunk(self._piece(finish.text), None, held))
        empty = {"delta": {}} if self.kind == "chat" else {"text": ""}
        return [*chunks, self._chunk(empty, finish.reason)]

    def usage(self, finish: FinishEvent) -> dict[str, Any]:
        """The chunk with token counts and no choices."""
        return {
            **self._envelope(streamed=True),
            "choices": [],
            "usage": usage_payload(finish.usage),
        }

    def _piece(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self.kind == "chat" else {"text": text}

    def _chunk(
        self, content: dict[str, Any], reason: str | None, tokens: Iterable[TokenEvent] = ()
    ) -> dict[str, Any]:
        logprobs = self._logprobs(list(tokens)) if self.logprobs and tokens else None
        choice = {"index": 0, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self._envelope(streamed=True), "choices": [choice]}

    def _envelope(self, *, streamed: bool) -> dict[str, Any]:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": _OBJECTS[self.kind][streamed],
            "created": self.created,
            "model": self.model,
        }

    def _logprobs(self, tokens: list[TokenEvent]) -> dict[str, Any]:
        if self.kind == "chat":
            return {"content": [self._chat_logprob(event) for event in tokens], "refusal": None}
        texts = [self.token_text(event.token_id) for event in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [event.logprob and event.logprob.logprob for event in tokens],
            "top_logprobs": [
                {self.token_text(top.token_id): top.logprob for top in event.top_logprobs}
                for event in tokens
            ],
            "text_offset": offsets,
        }

    def _chat_logprob(self, event: TokenEvent) -> dict[str, Any]:
        chosen = event.logprob or TokenLogprob(event.token_id, 0.0)
        tops = [self._token_logprob(top) for top in event.top_logprobs]
        return {**self._token_logprob(chosen), "top_logprobs": tops}

    def _token_logprob(self, token: TokenLogprob) -> dict[str, Any]:
        text = self.token_text(token.token_id)
        return {"token": text, "logprob": token.logprob, "bytes": list(text.encode())}
