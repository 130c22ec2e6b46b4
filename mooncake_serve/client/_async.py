"""The asynchronous client: the same calls as `Client`, awaited."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, overload

import httpx
import tenacity
from httpx_sse import EventSource

from mooncake_serve.client import _core
from mooncake_serve.client.batch import BatchReport, Job
from mooncake_serve.client.batch.report import OnProgress
from mooncake_serve.client.batch.run import CONCURRENCY, PATIENCE_S, run_jobs
from mooncake_serve.client.types import Chunk, Completion, Tokens


class AsyncStream:
    """A streamed answer: iterate for chunks; `result()` drains what is left and returns it all.

    Leaving the `with` block early closes the connection, which cancels the request on the server.
    """

    def __init__(self, response: httpx.Response, started: float, url: str) -> None:
        self._response = response
        self._url = url
        self._assembly = _core.Assembly(response.headers, started)
        self._chunks = self._read()

    async def _read(self) -> AsyncIterator[Chunk]:
        try:
            async for event in EventSource(self._response).aiter_sse():
                if event.data == "[DONE]":
                    break
                chunk = self._assembly.feed(event.data)
                if chunk is not None:
                    yield chunk
        except httpx.TransportError as err:
            raise _core.connection_error(err, self._url) from err
        finally:
            await self._response.aclose()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self._chunks

    async def result(self) -> Completion:
        """The whole answer, once the rest of the stream has been read."""
        async for _ in self._chunks:
            pass
        return self._assembly.completion()

    async def close(self) -> None:
        """End the request."""
        await self._response.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClient:
    """A client of one server, for asyncio. Arguments and errors are those of `Client`.

    >>> async with AsyncClient() as client:
    ...     print((await client.chat("Name a colour.", max_tokens=8)).text)
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        model: str | None = None,
        timeout_s: float = _core.DEFAULT_TIMEOUT_S,
        max_retries: int = _core.DEFAULT_RETRIES,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = _core.base_url(base_url)
        self._model = model
        self._retry = tenacity.AsyncRetrying(**_core.retry_options(max_retries))
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers=_core.auth_headers(api_key),
            timeout=_core.timeouts(timeout_s),
            limits=_core.LIMITS,
            transport=transport,
        )

    async def models(self) -> list[str]:
        """Names of the models the server offers."""
        call = _core.Call("GET", "/v1/models")
        return _core.models_from(await self._retry(self._send, call))

    async def tokenize(
        self, text: str | Sequence[_core.Message], *, model: str | None = None
    ) -> Tokens:
        """Token ids of a text, or of a conversation."""
        call = _core.tokenize_call(text, model or self._model)
        return _core.tokens_from(await self._retry(self._send, call))

    async def batch(
        self,
        jobs: Sequence[Job],
        *,
        output: str | Path | None = None,
        concurrency: int = CONCURRENCY,
        patience_s: float = PATIENCE_S,
        retry_failed: bool = False,
        on_progress: OnProgress | None = None,
    ) -> BatchReport:
        """Run many jobs, those that share a long beginning after one of them has computed it."""
        return await run_jobs(
            jobs,
            self._send,
            self._default_model,
            output=Path(output) if output is not None else None,
            concurrency=concurrency,
            patience_s=patience_s,
            retry_failed=retry_failed,
            on_progress=on_progress,
        )

    async def metrics(self) -> str | None:
        """The server's metrics in Prometheus' text; None where only operators see them."""
        response = await self._http.get("/metrics")
        return response.text if response.is_success else None

    async def health(self) -> bool:
        """True when the server is up and can answer."""
        try:
            return (await self._http.get("/health")).is_success
        except httpx.TransportError:
            return False

    @overload
    async def chat(
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
    async def chat(
        self,
        messages: Sequence[_core.Message] | str,
        *,
        stream: Literal[True],
        model: str | None = None,
        explain: bool = False,
        replica: int | None = None,
        **options: Any,
    ) -> AsyncStream: ...
    async def chat(
        self,
        messages: Sequence[_core.Message] | str,
        *,
        stream: bool = False,
        model: str | None = None,
        explain: bool = False,
        replica: int | None = None,
        **options: Any,
    ) -> Completion | AsyncStream:
        """Answer a conversation; a string is one user message."""
        call = _core.chat_call(
            messages,
            model or await self._default_model(),
            options,
            stream=stream,
            explain=explain,
            replica=replica,
        )
        return await self._generate(call, stream)

    @overload
    async def complete(
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
    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[True],
        model: str | None = None,
        explain: bool = False,
        replica: int | None = None,
        **options: Any,
    ) -> AsyncStream: ...
    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        stream: bool = False,
        model: str | None = None,
        explain: bool = False,
        replica: int | None = None,
        **options: Any,
    ) -> Completion | AsyncStream:
        """Continue a text, or a list of token ids."""
        call = _core.completion_call(
            prompt,
            model or await self._default_model(),
            options,
            stream=stream,
            explain=explain,
            replica=replica,
        )
        return await self._generate(call, stream)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _default_model(self) -> str:
        if self._model is None:
            self._model = _core.first_model(await self.models())
        return self._model

    async def _generate(self, call: _core.Call, stream: bool) -> Completion | AsyncStream:
        started = time.perf_counter()
        if stream:
            response = await self._retry(self._send, call, stream=True)
            return AsyncStream(response, started, self.base_url)
        return _core.completion_from(await self._retry(self._send, call))

    async def _send(self, call: _core.Call, *, stream: bool = False) -> httpx.Response:
        request = self._http.build_request(
            call.method, call.path, json=call.body, headers=call.headers
        )
        try:
            response = await self._http.send(request, stream=stream)
            if stream and not response.is_success:
                await response.aread()
        except httpx.TransportError as err:
            raise _core.connection_error(err, self.base_url) from err
        _core.raise_for_error(response)
        return response
