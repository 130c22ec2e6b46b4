"""From the bytes of a body to requests the engine takes. Pure, and slow for long prompts: it runs
in a thread, because parsing and tokenising a megabyte takes far longer than the loop may stall.

Parameters of OpenAI's API that we do not implement are accepted at the value that means "off" and
refused by name otherwise: a setting is never ignored silently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from mooncake_serve.api.chat_schemas import Message, OfSchema, Tool
from mooncake_serve.api.envelope import invalid_body
from mooncake_serve.api.gateway import Codec, ModelCard
from mooncake_serve.api.schemas import ChatBody, CompletionBody, TokenizeBody
from mooncake_serve.api.tools import Toolbox, conversation, toolbox
from mooncake_serve.engine.grammar import check_grammar, json_grammar
from mooncake_serve.engine.protocol import SamplingParams
from mooncake_serve.errors import ContextTooLong, InvalidRequest, NotFound

M = TypeVar("M", bound=BaseModel)
B = TypeVar("B", ChatBody, CompletionBody)

OFF: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}
"""Unimplemented parameters, and the values at which they change nothing."""


@dataclass(frozen=True, slots=True)
class Prepared(Generic[B]):
    """A checked request: its body, its prompts, how to sample and what may be called."""

    body: B
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    tools: Toolbox | None = None

    @property
    def choices(self) -> list[tuple[tuple[int, ...], SamplingParams]]:
        """Prompt and sampling of each choice; those of one prompt are neighbours."""
        return [
            (prompt, _reseeded(self.sampling, number))
            for prompt in self.prompts
            for number in range(self.body.n)
        ]


def prepare(raw: bytes, kind: type[B], card: ModelCard, codec: Codec) -> Prepared[B]:
    """Parse, check and tokenise. Raises InvalidRequest, ContextTooLong or NotFound."""
    body = parse(raw, kind)
    check_model(body.model, card)
    tools = _tools(body)
    grammar = _grammar(body, tools)
    prompts = tuple(tuple(tokens) for tokens in _tokens(body, codec))
    if not all(prompts):
        raise InvalidRequest("the prompt is empty", param=_prompt_field(body))
    longest = max(len(prompt) for prompt in prompts)
    room = card.max_context - longest
    sampling = replace(body.sampling(room), grammar=grammar)
    if room < sampling.max_tokens:
        raise _too_long(body, longest, sampling.max_tokens, card)
    return Prepared(body, prompts, sampling, tools)


def parse(raw: bytes, kind: type[M]) -> M:
    """A validated body. Null means absent, as in OpenAI's API."""
    try:
        data = from_json(raw)
    except (ValueError, RecursionError) as err:
        raise InvalidRequest(f"the body is not valid JSON: {err}", code="invalid_json") from err
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    off = OFF if issubclass(kind, ChatBody | CompletionBody) else {}
    unknown = sorted(name for name in data if name not in kind.model_fields and name not in off)
    if unknown:
        raise InvalidRequest(
            f"unknown parameter: {', '.join(unknown)}",
            param=unknown[0],
            code="unknown_parameter",
        )
    given = {name: value for name, value in data.items() if value is not None}
    for name in off.keys() & given.keys():
        _check_off(name, given.pop(name))
    try:
        return kind.model_validate(given)
    except ValidationError as err:
        raise invalid_body(list(err.errors(include_url=False, include_context=False))) from err


def check_model(name: str, card: ModelCard) -> None:
    """Raise NotFound unless `name` is the model served here."""
    if name != card.name:
        raise NotFound(
            f"the model {name!r} is not served here; this server has {card.name!r}",
            param="model",
            code="model_not_found",
        )


def tokenize(body: TokenizeBody, codec: Codec) -> list[int]:
    """Token ids as a completion of the same prompt or messages would have them."""
    if body.messages is None:
        return codec.encode(body.prompt or "")
    return _chat_tokens(body.messages, body.tools, codec)


def _check_off(name: str, value: Any) -> None:
    if value not in OFF[name]:
        off = " or ".join(json.dumps(allowed) for allowed in OFF[name])
        raise _unsupported(name, f"only {off} is supported")


def _unsupported(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {why}", param=name, code="unsupported_parameter")


def _tools(body: ChatBody | CompletionBody) -> Toolbox | None:
    if isinstance(body, CompletionBody):
        return None
    return toolbox(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)


def _grammar(body: ChatBody | CompletionBody, tools: Toolbox | None) -> str | None:
    """What the answer must be; None for any text."""
    wanted = body.response_format
    structured = wanted is not None and wanted.type != "text"
    if structured and tools is not None:
        raise _unsupported("response_format", "only text is supported beside tools")
    if structured:
        schema = wanted.json_schema.schema_ if isinstance(wanted, OfSchema) else {"type": "object"}
        grammar, field = json_grammar(schema), "response_format"
    elif tools is not None:
        grammar, field = tools.grammar, "tools"
    else:
        return None
    if body.ignore_eos:
        raise _unsupported("ignore_eos", f"only false is supported with {field}")
    check_grammar(grammar, field)
    return grammar


def _tokens(body: ChatBody | CompletionBody, codec: Codec) -> list[list[int]]:
    if isinstance(body, ChatBody):
        offered = [] if body.tool_choice == "none" else body.tools
        return [_chat_tokens(body.messages, offered, codec)]
    return [codec.encode(each) if isinstance(each, str) else each for each in body.prompts]


def _chat_tokens(messages: list[Message], tools: list[Tool], codec: Codec) -> list[int]:
    return codec.encode_chat(*conversation(messages, tools, codec.chat_template))


def _reseeded(sampling: SamplingParams, number: int) -> SamplingParams:
    if number == 0 or sampling.seed is None:
        return sampling
    return replace(sampling, seed=sampling.seed + number)


def _prompt_field(body: ChatBody | CompletionBody) -> str:
    return "messages" if isinstance(body, ChatBody) else "prompt"


def _too_long(
    body: ChatBody | CompletionBody, prompt: int, max_tokens: int, card: ModelCard
) -> ContextTooLong:
    field = _prompt_field(body) if prompt >= card.max_context else "max_tokens"
    return ContextTooLong(
        f"this model's context is {card.max_context} tokens; the prompt has {prompt} and up to "
        f"{max_tokens} were asked for: shorten the prompt or lower max_tokens",
        param=field,
        code="context_length_exceeded",
    )
