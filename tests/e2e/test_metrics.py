"""What Ray's metrics agent shows of a running application."""

from __future__ import annotations

from dataclasses import asdict

import httpx
import ray
from prometheus_client.parser import text_string_to_metric_families

from mooncake_serve import metrics
from mooncake_serve.metrics import serving, store
from mooncake_serve.ray_metrics import scraped_name
from mooncake_serve.store.node import NodeStoreStats
from tests.e2e.cluster import BLOCK_TOKENS, App
from tests.waiting import WAIT_S, eventually

PROMPT = "the same words again " * BLOCK_TOKENS


def scrape() -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and values by series name, from the agent of this node."""
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(httpx.get(url, timeout=WAIT_S).text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_engines_and_store_report_through_ray(app: App) -> None:
    for _ in range(2):
        assert app.post(PROMPT, replica=0).status_code == 200
    used = {sample.metric for sample in metrics.store_samples(app.store_stats())}
    used |= {sample.metric for sample in metrics.store_client_samples(asdict(NodeStoreStats()))}
    used |= {serving.RUNNING, serving.WAITING, serving.POOL_USAGE, serving.PROMPT_TOKENS}
    gauges = {metric for metric in used if metric.kind == "gauge"}

    def reported() -> bool:
        found = scrape()
        hits = found.get(scraped_name(serving.POOL_HITS), [])
        return not {scraped_name(m) for m in gauges} - set(found) and any(v > 0 for _, v in hits)

    eventually(reported)
    found = scrape()
    replicas = {labels["replica"] for labels, _ in found[scraped_name(serving.RUNNING)]}
    assert len(replicas) >= 2
    assert {labels["model_name"] for labels, _ in found[scraped_name(serving.RUNNING)]} == {"tiny"}
    states = {labels["state"] for labels, _ in found[scraped_name(store.BYTES)]}
    assert states == {"free", "reserved", "resident", "leased", "quarantined"}
    for metric in (serving.TTFT, serving.LATENCY, serving.ROUTE_TIME):
        name = f"{scraped_name(metric)}_count"
        eventually(lambda name=name: sum(v for _, v in scrape().get(name, ())) >= 2)
    ended = scraped_name(serving.FINISHED)
    eventually(lambda: sum(value for _, value in scrape().get(ended, ())) >= 2)
    prompts = sum(value for _, value in found[scraped_name(serving.PROMPT_TOKENS)])
    assert prompts >= 2 * len(PROMPT)
