"""Write the Grafana dashboard from this table of panels; `--check` fails when it is out of date.

Queries use the names that Ray's agent exports (`mooncake_serve/ray_metrics.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "k8s" / "components" / "monitoring" / "mooncake.json"
WIDTH, HEIGHT, PER_ROW = 8, 7, 3


class Panel(NamedTuple):
    """A graph: what it shows, in which unit, from which queries by legend."""

    title: str
    unit: str
    queries: dict[str, str]


def rate(metric: str, by: str = "") -> str:
    """Per second, over the interval Grafana picks."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}[$__rate_interval]))"


def quantile(share: float, metric: str) -> str:
    """Of a histogram, over all processes."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', 'le')})"


def share(part: str, whole: str) -> str:
    """Of two rates."""
    return f"{rate(part)} / {rate(whole)}"


STORE = "ray_mooncake_store"
TTFT = "ray_vllm_time_to_first_token_seconds"
TOKEN = "ray_vllm_request_time_per_output_token_seconds"
ROUTE = "ray_mooncake_router_decision_seconds"
NVME = "ray_mooncake_nvme_read_seconds"
PEER = "ray_mooncake_peer_fetch_seconds"

ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel(
            "Time to first token",
            "s",
            {
                "median": quantile(0.5, TTFT),
                "p95": quantile(0.95, TTFT),
                "p99": quantile(0.99, TTFT),
            },
        ),
        Panel(
            "Time per token",
            "s",
            {"median": quantile(0.5, TOKEN), "p95": quantile(0.95, TOKEN)},
        ),
        Panel(
            "Ended",
            "reqps",
            {
                "{{finished_reason}}": rate("ray_vllm_request_success_total", "finished_reason"),
                "error {{status}}": rate("ray_mooncake_request_failures_total", "status"),
            },
        ),
    ],
    "Reuse": [
        Panel(
            "Prompt tokens not computed",
            "percentunit",
            {
                "pool": share(
                    "ray_vllm_prefix_cache_hits_total", "ray_vllm_prefix_cache_queries_total"
                ),
                "store": share(
                    "ray_vllm_external_prefix_cache_hits_total",
                    "ray_vllm_prefix_cache_queries_total",
                ),
            },
        ),
        Panel(
            "Prefill saved, in replicas kept free",
            "none",
            {"saved": rate("ray_mooncake_saved_prefill_seconds_total")},
        ),
        Panel(
            "Planned and found cached",
            "none",
            {
                "planned": rate("ray_mooncake_router_predicted_cached_tokens_total"),
                "found": rate("ray_mooncake_router_actual_cached_tokens_total"),
            },
        ),
    ],
    "Replicas": [
        Panel(
            "Running and waiting",
            "none",
            {
                "running {{replica}}": "ray_vllm_num_requests_running",
                "waiting {{replica}}": "ray_vllm_num_requests_waiting",
            },
        ),
        Panel("Pool in use", "percentunit", {"{{replica}}": "ray_vllm_kv_cache_usage_perc"}),
        Panel(
            "Tokens",
            "none",
            {
                "prompt": rate("ray_vllm_prompt_tokens_total"),
                "generated": rate("ray_vllm_generation_tokens_total"),
            },
        ),
    ],
    "Stores": [
        Panel(
            "Bytes by state",
            "bytes",
            {"{{tier}} {{state}}": f"sum by (tier, state) ({STORE}_bytes)"},
        ),
        Panel("Evictions", "none", {"{{reason}}": rate(f"{STORE}_evictions_total", "reason")}),
        Panel(
            "Calls that became a miss",
            "none",
            {"{{reason}}": rate(f"{STORE}_calls_failed_total", "reason")},
        ),
        Panel("Read", "Bps", {"read": rate(f"{STORE}_read_bytes_total")}),
        Panel(
            "Found, by tier",
            "none",
            {
                "{{tier}}": rate(f"{STORE}_hits_total", "tier"),
                "{{outcome}}": rate(f"{STORE}_lookups_total", "outcome"),
            },
        ),
        Panel(
            "Bytes by codec",
            "bytes",
            {"{{codec}} {{is}}": f"sum by (codec, is) ({STORE}_codec_bytes)"},
        ),
        Panel(
            "Leases and quarantine",
            "none",
            {
                "oldest lease, s": f"max({STORE}_oldest_lease_seconds)",
                "leases": f"sum({STORE}_leases)",
                "violations {{kind}}": rate(f"{STORE}_violations_total", "kind"),
            },
        ),
        Panel("Attached", "none", {"{{replica}}": f"{STORE}_attached"}),
        Panel(
            "Time to choose a replica",
            "s",
            {"median": quantile(0.5, ROUTE), "p99": quantile(0.99, ROUTE)},
        ),
    ],
    "Disks and peers": [
        Panel("Disk read", "s", {"median": quantile(0.5, NVME), "p99": quantile(0.99, NVME)}),
        Panel(
            "Disk bytes",
            "Bps",
            {
                "read": rate(f"{STORE}_tier_read_bytes_total"),
                "written": rate(f"{STORE}_tier_written_bytes_total"),
            },
        ),
        Panel("Disk", "none", {"{{is}}": "max by (is) (ray_mooncake_nvme_state)"}),
        Panel("Peer fetch", "s", {"median": quantile(0.5, PEER), "p99": quantile(0.99, PEER)}),
        Panel(
            "Bytes between nodes",
            "Bps",
            {"{{direction}}": rate("ray_mooncake_peer_bytes_total", "direction")},
        ),
        Panel(
            "Index lag",
            "none",
            {
                "changes not sent": "max(ray_mooncake_index_lag_changes)",
                "quietest peer, s": "max(ray_mooncake_peer_silent_seconds)",
            },
        ),
    ],
}


def dashboard() -> dict[str, Any]:
    """The whole document."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": top, "w": WIDTH * PER_ROW, "h": 1}
        panels.append({"type": "row", "title": title, "gridPos": place, "id": len(panels) + 1})
        top += 1
        for index, panel in enumerate(row):
            y = top + HEIGHT * (index // PER_ROW)
            place = {"x": WIDTH * (index % PER_ROW), "y": y, "w": WIDTH, "h": HEIGHT}
            panels.append(graph(panel, place, len(panels) + 1))
        top += HEIGHT * -(-len(row) // PER_ROW)
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "mooncake-serve",
        "title": "mooncake_serve",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


def graph(panel: Panel, place: dict[str, int], number: int) -> dict[str, Any]:
    """One time series panel."""
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = json.dumps(dashboard(), indent=1) + "\n"
    stale = not TARGET.is_file() or TARGET.read_text("utf-8") != text
    if stale:
        print(TARGET.relative_to(ROOT))
    if stale and not check:
        TARGET.write_text(text, "utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
