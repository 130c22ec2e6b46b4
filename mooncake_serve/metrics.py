"""Every metric the product exports: its name, meaning, labels, and where its value comes from.

Names follow vLLM (`vllm:…`) where the meaning is the same, so that dashboards people have keep
working; the rest is `mooncake_…`. Label values come from closed sets or from the deployment, never
from requests. Exporters differ (`prometheus.py` answers scrapes, `ray_metrics.py` feeds Ray's
agent), definitions do not: both take a `Metric` from here, live through a `Sink` or as `Sample`s
made from a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. Counters end in `_total`, times are seconds, sizes bytes."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, ascending, without infinity."""


class Sample(NamedTuple):
    """One value of a snapshot; `labels` in the order of `metric.labels`."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


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


class Tee:
    """A sink that passes everything to several."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def add(self, metric: Metric, amount: float = 1.0, labels: tuple[str, ...] = ()) -> None:
        """See Sink."""
        for sink in self._sinks:
            sink.add(metric, amount, labels)

    def set(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        """See Sink."""
        for sink in self._sinks:
            sink.set(metric, value, labels)

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        """See Sink."""
        for sink in self._sinks:
            sink.observe(metric, value, labels)


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

# Replicas and ingress: their view of the node's store.
STORE_ATTACHED = Metric("mooncake_store_attached", "gauge", "1 while the node's store answers.")
STORE_UNRESPONSIVE = Metric(
    "mooncake_store_unresponsive_seconds", "gauge", "How long pings have gone unanswered."
)
STORE_CALLS_FAILED = Metric(
    "mooncake_store_calls_failed_total",
    "counter",
    "Store calls that became a miss: timeout, error, or skipped while detached.",
    ("reason",),
)
STORE_READ_BYTES = Metric(
    "mooncake_store_read_bytes_total", "counter", "Bytes read from the store and verified."
)
STORE_PUT_BLOCKS = Metric(
    "mooncake_store_put_blocks_total",
    "counter",
    "Blocks offered to the store, by its answer.",
    ("result",),
)
STORE_ATTACHES = Metric(
    "mooncake_store_attaches_total", "counter", "Connections made to a store, the first included."
)

# The store itself.
STORE_CAPACITY = Metric(
    "mooncake_store_capacity_bytes", "gauge", "What a tier may occupy at most.", ("tier",)
)
STORE_BYTES = Metric(
    "mooncake_store_bytes",
    "gauge",
    "A tier's bytes by state; the states are disjoint and sum up to its capacity.",
    ("tier", "state"),
)
STORE_LOGICAL = Metric(
    "mooncake_store_logical_bytes", "gauge", "Blocks held, before encoding.", ("tier",)
)
STORE_SAVED = Metric(
    "mooncake_store_saved_bytes",
    "gauge",
    "What would be stored besides without sharing between processes, and without the codec.",
    ("tier", "kind"),
)
STORE_OVERHEAD = Metric(
    "mooncake_store_overhead_bytes",
    "gauge",
    "Block headers, rounding of extents, and free bytes outside the largest free extent.",
    ("tier", "kind"),
)
STORE_PHYSICAL = Metric(
    "mooncake_store_physical_bytes", "gauge", "Extents that hold blocks.", ("tier",)
)
STORE_OS = Metric(
    "mooncake_store_os_bytes", "gauge", "As the kernel counts them: arena, other memory.", ("kind",)
)
STORE_TRANSCODED = Metric(
    "mooncake_store_transcoded_blocks_total", "counter", "Idle blocks stored anew in dense form."
)
STORE_DRAM = Metric("mooncake_store_dram_bytes", "gauge", "The cap: arena, ingest and index.")
STORE_INGEST_FREE = Metric("mooncake_store_ingest_free_bytes", "gauge", "Left for put buffers.")
STORE_UPTIME = Metric("mooncake_store_uptime_seconds", "gauge", "Since the store started.")
STORE_INDEX = Metric("mooncake_store_index_bytes", "gauge", "Memory of the index.")
STORE_BLOCKS = Metric("mooncake_store_blocks", "gauge", "Blocks held.", ("tier",))
STORE_LEASES = Metric("mooncake_store_leases", "gauge", "Blocks leased to clients.")
STORE_SESSIONS = Metric("mooncake_store_sessions", "gauge", "Clients attached.")
STORE_MATCHES = Metric("mooncake_store_matches_total", "counter", "Prefix lookups.")
STORE_MATCHED = Metric("mooncake_store_matched_blocks_total", "counter", "Blocks found by them.")
STORE_LEASED = Metric(
    "mooncake_store_lookups_total", "counter", "Blocks asked for, by outcome.", ("outcome",)
)
STORE_PUTS = Metric(
    "mooncake_store_puts_total", "counter", "Blocks offered, by answer.", ("result",)
)
STORE_EVICTED = Metric(
    "mooncake_store_evictions_total", "counter", "Blocks that left, by reason.", ("reason",)
)
STORE_OPENED = Metric("mooncake_store_sessions_total", "counter", "Sessions opened.")
STORE_VIOLATIONS = Metric(
    "mooncake_store_violations_total", "counter", "Breaches of the protocol.", ("kind",)
)

STORE_VALUES: Mapping[str, tuple[Metric, tuple[str, ...]]] = {
    "capacity_bytes": (STORE_CAPACITY, ("dram",)),
    "free_bytes": (STORE_BYTES, ("dram", "free")),
    "reserved_bytes": (STORE_BYTES, ("dram", "reserved")),
    "resident_bytes": (STORE_BYTES, ("dram", "resident")),
    "leased_bytes": (STORE_BYTES, ("dram", "leased")),
    "quarantined_bytes": (STORE_BYTES, ("dram", "quarantined")),
    "logical_bytes": (STORE_LOGICAL, ("dram",)),
    "shared_saved_bytes": (STORE_SAVED, ("dram", "sharing")),
    "codec_saved_bytes": (STORE_SAVED, ("dram", "codec")),
    "metadata_bytes": (STORE_OVERHEAD, ("dram", "metadata")),
    "rounding_bytes": (STORE_OVERHEAD, ("dram", "rounding")),
    "fragmented_bytes": (STORE_OVERHEAD, ("dram", "fragmentation")),
    "physical_bytes": (STORE_PHYSICAL, ("dram",)),
    "os_arena_bytes": (STORE_OS, ("arena",)),
    "os_private_bytes": (STORE_OS, ("private",)),
    "transcoded_blocks": (STORE_TRANSCODED, ()),
    "blocks": (STORE_BLOCKS, ("dram",)),
    "dram_bytes": (STORE_DRAM, ()),
    "index_bytes": (STORE_INDEX, ()),
    "ingest_free_bytes": (STORE_INGEST_FREE, ()),
    "uptime_s": (STORE_UPTIME, ()),
    "leases": (STORE_LEASES, ()),
    "sessions": (STORE_SESSIONS, ()),
    "match_calls": (STORE_MATCHES, ()),
    "matched_blocks": (STORE_MATCHED, ()),
    "lease_hits": (STORE_LEASED, ("hit",)),
    "lease_misses": (STORE_LEASED, ("miss",)),
    "puts_stored": (STORE_PUTS, ("stored",)),
    "puts_present": (STORE_PUTS, ("present",)),
    "refused_full": (STORE_PUTS, ("full",)),
    "refused_too_large": (STORE_PUTS, ("too_large",)),
    "refused_parent_absent": (STORE_PUTS, ("parent_absent",)),
    "evicted_for_room": (STORE_EVICTED, ("room",)),
    "evicted_on_request": (STORE_EVICTED, ("request",)),
    "corrupt_dropped": (STORE_EVICTED, ("corrupt",)),
    "sessions_opened": (STORE_OPENED, ()),
    "sessions_violated": (STORE_VIOLATIONS, ("session",)),
    "invalid_releases": (STORE_VIOLATIONS, ("release",)),
}
"""What each value of a store's `stats()` is called."""

STORE_UNMETERED = frozenset({"epoch", "pid", "tenants", "codec", "codec_why", "usage"})
"""Entries of `stats()` that identify rather than measure, or whose labels have no bound."""

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)
"""All of them, in the order above."""


def store_samples(stats: Mapping[str, Any]) -> Iterator[Sample]:
    """Samples of a store's `stats()`; a value without a metric is left out."""
    for name, (metric, labels) in STORE_VALUES.items():
        if name in stats:
            yield Sample(metric, labels, stats[name])


def store_client_samples(stats: Mapping[str, Any]) -> Iterator[Sample]:
    """Samples of a process's `NodeStoreStats`, as a mapping."""
    yield Sample(STORE_ATTACHED, (), float(stats["healthy"]))
    yield Sample(STORE_UNRESPONSIVE, (), stats["seconds_unresponsive"])
    for reason in ("timeouts", "errors", "skipped"):
        yield Sample(STORE_CALLS_FAILED, (reason,), stats[reason])
    yield Sample(STORE_READ_BYTES, (), stats["read_bytes"])
    for result in ("stored", "present", "refused"):
        yield Sample(STORE_PUT_BLOCKS, (result,), stats[f"{result}_blocks"])
    yield Sample(STORE_ATTACHES, (), stats["connects"])


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
