"""From the bytes of a body to a request the engine takes. Pure, and slow for long prompts: it runs
in a thread, because parsing and tokenising a megabyte takes far longer than the loop may stall.

Parameters of OpenAI's API that we do not implement are accepted at the value that means "off" and
refused by name otherwise: a setting is never ignored silently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from mooncake_serve.api.envelope import invalid_body
from mooncake_serve.api.gateway import Codec, ModelCard
from mooncake_serve.api.schemas import ChatBody, CompletionBody
from mooncake_serve.engine.protocol import SamplingParams
from mooncake_serve.errors import ContextTooLong, InvalidRequest, NotFound

B = TypeVar("B", ChatBody, CompletionBody)

OFF: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Unimplemented parameters, and the values at which they change nothing."""


@dataclass(frozen=True, slots=True)
class Prepared(Generic[B]):
    """A checked request: its body, its prompt and how to sample."""

    body: B
    token_ids: tuple[int, ...]
    sampling: SamplingParams


def prepare(raw: bytes, kind: type[B], card: ModelCard, codec: Codec) -> Prepared[B]:
    """Parse, check and tokenise. Raises InvalidRequest, ContextTooLong or NotFound."""
    body = parse(raw, kind)
    check_model(body.model, card)
    token_ids = tuple(_tokens(body, codec))
    room = card.max_context - len(token_ids)
    sampling = body.sampling(room)
    if not token_ids:
        raise InvalidRequest("the prompt is empty", param=_prompt_field(body))
    if room < sampling.max_tokens:
        raise _too_long(body, len(token_ids), sampling.max_tokens, card)
    return Prepared(body, token_ids, sampling)


def parse(raw: bytes, kind: type[B]) -> B:
    """A validated body. Null means absent, as in OpenAI's API."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as err:
        raise InvalidRequest(f"the body is not valid JSON: {err}", code="invalid_json") from err
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    unknown = sorted(name for name in data if name not in kind.model_fields and name not in OFF)
    if unknown:
        raise InvalidRequest(
            f"unknown parameter: {', '.join(unknown)}",
            param=unknown[0],
            code="unknown_parameter",
        )
    given = {name: value for name, value in data.items() if value is not None}
    for name in OFF.keys() & given.keys():
        _check_off(name, given.pop(name))
    if given.get("n", 1) != 1:
        raise _unsupported("n", "only 1 is supported")
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


def _check_off(name: str, value: Any) -> None:
    if value not in OFF[name]:
        off = " or ".join(json.dumps(allowed) for allowed in OFF[name])
        raise _unsupported(name, f"only {off} is supported")


def _unsupported(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: {why}", param=name, code="unsupported_parameter")


def _tokens(body: ChatBody | CompletionBody, codec: Codec) -> list[int]:
    if isinstance(body, ChatBody):
        return codec.encode_chat([message.template_form() for message in body.messages])
    prompt = body.prompt
    if isinstance(prompt, str):
        return codec.encode(prompt)
    if prompt and isinstance(prompt[0], str):
        return codec.encode(prompt[0])
    return [token for token in prompt if isinstance(token, int)]


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
