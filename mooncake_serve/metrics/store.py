"""Metrics of a store, from its `stats()`, and of a process's view of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mooncake_serve.metrics.types import Distribution, Metric, Sample

LATENCY_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.05, 0.25, 1.0)
"""Bounds of the store's histograms: those of `store_rs/src/latency.rs`."""

# Replicas and ingress: their view of the node's store.
ATTACHED = Metric("mooncake_store_attached", "gauge", "1 while the node's store answers.")
UNRESPONSIVE = Metric(
    "mooncake_store_unresponsive_seconds", "gauge", "How long pings have gone unanswered."
)
CALLS_FAILED = Metric(
    "mooncake_store_calls_failed_total",
    "counter",
    "Store calls that became a miss: timeout, error, or skipped while detached.",
    ("reason",),
)
READ_BYTES = Metric(
    "mooncake_store_read_bytes_total", "counter", "Bytes read from the store and verified."
)
OFFERED = Metric(
    "mooncake_store_put_blocks_total",
    "counter",
    "Blocks offered to the store, by its answer.",
    ("result",),
)
ATTACHES = Metric(
    "mooncake_store_attaches_total", "counter", "Connections made to a store, the first included."
)

# The store itself: all tiers.
CAPACITY = Metric(
    "mooncake_store_capacity_bytes", "gauge", "What a tier may occupy at most.", ("tier",)
)
BYTES = Metric(
    "mooncake_store_bytes",
    "gauge",
    "A tier's bytes by state; in DRAM the states are disjoint and sum up to its capacity.",
    ("tier", "state"),
)
LOGICAL = Metric(
    "mooncake_store_logical_bytes", "gauge", "Blocks held, before encoding.", ("tier",)
)
BLOCKS = Metric("mooncake_store_blocks", "gauge", "Blocks held.", ("tier",))
PHYSICAL = Metric("mooncake_store_physical_bytes", "gauge", "What the blocks occupy.", ("tier",))
SAVED = Metric(
    "mooncake_store_saved_bytes", "gauge", "Bytes that sharing and encoding spare.", ("tier", "by")
)
LOST = Metric(
    "mooncake_store_lost_bytes",
    "gauge",
    "Bytes that hold no KV: headers, rounding, gaps too small for the largest block.",
    ("tier", "to"),
)
CODED = Metric(
    "mooncake_store_codec_bytes",
    "gauge",
    "Blocks held, by their codec: bytes before encoding, and bytes stored.",
    ("tier", "codec", "is"),
)
HITS = Metric(
    "mooncake_store_hits_total",
    "counter",
    "Blocks found for a reader, by the tier that had them.",
    ("tier",),
)
MOVED = Metric(
    "mooncake_store_moved_blocks_total", "counter", "Blocks that changed their tier.", ("to",)
)
TIER_READ = Metric(
    "mooncake_store_tier_read_bytes_total", "counter", "Bytes read from a tier.", ("tier",)
)
TIER_WRITTEN = Metric(
    "mooncake_store_tier_written_bytes_total", "counter", "Bytes written to a tier.", ("tier",)
)
TIER_ERRORS = Metric(
    "mooncake_store_tier_errors_total",
    "counter",
    "What a tier could not do; each became a miss.",
    ("tier", "kind"),
)

# The store itself: DRAM and clients.
DRAM = Metric("mooncake_store_dram_bytes", "gauge", "The cap: arena, ingest and index.")
INDEX = Metric("mooncake_store_index_bytes", "gauge", "Memory of the index.")
INGEST_FREE = Metric("mooncake_store_ingest_free_bytes", "gauge", "Left for put buffers.")
MEMORY = Metric(
    "mooncake_store_memory_bytes", "gauge", "Memory as the kernel counts it.", ("part",)
)
UPTIME = Metric("mooncake_store_uptime_seconds", "gauge", "Since the store started.")
LEASES = Metric("mooncake_store_leases", "gauge", "Blocks leased to clients.")
OLDEST_LEASE = Metric(
    "mooncake_store_oldest_lease_seconds", "gauge", "Age of the oldest lease; 0 without any."
)
SESSIONS = Metric("mooncake_store_sessions", "gauge", "Clients attached.")
MATCHES = Metric("mooncake_store_matches_total", "counter", "Prefix lookups.")
MATCHED = Metric("mooncake_store_matched_blocks_total", "counter", "Blocks found by them.")
LOOKUPS = Metric(
    "mooncake_store_lookups_total", "counter", "Blocks asked for, by outcome.", ("outcome",)
)
PUTS = Metric("mooncake_store_puts_total", "counter", "Blocks offered, by answer.", ("result",))
EVICTED = Metric(
    "mooncake_store_evictions_total", "counter", "Blocks that left, by reason.", ("reason",)
)
TRANSCODED = Metric(
    "mooncake_store_transcoded_blocks_total", "counter", "Blocks encoded anew in the background."
)
KEPT_FORM = Metric(
    "mooncake_store_transcode_kept_blocks_total",
    "counter",
    "Blocks left as they were, since the denser form takes no less of the arena.",
)
RECODED = Metric(
    "mooncake_store_nvme_recoded_blocks_total", "counter", "Blocks encoded anew for the disk."
)
PINNED = Metric("mooncake_store_pinned_blocks", "gauge", "Blocks pinned in memory.")
PINNED_BYTES = Metric(
    "mooncake_store_pinned_bytes", "gauge", "Bytes of pins that last until they are ended."
)
LANDED = Metric(
    "mooncake_store_landed_blocks_total", "counter", "Blocks that came from any tier below."
)
OPENED = Metric("mooncake_store_sessions_total", "counter", "Sessions opened.")
VIOLATIONS = Metric(
    "mooncake_store_violations_total", "counter", "Breaches of the protocol.", ("kind",)
)

# NVMe.
NVME_STATE = Metric(
    "mooncake_nvme_state", "gauge", "1 where it is so: serving, alert, full, io_uring.", ("is",)
)
NVME_READ_TIME = Metric(
    "mooncake_nvme_read_seconds",
    "histogram",
    "Of a block's read that ended well, from its order to its last byte.",
    (),
    LATENCY_S,
)
NVME_OFF = Metric("mooncake_nvme_switched_off_total", "counter", "Times it was taken out of use.")
NVME_RECOVERED = Metric(
    "mooncake_nvme_recovery", "gauge", "Of the start: blocks found, records left out.", ("of",)
)

# Peers and the cluster's index.
PEERS = Metric("mooncake_peers_connected", "gauge", "Other stores this one follows.")
PEER_BLOCKS = Metric(
    "mooncake_peer_blocks_total", "counter", "Blocks between stores, by outcome.", ("outcome",)
)
PEER_BYTES = Metric("mooncake_peer_bytes_total", "counter", "Bytes between stores.", ("direction",))
PEER_TROUBLE = Metric(
    "mooncake_peer_trouble_total", "counter", "Links lost, and snapshots taken anew.", ("kind",)
)
PEER_FETCH_TIME = Metric(
    "mooncake_peer_fetch_seconds",
    "histogram",
    "Of a block from another node, from the request to its last byte.",
    (),
    LATENCY_S,
)
PEER_SILENT = Metric(
    "mooncake_peer_silent_seconds", "gauge", "Since the quietest of the peers said something."
)
INDEX_LAG = Metric(
    "mooncake_index_lag_changes",
    "gauge",
    "Changes of this store's index that its slowest follower has not been sent.",
)
CLUSTER_NODES = Metric("mooncake_cluster_nodes", "gauge", "Nodes in the cluster's index.")
CLUSTER_ENTRIES = Metric("mooncake_cluster_entries", "gauge", "Blocks in the cluster's index.")
CLUSTER_BYTES = Metric("mooncake_cluster_index_bytes", "gauge", "Memory of that index.")
CLUSTER_REPLACED = Metric(
    "mooncake_cluster_replaced_total", "counter", "Entries that made room for others."
)

VALUES: Mapping[str, tuple[Metric, tuple[str, ...]]] = {
    "capacity_bytes": (CAPACITY, ("dram",)),
    "free_bytes": (BYTES, ("dram", "free")),
    "reserved_bytes": (BYTES, ("dram", "reserved")),
    "resident_bytes": (BYTES, ("dram", "resident")),
    "leased_bytes": (BYTES, ("dram", "leased")),
    "quarantined_bytes": (BYTES, ("dram", "quarantined")),
    "logical_bytes": (LOGICAL, ("dram",)),
    "physical_bytes": (PHYSICAL, ("dram",)),
    "shared_saved_bytes": (SAVED, ("dram", "sharing")),
    "codec_saved_bytes": (SAVED, ("dram", "codec")),
    "metadata_bytes": (LOST, ("dram", "metadata")),
    "rounding_bytes": (LOST, ("dram", "rounding")),
    "fragmented_bytes": (LOST, ("dram", "gaps")),
    "blocks": (BLOCKS, ("dram",)),
    "transcoded_blocks": (TRANSCODED, ()),
    "transcode_kept_blocks": (KEPT_FORM, ()),
    "dram_bytes": (DRAM, ()),
    "index_bytes": (INDEX, ()),
    "ingest_free_bytes": (INGEST_FREE, ()),
    "os_arena_bytes": (MEMORY, ("arena",)),
    "os_private_bytes": (MEMORY, ("private",)),
    "uptime_s": (UPTIME, ()),
    "leases": (LEASES, ()),
    "lease_oldest_us": (OLDEST_LEASE, ()),
    "sessions": (SESSIONS, ()),
    "match_calls": (MATCHES, ()),
    "matched_blocks": (MATCHED, ()),
    "lease_hits": (LOOKUPS, ("hit",)),
    "lease_hits_dram": (HITS, ("dram",)),
    "lease_misses": (LOOKUPS, ("miss",)),
    "puts_stored": (PUTS, ("stored",)),
    "puts_present": (PUTS, ("present",)),
    "refused_full": (PUTS, ("full",)),
    "refused_too_large": (PUTS, ("too_large",)),
    "refused_parent_absent": (PUTS, ("parent_absent",)),
    "refused_over_quota": (PUTS, ("over_quota",)),
    "pinned_blocks": (PINNED, ()),
    "pinned_bytes": (PINNED_BYTES, ()),
    "blocks_landed": (LANDED, ()),
    "evicted_to_nvme": (EVICTED, ("to_nvme",)),
    "evicted_for_room": (EVICTED, ("room",)),
    "evicted_on_request": (EVICTED, ("request",)),
    "corrupt_dropped": (EVICTED, ("corrupt",)),
    "sessions_opened": (OPENED, ()),
    "sessions_violated": (VIOLATIONS, ("session",)),
    "invalid_releases": (VIOLATIONS, ("release",)),
    "nvme_bytes": (CAPACITY, ("nvme",)),
    "nvme_recoded": (RECODED, ()),
    "nvme_live_bytes": (BYTES, ("nvme", "resident")),
    "nvme_allocated_bytes": (PHYSICAL, ("nvme",)),
    "nvme_blocks": (BLOCKS, ("nvme",)),
    "nvme_promoted": (MOVED, ("dram",)),
    "nvme_demoted": (MOVED, ("nvme",)),
    "nvme_dropped": (EVICTED, ("nvme_room",)),
    "nvme_read_bytes": (TIER_READ, ("nvme",)),
    "nvme_written_bytes": (TIER_WRITTEN, ("nvme",)),
    "nvme_read_misses": (TIER_ERRORS, ("nvme", "late_or_damaged")),
    "nvme_read_errors": (TIER_ERRORS, ("nvme", "read")),
    "nvme_write_errors": (TIER_ERRORS, ("nvme", "write")),
    "nvme_serving": (NVME_STATE, ("serving",)),
    "nvme_alert": (NVME_STATE, ("alert",)),
    "nvme_full": (NVME_STATE, ("full",)),
    "nvme_direct_io": (NVME_STATE, ("direct_io",)),
    "nvme_io_uring": (NVME_STATE, ("io_uring",)),
    "nvme_switched_off": (NVME_OFF, ()),
    "nvme_recovered_blocks": (NVME_RECOVERED, ("blocks",)),
    "nvme_recovery_ignored": (NVME_RECOVERED, ("ignored",)),
    "nvme_recovery_read_bytes": (NVME_RECOVERED, ("read_bytes",)),
    "nvme_recovery_failed_segments": (NVME_RECOVERED, ("failed_segments",)),
    "peers_connected": (PEERS, ()),
    "peer_silent_us": (PEER_SILENT, ()),
    "index_lag_changes": (INDEX_LAG, ()),
    "peer_fetched_blocks": (PEER_BLOCKS, ("fetched",)),
    "peer_sent_blocks": (PEER_BLOCKS, ("sent",)),
    "peer_absent_blocks": (PEER_BLOCKS, ("absent",)),
    "peer_corrupt_blocks": (PEER_BLOCKS, ("corrupt",)),
    "peer_fetched_bytes": (PEER_BYTES, ("in",)),
    "peer_sent_bytes": (PEER_BYTES, ("out",)),
    "peer_failures": (PEER_TROUBLE, ("failure",)),
    "peer_resyncs": (PEER_TROUBLE, ("resync",)),
    "cluster_nodes": (CLUSTER_NODES, ()),
    "cluster_entries": (CLUSTER_ENTRIES, ()),
    "cluster_bytes": (CLUSTER_BYTES, ()),
    "cluster_replaced": (CLUSTER_REPLACED, ()),
}
"""What each value of a store's `stats()` is called; a store without a tier lacks its values.

Values whose name ends in `_us` are microseconds, and become seconds."""

FOUND_BELOW = {"nvme_promoted": "nvme", "peer_fetched_blocks": "peer"}
"""Values that count what a tier below DRAM had for a reader."""

LATENCIES = {"nvme_read_us": NVME_READ_TIME, "peer_fetch_us": PEER_FETCH_TIME}
"""Histograms, by what the names of their values begin with."""

UNMETERED = frozenset(
    {"epoch", "pid", "tenants", "usage", "codec", "codec_why", "nvme_codec_why", "eviction", "node"}
)
"""Entries of `stats()` that identify or explain rather than measure, or have no bounded labels."""

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


def store_samples(stats: Mapping[str, Any]) -> Iterator[Sample]:
    """Samples of a store's `stats()`; a value without a metric is left out."""
    for name, (metric, labels) in VALUES.items():
        if name in stats:
            yield Sample(metric, labels, stats[name] * (1e-6 if name.endswith("_us") else 1))
    for name, tier in FOUND_BELOW.items():
        if name in stats:
            yield Sample(HITS, (tier,), stats[name])
    for name, metric in LATENCIES.items():
        if f"{name}_count" in stats:
            within = tuple(stats[f"{name}_le_{round(bound * 1e6)}"] for bound in metric.buckets)
            total = stats[f"{name}_sum"] * 1e-6
            yield Sample(metric, (), Distribution(within, stats[f"{name}_count"], total))
    yield from _codec_samples(stats.get("usage", ()))


def _codec_samples(usage: Iterable[Mapping[str, Any]]) -> Iterator[Sample]:
    """Bytes by codec, over all element types."""
    sums: dict[tuple[str, ...], float] = {}
    for row in usage:
        for form, value in (("raw", "logical_bytes"), ("stored", "physical_bytes")):
            labels = (row["tier"], row["codec"], form)
            sums[labels] = sums.get(labels, 0) + row[value]
    for labels, value in sums.items():
        yield Sample(CODED, labels, value)


def store_client_samples(stats: Mapping[str, Any]) -> Iterator[Sample]:
    """Samples of a process's `NodeStoreStats`, as a mapping."""
    yield Sample(ATTACHED, (), float(stats["healthy"]))
    yield Sample(UNRESPONSIVE, (), stats["seconds_unresponsive"])
    for reason in ("timeouts", "errors", "skipped"):
        yield Sample(CALLS_FAILED, (reason,), stats[reason])
    yield Sample(READ_BYTES, (), stats["read_bytes"])
    for result in ("stored", "present", "refused"):
        yield Sample(OFFERED, (result,), stats[f"{result}_blocks"])
    yield Sample(ATTACHES, (), stats["connects"])
