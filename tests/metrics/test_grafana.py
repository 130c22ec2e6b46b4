"""The Grafana dashboard asks only for metrics that the running application exports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

from mooncake_serve.metrics import METRICS
from mooncake_serve.ray_metrics import scraped_name
from tests.docs.blocks import ROOT

DASHBOARD = ROOT / "k8s" / "components" / "monitoring" / "mooncake.json"
WORDS = re.compile(r"\bray_\w+")
PARTS = ("_bucket", "_sum", "_count")


def queries() -> list[str]:
    document: dict[str, Any] = json.loads(DASHBOARD.read_text("utf-8"))
    return [target["expr"] for panel in document["panels"] for target in panel.get("targets", [])]


def exported() -> set[str]:
    """Series names of every metric of the product, as Ray's agent shows them."""
    plain = {scraped_name(metric) for metric in METRICS if metric.kind != "histogram"}
    histograms = {scraped_name(metric) for metric in METRICS if metric.kind == "histogram"}
    return plain | {name + part for name in histograms for part in PARTS}


def test_every_query_names_an_exported_metric() -> None:
    asked = {name for query in queries() for name in WORDS.findall(query)}
    assert len(asked) > 20
    assert not asked - exported()


def test_queries_group_by_labels_that_exist() -> None:
    labels = {scraped_name(metric): set(metric.labels) for metric in METRICS}
    for query in queries():
        grouped = re.search(r"by \(([^)]+)\)", query)
        wanted = set(grouped[1].replace(" ", "").split(",")) - {"le"} if grouped else set()
        (name,) = set(WORDS.findall(query)) if wanted else {""}
        assert wanted <= labels.get(name, set()), query


def test_it_is_up_to_date() -> None:
    command = [sys.executable, ROOT / "scripts" / "grafana.py", "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, f"run `make manifests`: {ran.stdout}"
