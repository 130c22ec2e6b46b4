"""What the SDK returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one request. `cached_tokens` counts prompt tokens whose KV was not computed."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a text, and how many fit the model's context, prompt and answer together."""

    ids: tuple[int, ...]
    max_context: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token and its natural log-probability."""

    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    finish_reason: str
    usage: TokenUsage
    model: str
    request_id: str
    ttft_s: float | None = None
    """Seconds from sending to the first piece of text; None unless the answer was streamed."""
    replica: str | None = None
    """The replica that answered, where the request asked for it (`explain=True`)."""
    logprobs: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    """One per generated token where the request asked for `logprobs`, else empty."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    """The server's JSON, for fields this type does not name."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer. The last one carries `finish_reason`."""

    text: str
    finish_reason: str | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
