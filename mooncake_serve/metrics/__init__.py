"""Every metric the product exports: its name, meaning, labels, and where its value comes from.

Names follow vLLM (`vllm:…`) where the meaning is the same, so that dashboards people have keep
working; the rest is `mooncake_…`. Label values come from closed sets or from the deployment, never
from requests. Exporters differ (`prometheus.py` answers scrapes, `ray_metrics.py` feeds Ray's
agent), definitions do not: both take a `Metric` from here, live through a `Sink` or as `Sample`s
made from a snapshot.
"""

from __future__ import annotations

from mooncake_serve.metrics import serving, store
from mooncake_serve.metrics.serving import (
    ACTUAL_CACHED,
    ANSWER_LENGTH,
    FAILED,
    FINISHED,
    GENERATED_TOKENS,
    LATENCY,
    POOL_HITS,
    POOL_QUERIES,
    POOL_USAGE,
    PREDICTED_CACHED,
    PREEMPTIONS,
    PREFILL_BACKLOG,
    PROMPT_LENGTH,
    PROMPT_TOKENS,
    PUBLISHED,
    REROUTED,
    ROUTE_TIME,
    RUNNING,
    SAVED_PREFILL,
    STORE_HITS,
    STORE_QUERIES,
    TOKEN_TIME,
    TTFT,
    WAITING,
    engine_samples,
)
from mooncake_serve.metrics.store import store_client_samples, store_samples
from mooncake_serve.metrics.types import Distribution, Metric, Sample, Sink

METRICS: tuple[Metric, ...] = (*serving.METRICS, *store.METRICS)
"""All of them."""

__all__ = [
    "ACTUAL_CACHED",
    "ANSWER_LENGTH",
    "FAILED",
    "FINISHED",
    "GENERATED_TOKENS",
    "LATENCY",
    "METRICS",
    "POOL_HITS",
    "POOL_QUERIES",
    "POOL_USAGE",
    "PREDICTED_CACHED",
    "PREEMPTIONS",
    "PREFILL_BACKLOG",
    "PROMPT_LENGTH",
    "PROMPT_TOKENS",
    "PUBLISHED",
    "REROUTED",
    "ROUTE_TIME",
    "RUNNING",
    "SAVED_PREFILL",
    "STORE_HITS",
    "STORE_QUERIES",
    "TOKEN_TIME",
    "TTFT",
    "WAITING",
    "Distribution",
    "Metric",
    "Sample",
    "Sink",
    "engine_samples",
    "serving",
    "store",
    "store_client_samples",
    "store_samples",
]
