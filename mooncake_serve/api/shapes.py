"""OpenAI's response shapes: whole answers and the chunks of streamed ones.

A `Shape` belongs to one request; chat and text completions differ only in their choices.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, Protocol

from mooncake_serve.api.gateway import Codec
from mooncake_serve.engine.protocol import FinishEvent, TokenEvent, TokenLogprob, Usage

DONE = b"data: [DONE]\n\n"


def sse(payload: dict[str, Any]) -> bytes:
    """One server-sent event."""
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def usage_json(usage: Usage) -> dict[str, Any]:
    """`usage`, with the tokens whose KV was not computed."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Shape(Protocol):
    """How one request's answer is written."""

    def whole(self, tokens: list[TokenEvent], finish: FinishEvent) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        ...

    def token(self, event: TokenEvent) -> dict[str, Any]:
        """The chunk of one token."""
        ...

    def closing(self, finish: FinishEvent) -> dict[str, Any]:
        """The chunk that ends the choice."""
        ...

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The chunk after it, when the client asked for usage."""
        ...


class _Base:
    def __init__(self, prefix: str, kind: str, model: str, codec: Codec, request_id: str) -> None:
        self._codec = codec
        self._head = {
            "id": f"{prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "choices": choices}

    def usage(self, usage: Usage) -> dict[str, Any]:
        """A chunk without choices."""
        return {**self._chunk([]), "usage": usage_json(usage)}

    def _text(self, entry: TokenLogprob) -> str:
        return self._codec.decode([entry.token_id])


class ChatShape(_Base):
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, model: str, codec: Codec, request_id: str, *, stream: bool) -> None:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__("chatcmpl", kind, model, codec, request_id)

    def whole(self, tokens: list[TokenEvent], finish: FinishEvent) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        message = {
            "role": "assistant",
            "content": "".join(token.text for token in tokens) + finish.text,
            "refusal": None,
        }
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish.reason,
        }
        return {**self._chunk([choice]), "usage": usage_json(finish.usage)}

    def opening(self) -> list[dict[str, Any]]:
        """The role comes first, alone."""
        return [self._delta({"role": "assistant", "content": ""})]

    def token(self, event: TokenEvent) -> dict[str, Any]:
        """The chunk of one token."""
        return self._delta({"content": event.text}, logprobs=self._logprobs([event]))

    def closing(self, finish: FinishEvent) -> dict[str, Any]:
        """The rest of the text, if any, and why the answer ends."""
        delta = {"content": finish.text} if finish.text else {}
        return self._delta(delta, finish_reason=finish.reason)

    def _delta(
        self,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._chunk([choice])

    def _logprobs(self, tokens: Iterable[TokenEvent]) -> dict[str, Any] | None:
        content = [
            {
                **self._entry(token.logprob),
                "top_logprobs": [self._entry(entry) for entry in token.top_logprobs],
            }
            for token in tokens
            if token.logprob is not None
        ]
        return {"content": content, "refusal": None} if content else None

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        text = self._text(entry)
        return {"token": text, "logprob": entry.logprob, "bytes": list(text.encode())}


class TextShape(_Base):
    """`text_completion`, whole or in chunks."""

    def __init__(self, model: str, codec: Codec, request_id: str) -> None:
        super().__init__("cmpl", "text_completion", model, codec, request_id)
        self._offset = 0

    def whole(self, tokens: list[TokenEvent], finish: FinishEvent) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        text = "".join(token.text for token in tokens) + finish.text
        choice = self._choice(text, self._logprobs(tokens), finish.reason)
        return {**self._chunk([choice]), "usage": usage_json(finish.usage)}

    def opening(self) -> list[dict[str, Any]]:
        """Nothing comes before the first token."""
        return []

    def token(self, event: TokenEvent) -> dict[str, Any]:
        """The chunk of one token."""
        return self._chunk([self._choice(event.text, self._logprobs([event]), None)])

    def closing(self, finish: FinishEvent) -> dict[str, Any]:
        """The rest of the text, if any, and why the answer ends."""
        return self._chunk([self._choice(finish.text, None, finish.reason)])

    def _choice(
        self, text: str, logprobs: dict[str, Any] | None, reason: str | None
    ) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: Iterable[TokenEvent]) -> dict[str, Any] | None:
        known = [token for token in tokens if token.logprob is not None]
        if not known:
            return None
        offsets = []
        for token in known:
            offsets.append(self._offset)
            self._offset += len(token.text)
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
