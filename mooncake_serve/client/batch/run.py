"""Running jobs: grouped by shared prefix, a pilot first, then as many at once as the server takes.

A server that refuses or is away is waited for, up to `patience_s` without any answer; what it says
is wrong with a job is that job's outcome. A run that is cut off leaves an output that the next run
goes on from.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from mooncake_serve.client import _core
from mooncake_serve.client.batch.groups import group, prompt_text
from mooncake_serve.client.batch.jobs import Job
from mooncake_serve.client.batch.output import Output, answered
from mooncake_serve.client.batch.pace import Pace, run_groups
from mooncake_serve.client.batch.report import BatchReport, OnProgress, Progress, result_of
from mooncake_serve.errors import APIConnectionError, APIError, APIStatusError, BatchError

CONCURRENCY = 32
PATIENCE_S = 600.0
WAIT_MAX_S = 20.0
SERVER_ATTEMPTS = 3
"""Times a job may end in an error of the server's own (500, 504) before that is its outcome."""
EXPLAIN = {"x-mooncake-explain": "1"}

Send = Callable[[_core.Call], Awaitable[httpx.Response]]


async def run_jobs(
    jobs: Sequence[Job],
    send: Send,
    model: Callable[[], Awaitable[str]],
    *,
    output: Path | None = None,
    concurrency: int = CONCURRENCY,
    patience_s: float = PATIENCE_S,
    retry_failed: bool = False,
    on_progress: OnProgress | None = None,
) -> BatchReport:
    """Run all jobs that the output does not hold yet. Raises BatchError or APIError."""
    if len({job.custom_id for job in jobs}) < len(jobs):
        raise BatchError("two jobs have the same custom_id")
    with Output(output, retry_failed=retry_failed) as lines:
        run = _Run(jobs, send, lines, concurrency, patience_s, on_progress)
        if run.waiting and any("model" not in job.body for job in run.waiting):
            run.model = await model()
        return await run.to_the_end()


class _Run:
    def __init__(
        self,
        jobs: Sequence[Job],
        send: Send,
        output: Output,
        concurrency: int,
        patience_s: float,
        on_progress: OnProgress | None,
    ) -> None:
        self.model: str | None = None
        names = {job.custom_id for job in jobs}
        self._results = {
            line["custom_id"]: result_of(line)
            for line in output.lines
            if line["custom_id"] in names
        }
        self.waiting = [job for job in jobs if job.custom_id not in self._results]
        self._jobs = jobs
        self._send = send
        self._output = output
        self._concurrency = concurrency
        self._pace = Pace(concurrency)
        self._patience_s = patience_s
        self._heard_s = time.monotonic()
        self._on_progress = on_progress
        resumed = len(self._results)
        self._progress = Progress(len(jobs), done=resumed, resumed=resumed)

    async def to_the_end(self) -> BatchReport:
        started = time.monotonic()
        self._tell()
        groups = group([prompt_text(job.body) for job in self.waiting])
        members = [[self.waiting[position] for position in each.members] for each in groups]
        # Large groups first: at the end, small ones fill what the large leave free.
        members.sort(key=len, reverse=True)
        await run_groups(members, self._answer, self._concurrency)
        results = [self._results[job.custom_id] for job in self._jobs]
        return BatchReport(results, time.monotonic() - started, self._progress.resumed)

    async def _answer(self, job: Job) -> None:
        body = dict(job.body)
        if self.model is not None:
            body.setdefault("model", self.model)
        call = _core.Call("POST", job.url, body, EXPLAIN)
        async with self._pace.slot():
            sent = time.monotonic()
            response = await self._response(call)
            seconds = time.monotonic() - sent
        request_id = response.headers.get("x-request-id")
        line = answered(job.custom_id, response.status_code, request_id, _json(response))
        self._output.append(line)
        result = result_of(line, seconds, _prefill_s(response, line))
        self._results[job.custom_id] = result
        self._progress.add(result)
        self._tell()

    async def _response(self, call: _core.Call) -> httpx.Response:
        """The server's last word on a job."""
        broken = 0
        for attempt in range(1_000_000):
            started = time.monotonic()
            cause: APIError
            try:
                response = await self._send(call)
                self._pace.answered()
                self._heard_s = time.monotonic()
                return response
            except APIStatusError as err:
                if err.response is None:
                    raise
                ours = _is_envelope(err.response)
                broken += ours and err.status in (500, 502, 504)
                final = broken >= SERVER_ATTEMPTS if broken else not err.retry
                if ours and final:
                    self._heard_s = time.monotonic()
                    return err.response
                wait_s, cause = err.retry_after_s, err
            except APIConnectionError as err:
                wait_s, cause = None, err
            self._pace.refused(started)
            if time.monotonic() - self._heard_s > self._patience_s:
                raise cause
            backoff = min(WAIT_MAX_S, 0.25 * 2 ** min(attempt, 7)) * random.uniform(0.5, 1)
            await asyncio.sleep(max(backoff, min(wait_s or 0, WAIT_MAX_S)))
        raise AssertionError("unreachable: patience ends first")

    def _tell(self) -> None:
        self._progress.window = self._pace.window
        if self._on_progress is not None:
            self._on_progress(self._progress)


def _is_envelope(response: httpx.Response) -> bool:
    """Whether the server itself answers. A proxy says 404 or 502 in words of its own while the
    application behind it is away."""
    body = _json(response)
    error = body.get("error") if isinstance(body, dict) else None
    return isinstance(error, dict) and response.headers.get("content-type", "").startswith(
        "application/json"
    )


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return {"error": {"message": response.text[:500]}}


def _prefill_s(response: httpx.Response, line: dict[str, Any]) -> float | None:
    """What a token's prefill costs the server, from its plan of this request."""
    try:
        route = json.loads(response.headers["x-mooncake-route"])
        computed = line["response"]["body"]["usage"]["prompt_tokens"] - route["matched_tokens"]
        return float(route["prefill_s"]) / computed if computed > 0 else None
    except (KeyError, ValueError, TypeError):
        return None
