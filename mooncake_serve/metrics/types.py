"""What a metric is, and who takes values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric family, known by identity. Counters end in `_total`, times are seconds, sizes
    bytes."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending, without infinity."""


class Distribution(NamedTuple):
    """What a histogram has counted so far."""

    within: tuple[float, ...]
    """Of each of `metric.buckets`, how many observations do not exceed it."""
    observed: float
    total: float
    """Sum of all observations."""


class Sample(NamedTuple):
    """One value of a snapshot; `labels` in the order of `metric.labels`."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | Distribution
    """A Distribution if the metric is a histogram."""


class Sink(Protocol):
    """Takes values as they happen. Thread-safe; never raises for a value in range."""

    def add(self, metric: Metric, amount: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        """Increase a counter by `amount` > 0; 0 is ignored."""
        ...

    def set(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        """Set a gauge."""
        ...

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        """Count one observation of a histogram."""
        ...
