"""The operators' port of a running application: the page, its data, and what is not there."""

from __future__ import annotations

from typing import Any

import httpx

from tests.e2e.cluster import BLOCK_TOKENS, Cluster, free_port
from tests.waiting import WAIT_S, eventually

PROMPT = "what the page should show, by key only " * BLOCK_TOKENS


def test_the_page_shows_what_happened(cluster: Cluster) -> None:
    port = free_port()
    api = {"request_timeout_s": WAIT_S, "admin_port": port}
    app = cluster.deploy("watched", cluster.build(api=api))
    for replica in (0, 0, 1):
        assert app.post(PROMPT, replica=replica).status_code == 200
    operators = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S)
    data: dict[str, Any] = eventually(lambda: complete(operators.get("/dashboard/data").json()))
    (node,) = data["nodes"]
    (dram,) = [tier for tier in node["tiers"] if tier["tier"] == "dram"]
    assert sum(dram["states"].values()) == dram["capacity"]
    assert dram["states"]["resident"] > 0
    assert {one["node"] for one in data["replicas"]} == {node["node"]}
    assert len(data["replicas"]) == 2
    newest, second, oldest = data["decisions"]
    assert oldest["cached_tokens"] == 0
    assert second["replica"] == oldest["replica"] != newest["replica"]
    assert second["cached_tokens"] > 0
    assert newest["cached_tokens"] > 0
    assert data["hottest"][0]["requests"] == 3
    assert data["saved_prefill_s"] > 0
    assert PROMPT[:20] not in str(data)
    page = operators.get("/dashboard/")
    assert page.status_code == 200
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    # Nothing of it where clients come in.
    assert httpx.get(f"{app.url}/dashboard/", timeout=WAIT_S).status_code == 404
    assert httpx.get(f"{app.url}/dashboard/data", timeout=WAIT_S).status_code == 404


def complete(data: dict[str, Any]) -> dict[str, Any] | None:
    """The data, once every replica and three ended requests are in it."""
    engines = [one["engine"] for one in data["replicas"]]
    ended = [one for one in data["decisions"] if one["ttft_s"] is not None]
    return data if len(engines) == 2 and all(engines) and len(ended) == 3 else None
