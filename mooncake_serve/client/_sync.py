"""The synchronous client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

import httpx
import tenacity
from httpx_sse import EventSource

from mooncake_serve.client import _core
from mooncake_serve.client._async import AsyncClient
from mooncake_serve.client.batch import BatchReport, Job
from mooncake_serve.client.batch.report import OnProgress
from mooncake_serve.client.batch.run import CONCURRENCY, PATIENCE_S
from mooncake_serve.client.types import Chunk, Completion, Tokens


class Stream:
    """A streamed answer: iterate for chunks; `result()` drains what is left and returns it all.

    Leaving the `with` block early closes the connection, which cancels the request on the server.
    """

    def __init__(self, response: httpx.Response, started: float, url: str) -> None:
        self._response = response
        self._url = url
        self._assembly = _core.Assembly(response.headers, started)
        self._chunks = self._read()

    def _read(self) -> Iterator[Chunk]:
        try:
            for event in EventSource(self._response).iter_sse():
                if event.data == "[DONE]":
                    break
                chunk = self._assembly.feed(event.data)
                if chunk is not None:
                    yield chunk
        except httpx.TransportError as err:
            raise _core.connection_error(err, self._url) from err
        finally:
            self._response.close()

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def result(self) -> Completion:
        """The whole answer, once the rest of the stream has been read."""
        for _ in self._chunks:
            pass
        return self._assembly.completion()

    def close(self) -> None:
        """End the request."""
        self._response.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """A client of one server.

    >>> with Client() as client:
    ...     print(client.chat("Name a colour.", max_tokens=8).text)

    `base_url` defaults to `MOONCAKE_URL`, else http://127.0.0.1:8000; `api_key` to
    `MOONCAKE_API_KEY`. Every further keyword of `chat` and `complete` goes into the request's body
    (temperature, top_p, seed, stop, max_tokens). `timeout_s` bounds each silence of the server, not
    the whole answer. Raises APIStatusError, APIConnectionError or APITimeoutError; 429, 503 and
    lost connections are retried `max_retries` times, after the server's Retry-After, with jitter.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = _core.DEFAULT_TIMEOUT_S,
        max_retries: int = _core.DEFAULT_RETRIES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = _core.base_url(base_url)
        self._model = model
        self._twin: dict[str, Any] = {"api_key": api_key, "timeout_s": timeout_s}
        self._retry = tenacity.Retrying(**_core.retry_options(max_retries))
        self._http = httpx.Client(
            base_url=self.base_url,
            headers=_core.auth_headers(api_key),
            timeout=_core.timeouts(timeout_s),
            limits=_core.LIMITS,
            transport=transport,
        )

    def models(self) -> list[str]:
        """Names of the models the server offers."""
        return _core.models_from(self._retry(self._send, _core.Call("GET", "/v1/models")))

    def tokenize(self, text: str | Sequence[_core.Message], *, model: str | None = None) -> Tokens:
        """Token ids of a text, or of a conversation."""
        call = _core.tokenize_call(text, model or self._model)
        return _core.tokens_from(self._retry(self._send, call))

    def batch(
        self,
        jobs: Sequence[Job],
        *,
        output: str | Path | None = None,
        concurrency: int = CONCURRENCY,
        patience_s: float = PATIENCE_S,
        retry_failed: bool = False,
        on_progress: OnProgress | None = None,
    ) -> BatchReport:
        """Run many jobs, those that share a long beginning after one of them has computed it.

        `output` gets a line of OpenAI's batch format as each job ends; jobs that it holds already
        do not run again (`retry_failed` runs those that failed). At most `concurrency` run at
        once, fewer while the server refuses some. A server that is away is waited for, up to
        `patience_s` without any answer. Raises BatchError before anything is sent, APIError when
        patience ends; run it again to go on. Inside an event loop use `AsyncClient.batch`.
        """

        async def run() -> BatchReport:
            async with AsyncClient(self.base_url, model=self._model, **self._twin) as twin:
                return await twin.batch(
                    jobs,
                    output=output,
                    concurrency=concurrency,
                    patience_s=patience_s,
                    retry_failed=retry_failed,
                    on_progress=on_progress,
                )

        return asyncio.run(run())

    def metrics(self) -> str | None:
        """The server's metrics in Prometheus' text; None where only operators see them."""
        response = self._http.get("/metrics")
        return response.text if response.is_success else None

    def health(self) -> bool:
        """True when the server is up and can answer."""
        try:
            return self._http.get("/health").is_success
        except httpx.TransportError:
            return False

    @overload
    def chat(
        self,
        messages: Sequence[_core.Message] | str,
        *,
        stream: Literal[False] = False,
        model: str | None = None,
        explain: bool = False,
        replica: int | None = None,
        **options: Any,
    ) -> Completion: ...
    @overload
    def chat(
        self,
        messages: Sequence[_core.Message] | str,
        *,
        stream: Literal[True],
        model: str | None = None,
        explain: bool = False,
        replica: int | None = None,
        **options: Any,
    ) -> Stream: ...
    def chat(
        self,
        messages: Sequence[_core.Message] | str,
        *,
        stream: bool = False,
        model: str | None = None,
        explain: bool = False,
        replica: int | None = None,
        **options: Any,
    ) -> Completion | Stream:
        """Answer a conversation; a string is one user message."""
        call = _core.chat_call(
            messages,
            model or self._default_model(),
            options,
            stream=stream,
            explain=explain,
            replica=replica,
        )
        return self._generate(call, stream)

    @overload
    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[False] = False,
        model: str | None = None,
        explain: bool = False,
        replica: int | None = None,
        **options: Any,
    ) -> Completion: ...
    @overload
    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[True],
        model: str | None = None,
        explain: bool = False,
        replica: int | None = None,
        **options: Any,
    ) -> Stream: ...
    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        stream: bool = False,
        model: str | None = None,
        explain: bool = False,
        replica: int | None = None,
        **options: Any,
    ) -> Completion | Stream:
        """Continue a text, or a list of token ids."""
        call = _core.completion_call(
            prompt,
            model or self._default_model(),
            options,
            stream=stream,
            explain=explain,
            replica=replica,
        )
        return self._generate(call, stream)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _default_model(self) -> str:
        if self._model is None:
            self._model = _core.first_model(self.models())
        return self._model

    def _generate(self, call: _core.Call, stream: bool) -> Completion | Stream:
        started = time.perf_counter()
        if stream:
            response = self._retry(self._send, call, stream=True)
            return Stream(response, started, self.base_url)
        return _core.completion_from(self._retry(self._send, call))

    def _send(self, call: _core.Call, *, stream: bool = False) -> httpx.Response:
        request = self._http.build_request(
            call.method, call.path, json=call.body, headers=call.headers
        )
        try:
            response = self._http.send(request, stream=stream)
            if stream and not response.is_success:
                response.read()
        except httpx.TransportError as err:
            raise _core.connection_error(err, self.base_url) from err
        _core.raise_for_error(response)
        return response
