"""What the sync and the async client share: requests, answers, errors and when to try again.

Nothing here does I/O. A call is a `Call`; `raise_for_error` turns an error response into the error
tree; `Assembly` folds the chunks of a stream into a `Completion`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import tenacity

from mooncake_serve.client.types import Chunk, Completion, TokenLogprob, Tokens, TokenUsage
from mooncake_serve.errors import APIConnectionError, APIError, APIStatusError, APITimeoutError

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
DEFAULT_RETRIES = 3
RETRY_AFTER_MAX_S = 60.0
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
"""A connection for every call at once: whoever calls bounds them, a hidden queue would not show."""

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request of ours."""

    method: str
    path: str
    body: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)


def base_url(url: str | None) -> str:
    """The server's address: the argument, `MOONCAKE_URL`, or this machine's port 8000."""
    return (url or os.environ.get("MOONCAKE_URL") or DEFAULT_URL).rstrip("/")


def timeouts(timeout_s: float) -> httpx.Timeout:
    """`timeout_s` bounds every silence of the server; whether it is there shows sooner."""
    return httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))


def auth_headers(api_key: str | None) -> dict[str, str]:
    """Headers of every call; the key comes from the argument or `MOONCAKE_API_KEY`."""
    key = api_key or os.environ.get("MOONCAKE_API_KEY")
    return {"authorization": f"Bearer {key}"} if key else {}


def chat_call(
    messages: Sequence[Message] | str,
    model: str | None,
    options: Mapping[str, Any],
    *,
    stream: bool,
    explain: bool = False,
    replica: int | None = None,
) -> Call:
    """A chat completion. A plain string is one user message."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {"messages": [dict(message) for message in messages], **options}
    return _generation("/v1/chat/completions", body, model, stream, explain, replica)


def completion_call(
    prompt: str | Sequence[int],
    model: str | None,
    options: Mapping[str, Any],
    *,
    stream: bool,
    explain: bool = False,
    replica: int | None = None,
) -> Call:
    """A text completion of a string or of token ids."""
    body = {"prompt": prompt if isinstance(prompt, str) else list(prompt), **options}
    return _generation("/v1/completions", body, model, stream, explain, replica)


def _generation(
    path: str,
    body: dict[str, Any],
    model: str | None,
    stream: bool,
    explain: bool,
    replica: int | None,
) -> Call:
    body["model"] = model
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    headers = {}
    if explain:
        headers["x-mooncake-explain"] = "1"
    if replica is not None:
        headers["x-mooncake-replica"] = str(replica)
    return Call("POST", path, body, headers)


def tokenize_call(
    text: str | Sequence[Message], model: str | None, tools: Sequence[Mapping[str, Any]] = ()
) -> Call:
    """Token ids of a text, or of a conversation through the model's chat template."""
    body: dict[str, Any] = {"prompt": text}
    if not isinstance(text, str):
        body = {"messages": [dict(message) for message in text]}
        if tools:
            body["tools"] = list(tools)
    if model is not None:
        body["model"] = model
    return Call("POST", "/tokenize", body)


def tokens_from(response: httpx.Response) -> Tokens:
    """The answer of `/tokenize`."""
    with _reading(response.headers):
        payload = response.json()
        return Tokens(tuple(payload["tokens"]), payload["max_model_len"])


def models_from(response: httpx.Response) -> list[str]:
    """Names in the answer of `/v1/models`."""
    with _reading(response.headers):
        return [model["id"] for model in response.json()["data"]]


def first_model(names: list[str]) -> str:
    """The model to ask when the caller named none."""
    if not names:
        raise APIError("the server offers no model; name one with `model=`")
    return names[0]


def completion_from(response: httpx.Response) -> Completion:
    """The answer in a response that was not streamed."""
    with _reading(response.headers):
        payload = response.json()
        choice = payload["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return Completion(
            text=text or "",
            finish_reason=choice["finish_reason"],
            usage=usage_from(payload.get("usage")),
            model=payload["model"],
            request_id=response.headers.get("x-request-id", payload["id"]),
            replica=replica_from(response.headers),
            logprobs=tuple(logprobs_from(choice)),
            raw=payload,
        )


@contextmanager
def _reading(headers: httpx.Headers) -> Iterator[None]:
    """Turn an answer of an unexpected shape into an APIError."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as err:
        raise APIError(
            "the answer is not of OpenAI's shape; is `base_url` that of a mooncake_serve server?",
            request_id=headers.get("x-request-id"),
        ) from err


def usage_from(usage: dict[str, Any] | None) -> TokenUsage:
    """Token counts, or zeros when the server sent none."""
    if not usage:
        return TokenUsage()
    details = usage.get("prompt_tokens_details") or {}
    return TokenUsage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=details.get("cached_tokens", 0),
    )


def logprobs_from(choice: dict[str, Any]) -> Iterator[TokenLogprob]:
    """Generated tokens with their log-probabilities, where the request asked for them."""
    report = choice.get("logprobs") or {}
    for entry in report.get("content") or ():
        yield TokenLogprob(entry["token"], entry["logprob"])
    if "tokens" in report:
        yield from map(TokenLogprob, report["tokens"], report["token_logprobs"])


def replica_from(headers: httpx.Headers) -> str | None:
    """The replica named in `x-mooncake-route`, a JSON object."""
    route = headers.get("x-mooncake-route")
    return str(json.loads(route)["replica"]) if route else None


class Assembly:
    """Folds the events of one stream into chunks and, at the end, a `Completion`."""

    def __init__(self, headers: httpx.Headers, started: float) -> None:
        self._headers = headers
        self._started = started
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None
        self._finish_reason: str | None = None
        self._ttft_s: float | None = None

    def feed(self, data: str) -> Chunk | None:
        """The chunk in one event's data, or None for an event without text."""
        with _reading(self._headers):
            event = json.loads(data)
            error = event.get("error")
            if error is None:
                return self._fold(event)
        raise error_from(error, status=500, headers=self._headers)

    def _fold(self, event: dict[str, Any]) -> Chunk | None:
        self._last = event
        self._usage = event.get("usage") or self._usage
        if not event["choices"]:
            return None
        choice = event["choices"][0]
        text = (choice["delta"].get("content") if "delta" in choice else choice.get("text")) or ""
        reason = choice.get("finish_reason")
        if text and self._ttft_s is None:
            self._ttft_s = time.perf_counter() - self._started
        self._text.append(text)
        self._logprobs.extend(logprobs_from(choice))
        self._finish_reason = reason or self._finish_reason
        return Chunk(text, reason, event) if text or reason else None

    def completion(self) -> Completion:
        """The whole answer; raises APIConnectionError when the stream ended before its time."""
        request_id = self._headers.get("x-request-id", "")
        if self._finish_reason is None:
            raise APIConnectionError(
                "the stream ended before the answer did; send the request again",
                request_id=request_id,
            )
        return Completion(
            text="".join(self._text),
            finish_reason=self._finish_reason,
            usage=usage_from(self._usage),
            model=self._last.get("model", ""),
            request_id=request_id,
            ttft_s=self._ttft_s,
            replica=replica_from(self._headers),
            logprobs=tuple(self._logprobs),
            raw=self._last,
        )


def raise_for_error(response: httpx.Response) -> None:
    """Raise APIStatusError for an error status. The body must have been read."""
    if response.is_success:
        return
    try:
        error = response.json()["error"]
        if not isinstance(error, dict):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        text = response.text.strip()[:500] or response.reason_phrase
        error = {"message": text}
    failure = error_from(error, status=response.status_code, headers=response.headers)
    failure.response = response
    raise failure


def error_from(error: dict[str, Any], *, status: int, headers: httpx.Headers) -> APIStatusError:
    """The error of OpenAI's envelope, by its status."""
    return APIStatusError.kind(status)(
        error.get("message") or "the server gave no reason",
        status=status,
        type=error.get("type"),
        param=error.get("param"),
        code=error.get("code"),
        request_id=headers.get("x-request-id"),
        retry_after_s=_seconds(headers.get("retry-after")),
    )


def connection_error(err: httpx.TransportError, url: str) -> APIConnectionError:
    """The transport's failure as ours."""
    if isinstance(err, httpx.TimeoutException):
        return APITimeoutError(f"no answer from {url} in time; raise `timeout_s`, or ask for less")
    detail = str(err) or type(err).__name__
    return APIConnectionError(f"cannot reach {url}: {detail}; is `make serve` running there?")


def retry_options(attempts: int) -> dict[str, Any]:
    """Settings for tenacity: which errors to retry, how long to wait, when to stop."""
    return {
        "retry": tenacity.retry_if_exception(_worth_retrying),
        "wait": _wait,
        "stop": tenacity.stop_after_attempt(attempts + 1),
        "reraise": True,
    }


def _worth_retrying(err: BaseException) -> bool:
    # A timeout may have cost the server minutes already: asking again would double the load.
    return isinstance(err, APIError) and err.retry and not isinstance(err, APITimeoutError)


_BACKOFF = tenacity.wait_random_exponential(multiplier=0.5, max=20)


def _wait(state: tenacity.RetryCallState) -> float:
    """Retry-After plus jitter where the server named it, exponential with jitter elsewhere."""
    err = state.outcome.exception() if state.outcome else None
    jittered = _BACKOFF(state)
    if isinstance(err, APIStatusError) and err.retry_after_s is not None:
        return min(err.retry_after_s, RETRY_AFTER_MAX_S) + min(jittered, 1.0)
    return jittered


def _seconds(value: str | None) -> float | None:
    try:
        return max(0.0, float(value)) if value else None
    except ValueError:
        return None
