"""What a batch did: per job, in total, and while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mooncake_serve.client.batch.output import succeeded


@dataclass(frozen=True, slots=True)
class JobResult:
    """One job's outcome."""

    custom_id: str
    text: str | None
    """The answer; None where there is none."""
    error: str | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    seconds: float | None = None
    """From sending to the answer; None for a job of an earlier run."""
    seconds_saved: float | None = None
    """Prefill that the cached tokens would have cost, by the server's own measure; an estimate."""
    line: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The job's line of the output file."""


@dataclass(slots=True)
class BatchReport:
    """All jobs, in the order they were given."""

    jobs: list[JobResult]
    wall_s: float
    resumed: int = 0
    """Jobs that an earlier run had done."""

    @property
    def failed(self) -> list[JobResult]:
        """Jobs without an answer."""
        return [job for job in self.jobs if job.error is not None]

    @property
    def cached_share(self) -> float:
        """Cached prompt tokens of all prompt tokens."""
        prompt = sum(job.prompt_tokens for job in self.jobs)
        return sum(job.cached_tokens for job in self.jobs) / prompt if prompt else 0.0

    @property
    def seconds_saved(self) -> float:
        """Of all jobs of this run."""
        return sum(job.seconds_saved or 0.0 for job in self.jobs)


@dataclass(slots=True)
class Progress:
    """A batch under way."""

    total: int
    done: int = 0
    failed: int = 0
    resumed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    window: int = 0
    """Requests at once that the server takes now."""
    started_s: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_s(self) -> float:
        """Prompt and generated tokens of this run, a second."""
        elapsed = time.monotonic() - self.started_s
        return (self.prompt_tokens + self.completion_tokens) / elapsed if elapsed > 0 else 0.0

    @property
    def cached_share(self) -> float:
        """Of the prompt tokens of this run."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds left at this run's rate; None before the first answer."""
        fresh = self.done - self.resumed
        if fresh == 0:
            return None
        return (self.total - self.done) * (time.monotonic() - self.started_s) / fresh

    def add(self, result: JobResult) -> None:
        """A job of this run is done."""
        self.done += 1
        self.failed += result.error is not None
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens
        self.completion_tokens += result.completion_tokens


OnProgress = Callable[[Progress], None]


def result_of(
    line: Mapping[str, Any], seconds: float | None = None, prefill_s: float | None = None
) -> JobResult:
    """A job's outcome from its line; `prefill_s` is the server's cost of one token."""
    custom_id = line["custom_id"]
    if not succeeded(dict(line)):
        return JobResult(custom_id, None, _error(line), seconds=seconds, line=line)
    body = line["response"]["body"]
    choice = body["choices"][0]
    usage = body.get("usage") or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return JobResult(
        custom_id,
        choice["message"]["content"] if "message" in choice else choice["text"],
        None,
        usage.get("prompt_tokens", 0),
        cached,
        usage.get("completion_tokens", 0),
        seconds,
        None if prefill_s is None else cached * prefill_s,
        line,
    )


def _error(line: Mapping[str, Any]) -> str:
    if line["error"] is not None:
        return str(line["error"].get("message"))
    response = line["response"]
    body = response["body"] if isinstance(response["body"], Mapping) else {}
    message = (body.get("error") or {}).get("message", "no reason given")
    return f"{response['status_code']}: {message}"
