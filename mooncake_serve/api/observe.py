"""What the ingress sees of its requests, as metrics.

Names and meanings are in `mooncake_serve/metrics`. Everything is counted in the ingress's own
scrape, which costs a request microseconds. `samples` is what Ray's agent gets of it every few
seconds: all but what replicas report themselves. An `Observation` follows one request; leaving its
`with` block ends it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from mooncake_serve import metrics
from mooncake_serve.engine.protocol import Event, FinishEvent, TokenEvent, Usage
from mooncake_serve.errors import RequestError
from mooncake_serve.metrics import Metric, Sample
from mooncake_serve.prometheus import PrometheusSink

TOTALS: tuple[tuple[Metric, str], ...] = (
    (metrics.PROMPT_TOKENS, "prompt_tokens"),
    (metrics.GENERATED_TOKENS, "completion_tokens"),
    (metrics.POOL_QUERIES, "prompt_tokens"),
    (metrics.POOL_HITS, "cached_pool_tokens"),
    (metrics.STORE_HITS, "cached_store_tokens"),
)
"""Of each answer's usage: those of all replicas together."""
OF_REPLICAS = frozenset({metrics.RUNNING, *(metric for metric, _ in TOTALS)})
"""Each replica reports its own to Ray."""


class Observer:
    """The metrics of one application's ingress."""

    def __init__(self) -> None:
        self.scrape = PrometheusSink()
        self._running: dict[str, int] = {}

    def samples(self) -> Iterator[Sample]:
        """The metrics of requests and router, as they are now."""
        return (each for each in self.scrape.samples() if each.metric not in OF_REPLICAS)

    def observe(self, model: str, arrived: float) -> Observation:
        """Follow a request that came at `arrived`, by `time.perf_counter()`."""
        return Observation(self, model, arrived)

    def failed(self, status: int) -> None:
        """A request ended in an error: once for each, by `Frame`, or by its stream."""
        self.scrape.add(metrics.FAILED, labels=(str(status),))

    def count_running(self, model: str, change: int) -> None:
        """A request began or ended."""
        self._running[model] = self._running.get(model, 0) + change
        self.scrape.set(metrics.RUNNING, self._running[model], (model,))


class Observation:
    """One request. Each of its choices is an answer of its own."""

    def __init__(self, observer: Observer, model: str, arrived: float) -> None:
        self._observer = observer
        self._label = (model,)
        self._arrived = arrived
        self._first: float | None = None
        self._ended = False
        observer.count_running(model, 1)

    def events(self, events: Sequence[Event]) -> None:
        """These have arrived, together."""
        if self._first is None and isinstance(events[0], TokenEvent):
            self._first = time.perf_counter()
            self._observer.scrape.observe(metrics.TTFT, self._first - self._arrived, self._label)
        if isinstance(events[-1], FinishEvent):
            self._answered(events[-1])

    def failed(self, error: RequestError) -> None:
        """It ends in this error, after its answer began."""
        self._observer.failed(error.status)

    def end(self) -> None:
        """Nothing more will come. May be called again."""
        if not self._ended:
            self._ended = True
            self._observer.count_running(self._label[0], -1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()

    def _answered(self, event: FinishEvent) -> None:
        sink, usage, now = self._observer.scrape, event.usage, time.perf_counter()
        sink.add(metrics.FINISHED, labels=(*self._label, event.reason))
        sink.observe(metrics.LATENCY, now - self._arrived, self._label)
        sink.observe(metrics.PROMPT_LENGTH, usage.prompt_tokens, self._label)
        sink.observe(metrics.ANSWER_LENGTH, usage.completion_tokens, self._label)
        if self._first is not None and usage.completion_tokens > 1:
            between = (now - self._first) / (usage.completion_tokens - 1)
            sink.observe(metrics.TOKEN_TIME, between, self._label)
        self._count(usage)

    def _count(self, usage: Usage) -> None:
        for metric, field in TOTALS:
            self._observer.scrape.add(metric, getattr(usage, field), self._label)
