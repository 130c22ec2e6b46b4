"""Metrics through Ray's agent, which every Ray node already has and Prometheus already scrapes.

Ray allows no colon in a name and puts `ray_` before it: `vllm:num_requests_running` is scraped as
`ray_vllm_num_requests_running`, as vLLM itself is on Ray. A snapshot (an engine's, a store's) is
asked for every few seconds by a `Reporter`'s thread. Nothing here fails a request: a source that
raises is logged and asked again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, repeat

from ray.util.metrics import Counter, Gauge, Histogram

from mooncake_serve.metrics import Distribution, Metric, Sample

log = logging.getLogger(__name__)

PERIOD_S = 5.0
CLOSE_TIMEOUT_S = 5.0

Instrument = Counter | Gauge | Histogram


def ray_name(metric: Metric) -> str:
    """The name given to Ray, which adds `ray_` and, to counters, `_total`."""
    return metric.name.replace(":", "_").removesuffix("_total")


def scraped_name(metric: Metric) -> str:
    """The name Prometheus sees; a histogram's series end in `_bucket`, `_sum` and `_count`."""
    return f"ray_{ray_name(metric)}" + ("_total" if metric.kind == "counter" else "")


class RaySink:
    """Implements `Sink`. `fixed` are labels on every value, such as the replica's."""

    def __init__(self, fixed: dict[str, str] | None = None) -> None:
        self._fixed = fixed or {}
        self._instruments: dict[Metric, Instrument] = {}
        self._lock = threading.Lock()

    def add(self, metric: Metric, amount: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        """See Sink."""
        instrument = self._instrument(metric)
        assert isinstance(instrument, Counter), metric.name
        if amount > 0:
            instrument.inc(amount, tags=self._tags(metric, labels))

    def set(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        """See Sink."""
        instrument = self._instrument(metric)
        assert isinstance(instrument, Gauge), metric.name
        instrument.set(value, tags=self._tags(metric, labels))

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        """See Sink."""
        instrument = self._instrument(metric)
        assert isinstance(instrument, Histogram), metric.name
        instrument.observe(value, tags=self._tags(metric, labels))

    def _tags(self, metric: Metric, labels: tuple[str, ...]) -> dict[str, str]:
        return {**self._fixed, **dict(zip(metric.labels, labels, strict=True))}

    def _instrument(self, metric: Metric) -> Instrument:
        instrument = self._instruments.get(metric)
        if instrument is None:
            with self._lock:
                instrument = self._instruments.get(metric) or self._create(metric)
                self._instruments[metric] = instrument
        return instrument

    def _create(self, metric: Metric) -> Instrument:
        name, tags = ray_name(metric), (*self._fixed, *metric.labels)
        if metric.kind == "histogram":
            return Histogram(name, metric.help, boundaries=list(metric.buckets), tag_keys=tags)
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(name, metric.help, tag_keys=tags)


class Reporter:
    """Sends a source's samples to Ray until closed.

    Ray's counters only take increments. The first sample of a counter counts in full; one that
    went down started again, as a restarted store's does.
    """

    def __init__(
        self,
        sink: RaySink,
        source: Callable[[], Iterable[Sample]],
        *,
        period_s: float = PERIOD_S,
    ) -> None:
        self._sink = sink
        self._source = source
        self._period_s = period_s
        self._seen: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._counted: dict[tuple[Metric, tuple[str, ...]], Distribution] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Report once more, then end."""
        self._closed.set()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            ended = self._closed.wait(self._period_s)
            try:
                for sample in self._source():
                    self._report(sample)
            except Exception:
                log.exception("metrics of this period are missing")
            if ended:
                return

    def _report(self, sample: Sample) -> None:
        metric, labels, value = sample
        if isinstance(value, Distribution):
            before = self._counted.get((metric, labels))
            self._counted[metric, labels] = value
            for observed in observations(metric, value, before):
                self._sink.observe(metric, observed, labels)
            return
        if metric.kind == "gauge":
            self._sink.set(metric, value, labels)
            return
        before = self._seen.get((metric, labels), 0.0)
        self._seen[metric, labels] = value
        self._sink.add(metric, value - before if value >= before else value, labels)


def observations(
    metric: Metric, now: Distribution, before: Distribution | None = None
) -> Iterator[float]:
    """Values that change a histogram as it changed between two snapshots.

    Ray's histograms take one value at a time. Counts of the buckets come out exactly; within them
    every value lies at the same share, the one that makes the sum right as far as bounds allow.
    """
    if before is None or now.observed < before.observed:
        before = Distribution((0.0,) * len(now.within), 0.0, 0.0)
    grown = [a - b for a, b in zip(now.within, before.within, strict=True)]
    beyond = now.observed - before.observed - grown[-1]
    counts = [grown[0], *(b - a for a, b in pairwise(grown)), beyond]
    lows = (0.0, *metric.buckets)
    highs = (*metric.buckets, 2 * metric.buckets[-1])
    least = sum(count * low for count, low in zip(counts, lows, strict=True))
    room = sum(count * (h - low) for count, h, low in zip(counts, highs, lows, strict=True))
    # Never at a lower bound, which belongs to the bucket before.
    share = min(1.0, max(1e-6, (now.total - before.total - least) / room)) if room else 1.0
    for count, low, high in zip(counts, lows, highs, strict=True):
        yield from repeat(low + share * (high - low), int(count))
