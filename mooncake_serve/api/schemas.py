"""Request bodies, bounded field by field. A parameter that is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mooncake_serve.engine.protocol import SamplingParams

STOPS_MAX = 16
STOP_CHARS_MAX = 256
LOGPROBS_MAX = 20
MESSAGES_MAX = 4096
SEED_MAX = 2**63 - 1
DEFAULT_MAX_TOKENS = 256

StopString = Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """Base of every body."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False


class TextPart(Body):
    """A piece of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = Field(default=None, max_length=256)

    def template_form(self) -> dict[str, Any]:
        """What a chat template takes; `developer` is OpenAI's newer word for `system`."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class Generation(Body):
    """What chat and text completions share."""

    model: str = Field(max_length=512)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, le=1_000_000)
    seed: int | None = Field(default=None, ge=-SEED_MAX, le=SEED_MAX)
    stop: StopString | Annotated[list[StopString], Field(max_length=STOPS_MAX)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    n: Literal[1] = 1
    user: str | None = Field(default=None, max_length=256)

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=stop,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )


class ChatBody(Generation):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, max_length=MESSAGES_MAX)
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_MAX)

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs: true")
        return self

    def sampling(self, room: int) -> SamplingParams:
        """Sampling settings; without a limit the answer may fill the `room` left in the context."""
        asked = self.max_completion_tokens or self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._sampling(asked or max(1, room), logprobs)


class CompletionBody(Generation):
    """`POST /v1/completions`: one prompt, as text or token ids."""

    prompt: str | list[TokenId] | Annotated[list[str], Field(min_length=1, max_length=1)]
    max_tokens: int = Field(default=16, ge=1, le=1_000_000)
    logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_MAX)
    echo: Literal[False] = False

    def sampling(self, room: int) -> SamplingParams:
        """Sampling settings; OpenAI's default limit here is 16 tokens."""
        del room
        return self._sampling(self.max_tokens, self.logprobs)
