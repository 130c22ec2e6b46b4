"""Plots of one simulation, as PNG: TTFT distribution, hit rate and load imbalance over time.

Needs matplotlib, which nothing else here does; it is imported when a plot is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mooncake_serve.errors import ConfigError

WINDOWS = 60
"""Points of a curve over time."""


def windows(
    times: Sequence[float], values: Sequence[Sequence[float]]
) -> tuple[list[float], list[list[float]]]:
    """Sums of each of `values` over equal windows of time, and the windows' ends."""
    width = (max(times) or 1.0) / WINDOWS
    sums = [[0.0] * WINDOWS for _ in values]
    for at, time in enumerate(times):
        window = min(WINDOWS - 1, int(time / width))
        for total, column in zip(sums, values, strict=True):
            total[window] += column[at]
    return [(window + 1) * width for window in range(WINDOWS)], sums


def imbalance_over_time(series: Mapping[str, Sequence[float]], nodes: int) -> list[float]:
    """Most over mean work of the nodes in each window; 1 where nothing arrived."""
    columns = [
        [
            work if node == wanted else 0.0
            for work, node in zip(series["work_s"], series["node"], strict=True)
        ]
        for wanted in range(nodes)
    ]
    _, sums = windows(series["arrival_s"], columns)
    work = list(zip(*sums, strict=True))
    return [max(each) * nodes / sum(each) if sum(each) > 0 else 1.0 for each in work]


def plot(report: Mapping[str, Any], nodes: int, title: str, folder: Path) -> list[Path]:
    """Write the three plots into `folder`; their paths. The report must hold its series."""
    try:
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ConfigError("plots", "matplotlib is missing; pip install matplotlib") from err
    series = report["series"]
    if not series["ttft_s"]:
        raise ConfigError("plots", "no request was served; nothing to plot")
    folder.mkdir(parents=True, exist_ok=True)
    written = []

    def draw(name: str, xs: Sequence[float], ys: Sequence[float], x: str, y: str) -> None:
        figure = Figure(figsize=(7, 4))
        axes = figure.subplots()
        axes.plot(xs, ys)
        axes.set(xlabel=x, ylabel=y, title=title)
        axes.grid(alpha=0.3)
        figure.savefig(folder / name, dpi=120, bbox_inches="tight")
        written.append(folder / name)

    ttft = sorted(series["ttft_s"])
    shares = [(rank + 1) / len(ttft) for rank in range(len(ttft))]
    draw("ttft_cdf.png", ttft, shares, "time to first token, s", "share of requests")
    ends, (blocks, reused) = windows(series["arrival_s"], [series["blocks"], series["reused"]])
    rates = [hit / total if total else 0.0 for hit, total in zip(reused, blocks, strict=True)]
    draw("hit_rate.png", ends, rates, "time, s", "reused share of prompt blocks")
    uneven = imbalance_over_time(series, nodes)
    draw("imbalance.png", ends, uneven, "time, s", "most / mean work of the nodes")
    return written
