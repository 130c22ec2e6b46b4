"""Metrics of the ingress, the router and the engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mooncake_serve.metrics.types import Metric, Sample

_MODEL = ("model_name",)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_MICROSECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 1e-2, 0.1)
_TOKENS = (1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 8192.0, 16384.0, 32768.0, 131072.0)

# Requests, counted by the ingress.
TTFT = Metric(
    "vllm:time_to_first_token_seconds",
    "histogram",
    "From the request's arrival to its first token.",
    _MODEL,
    _SECONDS,
)
TOKEN_TIME = Metric(
    "vllm:request_time_per_output_token_seconds",
    "histogram",
    "Mean time between the tokens of one answer.",
    _MODEL,
    _SECONDS,
)
LATENCY = Metric(
    "vllm:e2e_request_latency_seconds",
    "histogram",
    "From the request's arrival to its last token.",
    _MODEL,
    _SECONDS,
)
PROMPT_LENGTH = Metric(
    "vllm:request_prompt_tokens", "histogram", "Prompt tokens of a request.", _MODEL, _TOKENS
)
ANSWER_LENGTH = Metric(
    "vllm:request_generation_tokens",
    "histogram",
    "Generated tokens of a request.",
    _MODEL,
    _TOKENS,
)
FINISHED = Metric(
    "vllm:request_success_total",
    "counter",
    "Requests that ended with a finish reason.",
    (*_MODEL, "finished_reason"),
)
FAILED = Metric(
    "mooncake_request_failures_total",
    "counter",
    "Requests that ended in an error, by its HTTP status.",
    ("status",),
)
SAVED_PREFILL = Metric(
    "mooncake_saved_prefill_seconds_total",
    "counter",
    "Prefill time that cached tokens spared, at the measured cost of a token, less loading.",
    _MODEL,
)

# The router, in the ingress.
ROUTE_TIME = Metric(
    "mooncake_router_decision_seconds",
    "histogram",
    "Time to choose a replica: keys, index lookup, score.",
    (),
    _MICROSECONDS,
)
PREDICTED_CACHED = Metric(
    "mooncake_router_predicted_cached_tokens_total",
    "counter",
    "Prompt tokens the plan expected to find cached.",
)
ACTUAL_CACHED = Metric(
    "mooncake_router_actual_cached_tokens_total",
    "counter",
    "Prompt tokens of planned requests that were found cached.",
)
REROUTED = Metric(
    "mooncake_router_rerouted_total",
    "counter",
    "Requests that another replica than the planned one answered, by reason.",
    ("reason",),
)

# Replicas: the engine.
RUNNING = Metric("vllm:num_requests_running", "gauge", "Requests in the batch.", _MODEL)
WAITING = Metric("vllm:num_requests_waiting", "gauge", "Requests that wait for a place.", _MODEL)
POOL_USAGE = Metric(
    "vllm:kv_cache_usage_perc", "gauge", "Share of the pool's blocks in use; 1 is all.", _MODEL
)
PREEMPTIONS = Metric(
    "vllm:num_preemptions_total",
    "counter",
    "Requests that gave their blocks up for a time.",
    _MODEL,
)
PROMPT_TOKENS = Metric("vllm:prompt_tokens_total", "counter", "Prompt tokens taken in.", _MODEL)
GENERATED_TOKENS = Metric("vllm:generation_tokens_total", "counter", "Tokens generated.", _MODEL)
POOL_QUERIES = Metric(
    "vllm:prefix_cache_queries_total", "counter", "Prompt tokens looked for in the pool.", _MODEL
)
POOL_HITS = Metric(
    "vllm:prefix_cache_hits_total", "counter", "Prompt tokens found in the pool.", _MODEL
)
STORE_QUERIES = Metric(
    "vllm:external_prefix_cache_queries_total",
    "counter",
    "Prompt tokens looked for in the store, after the pool.",
    _MODEL,
)
STORE_HITS = Metric(
    "vllm:external_prefix_cache_hits_total",
    "counter",
    "Prompt tokens loaded from the store.",
    _MODEL,
)
PREFILL_BACKLOG = Metric(
    "mooncake_outstanding_prefill_tokens", "gauge", "Prompt tokens not yet computed.", _MODEL
)
PUBLISHED = Metric(
    "mooncake_published_blocks_total", "counter", "Blocks given to the store.", _MODEL
)

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


def engine_samples(stats: Mapping[str, Any], model: str) -> Iterator[Sample]:
    """Samples of a replica's `EngineStats`, as a mapping."""
    in_use = stats["pool_blocks"] - stats["pool_free_blocks"]
    values: Iterable[tuple[Metric, float]] = (
        (RUNNING, stats["running"]),
        (WAITING, stats["waiting"]),
        (POOL_USAGE, in_use / max(1, stats["pool_blocks"])),
        (PREEMPTIONS, stats["preemptions"]),
        (PROMPT_TOKENS, stats["prompt_tokens"]),
        (GENERATED_TOKENS, stats["generated_tokens"]),
        (POOL_QUERIES, stats["prompt_tokens"]),
        (POOL_HITS, stats["cached_pool_tokens"]),
        (STORE_QUERIES, stats["prompt_tokens"] - stats["cached_pool_tokens"]),
        (STORE_HITS, stats["cached_store_tokens"]),
        (PREFILL_BACKLOG, stats["outstanding_prefill_tokens"]),
        (PUBLISHED, stats["published_blocks"]),
    )
    for metric, value in values:
        yield Sample(metric, (model,), value)
