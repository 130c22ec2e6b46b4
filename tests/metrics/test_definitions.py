"""The table of metrics is well-formed, and covers what the store and the engine count."""

from __future__ import annotations

import re
import tempfile
import urllib.request
from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from mooncake_serve import metrics
from mooncake_serve.engine.protocol import EngineStats
from mooncake_serve.metrics import METRICS, Metric, Sample
from mooncake_serve.metrics.serving import FINISHED, ROUTE_TIME, RUNNING, TTFT
from mooncake_serve.metrics.store import (
    FOUND_BELOW,
    LATENCIES,
    LEASES,
    MATCHES,
    UNMETERED,
    VALUES,
)
from mooncake_serve.prometheus import PrometheusSink, render_samples
from mooncake_serve.store import StoreServer
from mooncake_serve.store.node import NodeStoreStats

MIB = 1 << 20


def values(scrape: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(scrape.decode())
        for sample in family.samples
    }


def test_names_follow_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"(vllm:|mooncake_)[a-z0-9_]+", metric.name), metric.name
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert (metric.kind == "histogram") == bool(metric.buckets), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert metric.help.endswith("."), metric.name


def test_no_label_comes_from_a_request() -> None:
    """A label whose values callers choose would grow without bound."""
    labels = {label for metric in METRICS for label in metric.labels}
    assert labels <= {"model_name", "finished_reason", "status", "reason", "result"} | {
        "tier",
        "state",
        "outcome",
        "kind",
        "part",
        "by",
        "to",
        "of",
        "is",
        "direction",
        "codec",
    }


def test_every_value_of_a_store_has_a_name() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="mk-") as folder,
        StoreServer(socket=Path(folder) / "s", dram_bytes=16 * MIB) as server,
    ):
        stats = server.stats()
    timed = {
        f"{name}_{part}"
        for name, metric in LATENCIES.items()
        for part in ("count", "sum", *(f"le_{bound * 1e6:.0f}" for bound in metric.buckets))
    }
    unnamed = set(stats) - set(VALUES) - timed - UNMETERED
    assert not unnamed, "give each a Metric in mooncake_serve/metrics/store.py"
    scraped = values(render_samples(metrics.store_samples(stats)))
    series = sum(len(metric.buckets) + 3 for metric in LATENCIES.values())
    single = len(set(VALUES) & set(stats)) + len(FOUND_BELOW)
    assert len(scraped) == single + series
    assert scraped["mooncake_store_capacity_bytes", (("tier", "dram"),)] == stats["capacity_bytes"]
    tiers = [
        value
        for (name, labels), value in scraped.items()
        if name == "mooncake_store_bytes" and "dram" in dict(labels).values()
    ]
    assert sum(tiers) == stats["capacity_bytes"]


def test_every_metric_is_given_values() -> None:
    """Each is used by code, and not only defined and listed for import."""
    package = Path(metrics.__file__).parent
    used: Counter[str] = Counter()
    for path in package.parent.rglob("*.py"):
        if path != package / "__init__.py":
            used.update(re.findall(r"\b[A-Z][A-Z_]+\b", path.read_text("utf-8")))
    names = {
        name
        for module in (metrics.serving, metrics.store)
        for name, value in vars(module).items()
        if isinstance(value, Metric)
    }
    assert len(names) == len(METRICS)
    assert not {name for name in names if used[name] < 2}


def test_an_engine_snapshot() -> None:
    numbers = {field.name: n for n, field in enumerate(fields(EngineStats), start=1)}
    stats = EngineStats(**{**numbers, "pool_blocks": 10, "pool_free_blocks": 4})
    scraped = values(render_samples(metrics.engine_samples(asdict(stats), "tiny")))
    label = (("model_name", "tiny"),)
    assert scraped["vllm:num_requests_running", label] == stats.running
    assert scraped["vllm:kv_cache_usage_perc", label] == 0.6
    assert scraped["vllm:prompt_tokens_total", label] == stats.prompt_tokens


def test_a_client_snapshot() -> None:
    stats = NodeStoreStats(healthy=True, timeouts=3, stored_blocks=7)
    scraped = values(render_samples(metrics.store_client_samples(asdict(stats))))
    assert scraped["mooncake_store_attached", ()] == 1
    assert scraped["mooncake_store_calls_failed_total", (("reason", "timeouts"),)] == 3
    assert scraped["mooncake_store_put_blocks_total", (("result", "stored"),)] == 7


def test_live_values_and_snapshots_share_a_scrape() -> None:
    sink = PrometheusSink()
    sink.add(FINISHED, labels=("tiny", "stop"))
    sink.add(FINISHED, 2, ("tiny", "stop"))
    sink.observe(TTFT, 0.03, ("tiny",))
    sink.set(RUNNING, 4, ("tiny",))
    counted = iter(range(1, 100))
    sink.watch(lambda: [Sample(MATCHES, (), next(counted))])
    sink.render()
    scraped = values(sink.render())
    assert scraped["mooncake_store_matches_total", ()] == 2
    finished = (("finished_reason", "stop"), ("model_name", "tiny"))
    assert scraped["vllm:request_success_total", finished] == 3
    below = (("le", "0.05"), ("model_name", "tiny"))
    assert scraped["vllm:time_to_first_token_seconds_bucket", below] == 1
    assert scraped["vllm:num_requests_running", (("model_name", "tiny"),)] == 4


def test_live_values_as_samples_say_the_same() -> None:
    sink = PrometheusSink()
    sink.add(FINISHED, 2, ("tiny", "stop"))
    sink.add(FINISHED, 1, ("tiny", "length"))
    sink.set(LEASES, 6)
    for value in (0.003, 0.03, 0.04, 1e9):
        sink.observe(TTFT, value, ("tiny",))
    sink.observe(ROUTE_TIME, 1e-4)
    sink.watch(lambda: [Sample(MATCHES, (), 1.0)])
    told = values(render_samples(sink.samples()))
    scraped = values(sink.render())
    del scraped["mooncake_store_matches_total", ()]
    assert told == {key: value for key, value in scraped.items() if "_created" not in key[0]}


def test_a_server_answers_scrapes() -> None:
    sink = PrometheusSink()
    sink.set(LEASES, 6)
    with sink.serve("127.0.0.1", 0) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert b"mooncake_store_leases 6.0" in answer.read()
