"""Request bodies, bounded field by field. A parameter that is not here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mooncake_serve.api.chat_schemas import Message, ResponseFormat, Tool, ToolChoice
from mooncake_serve.engine.protocol import SamplingParams

STOPS_MAX = 16
STOP_CHARS_MAX = 256
LOGPROBS_MAX = 20
MESSAGES_MAX = 4096
TOOLS_MAX = 128
CHOICES_MAX = 8
PROMPTS_MAX = 16
BIAS_MAX = 1024
SEED_MAX = 2**63 - 1

StopString = Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
BiasKey = Annotated[str, Field(pattern=r"^\d{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Label = Annotated[str, Field(min_length=1, max_length=256)]


class Body(BaseModel):
    """Base of every body."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    continuous_usage_stats: Literal[False] = False
    """vLLM's: usage in every chunk. Only off is supported."""


class Generation(Body):
    """What chat and text completions share."""

    model: str = Field(max_length=512)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, le=1_000_000)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    logit_bias: dict[BiasKey, Bias] = Field(default={}, max_length=BIAS_MAX)
    """Token id, as a string, to what is added to its logit."""
    seed: int | None = Field(default=None, ge=-SEED_MAX, le=SEED_MAX)
    """Choice i of several draws with seed + i."""
    stop: StopString | Annotated[list[StopString], Field(max_length=STOPS_MAX)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1, le=CHOICES_MAX)
    user: str | None = Field(default=None, max_length=256)
    response_format: ResponseFormat | None = None
    priority: int = Field(default=0, ge=-(2**31), lt=2**31)
    """Lower goes first on a replica; equals go in the order they came."""
    cache_salt: Label | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    session_id: Label | None = None
    """Turns of one conversation: among equally good replicas, the one that answered last."""
    reuse: Literal["auto", "none"] = "auto"
    """none: this prompt will not come again, keep it out of the store."""
    session_end: bool = False
    """No turn follows in this conversation: its blocks may go first."""
    expected_reuse_s: int = Field(default=0, ge=0, le=10_000_000)
    """When this prompt's blocks will be wanted again; 0 if unknown."""
    cache_priority: int = Field(default=0, ge=-100, le=100)
    """How much to keep this prompt's blocks, against others' of their kind."""

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
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
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
    tools: list[Tool] = Field(default=[], max_length=TOOLS_MAX)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True

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
    """`POST /v1/completions`: a prompt or several, as text or token ids."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=PROMPTS_MAX)]
        | list[TokenId]
        | Annotated[list[list[TokenId]], Field(min_length=1, max_length=PROMPTS_MAX)]
    )
    max_tokens: int = Field(default=16, ge=1, le=1_000_000)
    logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_MAX)
    echo: Literal[False] = False

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One or several prompts, each a text or its token ids."""
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        return prompt if several else [prompt]

    def sampling(self, room: int) -> SamplingParams:
        """Sampling settings; OpenAI's default limit here is 16 tokens."""
        del room
        return self._sampling(self.max_tokens, self.logprobs)


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt, or a conversation through the chat template."""

    model: str | None = Field(default=None, max_length=512)
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1, max_length=MESSAGES_MAX)
    tools: list[Tool] = Field(default=[], max_length=TOOLS_MAX)

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = Field(default=None, max_length=512)
    tokens: list[TokenId]
