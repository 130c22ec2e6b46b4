"""Tenants of a running application: the same prompt, nothing shared, no way in without a key."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from mooncake_serve.api import keys
from tests.e2e.cluster import BLOCK_TOKENS, MODEL, App, Cluster
from tests.waiting import WAIT_S

PROMPT = "a prompt that both tenants send, word for word, " * BLOCK_TOKENS


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def tenants(files: Path) -> dict[str, str]:
    return {name: keys.create(files, name) for name in ("acme", "umbrella")}


@pytest.fixture(scope="module")
def guarded(cluster: Cluster, files: Path, tenants: dict[str, str]) -> App:
    del tenants
    api = {"request_timeout_s": WAIT_S, "keys_file": str(files), "tenant_secret": "of this test"}
    return cluster.deploy("guarded", cluster.build(api=api))


def ask(app: App, key: str | None, path: str = "/v1/completions") -> httpx.Response:
    headers = {"x-mooncake-explain": "1", "x-mooncake-replica": "0"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{app.url}{path}", json=body, headers=headers, timeout=WAIT_S)


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_the_same_prompt_of_two_tenants_shares_nothing(
    guarded: App, tenants: dict[str, str]
) -> None:
    """Equal work and an equal plan: time has nothing to tell one tenant of the other."""
    first = ask(guarded, tenants["acme"])
    assert cached(first) == 0
    assert cached(ask(guarded, tenants["acme"])) > 0
    other = ask(guarded, tenants["umbrella"])
    assert cached(other) == 0
    assert '"matched_tokens":0' in other.headers["x-mooncake-route"]
    assert other.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
    assert cached(ask(guarded, tenants["umbrella"])) > 0


def test_no_way_in_without_a_key(guarded: App, tenants: dict[str, str]) -> None:
    wrong = (None, "none", tenants["acme"][:-1], tenants["acme"] + "x", "mk--", "mk-0-0")
    for key in wrong:
        assert ask(guarded, key).status_code == 401, key
    for path in (
        "/v1//completions",
        "/V1/completions",
        "/v1/completions/",
        "/v1/../v1/completions",
    ):
        assert ask(guarded, None, path).status_code in {401, 404, 405, 307}, path
    for path in ("/metrics", "/docs", "/openapi.json", "/v1/models", "/dashboard/", "/tenants"):
        answer = httpx.get(f"{guarded.url}{path}", timeout=WAIT_S)
        assert answer.status_code in {401, 404}, path
