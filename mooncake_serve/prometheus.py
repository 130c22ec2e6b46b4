"""Metrics as a Prometheus scrape: one registry per `PrometheusSink`, nothing global.

Live values go into `prometheus_client`'s instruments; snapshots (an engine's, a store's) are asked
for at each scrape through `watch`, so they cost nothing in between. `samples` is a snapshot of the
live values, for another exporter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    start_http_server,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from mooncake_serve.metrics import Distribution, Metric, Sample

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Source = Callable[[], Iterable[Sample]]
Instrument = Counter | Gauge | Histogram
Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


FAMILIES: dict[str, type[Family]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class PrometheusSink:
    """Implements `Sink`, and renders what it was given."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._instruments: dict[Metric, Instrument] = {}
        self._labelled: dict[tuple[Metric, tuple[str, ...]], Instrument] = {}
        self._lock = threading.Lock()

    def add(self, metric: Metric, amount: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        """See Sink."""
        instrument = self._instrument(metric, labels)
        assert isinstance(instrument, Counter), metric.name
        if amount:
            instrument.inc(amount)

    def set(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        """See Sink."""
        instrument = self._instrument(metric, labels)
        assert isinstance(instrument, Gauge), metric.name
        instrument.set(value)

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        """See Sink."""
        instrument = self._instrument(metric, labels)
        assert isinstance(instrument, Histogram), metric.name
        instrument.observe(value)

    def watch(self, source: Source) -> None:
        """Include `source`'s samples in every scrape. Its metrics must not be set here as well."""
        self._registry.register(_Snapshot(source))

    def samples(self) -> Iterator[Sample]:
        """The live values of now; what `watch` was given is left out."""
        with self._lock:
            instruments = list(self._instruments.items())
        for metric, instrument in instruments:
            yield from _read(metric, instrument)

    def render(self) -> bytes:
        """The scrape, as `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    @contextmanager
    def serve(self, host: str, port: int) -> Iterator[int]:
        """Answer scrapes on a thread; yields the port, which 0 leaves to the kernel."""
        server, thread = start_http_server(port, addr=host, registry=self._registry)
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _instrument(self, metric: Metric, labels: tuple[str, ...]) -> Instrument:
        found = self._labelled.get((metric, labels))
        if found is not None:
            return found
        with self._lock:
            instrument = self._instruments.get(metric) or self._create(metric)
            self._instruments[metric] = instrument
            found = instrument.labels(*labels) if labels else instrument
            self._labelled[metric, labels] = found
        return found

    def _create(self, metric: Metric) -> Instrument:
        if metric.kind == "histogram":
            return Histogram(
                metric.name,
                metric.help,
                metric.labels,
                registry=self._registry,
                buckets=metric.buckets,
            )
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(metric.name, metric.help, metric.labels, registry=self._registry)


def _read(metric: Metric, instrument: Instrument) -> Iterator[Sample]:
    """What an instrument holds, by its labels."""
    within: dict[tuple[str, ...], list[float]] = {}
    totals: dict[tuple[str, ...], float] = {}
    for each in (sample for family in instrument.collect() for sample in family.samples):
        labels = tuple(each.labels[name] for name in metric.labels)
        if each.name == metric.name:
            yield Sample(metric, labels, each.value)
        elif each.name == f"{metric.name}_bucket":  # Ascending and cumulative, +Inf last.
            within.setdefault(labels, []).append(each.value)
        elif each.name == f"{metric.name}_sum":
            totals[labels] = each.value
    for labels, (*counts, observed) in within.items():
        yield Sample(metric, labels, Distribution(tuple(counts), observed, totals[labels]))


class _Snapshot:
    """A collector that asks `source` at each scrape."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def describe(self) -> list[CounterMetricFamily]:
        """Nothing: registering must not ask the source."""
        return []

    def collect(self) -> Iterator[Family]:
        """The families of one snapshot."""
        families: dict[Metric, Family] = {}
        for metric, labels, value in self._source():
            if metric not in families:
                families[metric] = FAMILIES[metric.kind](
                    metric.name, metric.help, labels=metric.labels
                )
            family = families[metric]
            if isinstance(family, HistogramMetricFamily):
                assert isinstance(value, Distribution), metric.name
                bounds = (*map(str, metric.buckets), "+Inf")
                counts = (*value.within, value.observed)
                family.add_metric(labels, list(zip(bounds, counts, strict=True)), value.total)
            else:
                assert not isinstance(value, Distribution), metric.name
                family.add_metric(labels, value)
        yield from families.values()


def render_samples(samples: Iterable[Sample]) -> bytes:
    """One snapshot as a scrape."""
    sink = PrometheusSink()
    kept = list(samples)
    sink.watch(lambda: kept)
    return sink.render()
