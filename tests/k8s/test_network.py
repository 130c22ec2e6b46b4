"""Who may reach which port of the overlays' pods, and that ports are where they are said to be."""

from __future__ import annotations

from typing import Any

import yaml

from tests.k8s.overlays import built, every_overlay, one, pods
from tests.k8s.schemas import ROOT

MONITORING = ROOT / "k8s" / "components" / "monitoring"


@every_overlay
def test_the_network_is_closed_but_for_names(overlay: str) -> None:
    policies = [document for document in built(overlay) if document["kind"] == "NetworkPolicy"]
    labels = pods(overlay)["workers"]["metadata"]["labels"]
    main = next(policy for policy in policies if policy["metadata"]["name"] == "mooncake")
    assert main["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert main["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    own = {"podSelector": {"matchLabels": {"app.kubernetes.io/part-of": "mooncake-serve"}}}
    for rule in main["spec"]["ingress"]:
        assert rule["from"] == [own] or {port["port"] for port in rule["ports"]} <= {
            8000,
            8265,
            8080,
            9101,
        }
    for rule in main["spec"]["egress"]:
        assert rule["to"] == [own] or {port["port"] for port in rule["ports"]} == {53}


@every_overlay
def test_every_port_is_where_it_is_said_to_be(overlay: str) -> None:
    """Prometheus scrapes and policies admit ports that containers name; statistics stay inside."""
    monitor = yaml.safe_load((MONITORING / "pod-monitor.yaml").read_text("utf-8"))
    scraped = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    config = yaml.safe_load(one(overlay, "RayService")["spec"]["serveConfigV2"])
    chosen = config["controller_options"]["runtime_env"]["env_vars"]
    metrics = int(chosen["RAY_SERVE_HAPROXY_METRICS_PORT"])
    numbers = set()
    for name in ("head", "workers"):
        template = pods(overlay)[name]
        ports = {
            port["name"]: port["containerPort"]
            for port in template["spec"]["containers"][0]["ports"]
        }
        assert scraped <= ports.keys(), name
        assert ports["haproxy"] == metrics, name
        assert ports["serve"] == config["http_options"]["port"], name
        numbers |= {ports[port] for port in scraped}
        chooses = monitor["spec"]["selector"]
        labels = template["metadata"]["labels"]
        assert chooses["matchLabels"].items() <= labels.items(), name
        assert all(labels[rule["key"]] in rule["values"] for rule in chooses["matchExpressions"])
    assert admitted(overlay, "monitoring") == numbers
    assert int(chosen["RAY_SERVE_HAPROXY_STATS_PORT"]) not in {
        port["port"] for rule in ingress_rules(overlay) for port in rule.get("ports", [])
    }


@every_overlay
def test_no_rule_admits_everybody(overlay: str) -> None:
    """A `from` that is missing or empty is the whole world, and so is an empty selector in it."""
    rules = ingress_rules(overlay)
    assert rules
    for rule in rules:
        assert rule.get("from"), rule
        for peer in rule["from"]:
            assert any(selector.get("matchLabels") for selector in peer.values()), rule


def ingress_rules(overlay: str) -> list[dict[str, Any]]:
    """Of all policies."""
    policies = [document for document in built(overlay) if document["kind"] == "NetworkPolicy"]
    return [rule for policy in policies for rule in policy["spec"].get("ingress", [])]


def admitted(overlay: str, namespace: str) -> set[int]:
    """Ports of ours that pods of another namespace may reach."""
    label = {"kubernetes.io/metadata.name": namespace}
    return {
        port["port"]
        for rule in ingress_rules(overlay)
        for peer in rule["from"]
        if peer.get("namespaceSelector", {}).get("matchLabels") == label
        for port in rule["ports"]
    }
