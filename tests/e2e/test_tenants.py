"""Tenants of a running application: the same prompt, nothing shared, no way in without a key."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest
from ray import serve

from mooncake_serve import dashboard
from mooncake_serve.api import keys
from tests.e2e.cluster import BLOCK_TOKENS, MODEL, App, Cluster, free_port, ray_processes
from tests.waiting import WAIT_S, eventually

PROMPT = "a prompt that both tenants send, word for word, " * BLOCK_TOKENS
SECRET = "the secret of this test, and of no other"
ADMIN_PORT = free_port()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def tenants(files: Path) -> dict[str, str]:
    return {name: keys.create(files, name) for name in ("acme", "umbrella")}


@pytest.fixture(scope="module")
def guarded(cluster: Cluster, files: Path, tenants: dict[str, str]) -> App:
    del tenants
    secret = files.with_name("secret")
    secret.write_text(SECRET)
    api = {
        "request_timeout_s": WAIT_S,
        "keys_file": str(files),
        "tenant_secret_file": str(secret),
        "admin_port": ADMIN_PORT,
    }
    return cluster.deploy("guarded", cluster.build(api=api))


def ask(
    app: App, key: str | None, path: str = "/v1/completions", prompt: str = PROMPT
) -> httpx.Response:
    headers = {"x-mooncake-explain": "1", "x-mooncake-replica": "0"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
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


def work(app: App) -> dict[str, int]:
    """What the replicas and the store have done so far, once they rest."""
    url = f"http://127.0.0.1:{ADMIN_PORT}/dashboard/data"
    time.sleep(2 * dashboard.FRESH_S)  # What it shows may be that old.

    def resting() -> list[dict[str, int]]:
        engines = [one["engine"] for one in httpx.get(url, timeout=WAIT_S).json()["replicas"]]
        return engines if all(engines) and not any(one["running"] for one in engines) else []

    engines: list[dict[str, int]] = eventually(resting)
    names = ("prompt_tokens", "cached_pool_tokens", "cached_store_tokens")
    done = {name: sum(engine[name] for engine in engines) for name in names}
    store = app.store_stats()
    return done | {name: store[name] for name in ("lease_hits", "matched_blocks")}


def test_nothing_of_one_tenant_shows_in_the_others_work(
    guarded: App, tenants: dict[str, str]
) -> None:
    """What a tenant could time is the same whether another has sent its prompt or nobody has.

    Counted, not clocked: tokens computed, tokens found, blocks looked up and blocks read.
    """
    unsent, sent = (f"{who} has sent this before, " * BLOCK_TOKENS for who in ("nobody", "a rival"))
    for _ in range(2):
        ask(guarded, tenants["acme"], prompt=sent)
    spent = []
    for prompt in (unsent[: len(sent)], sent[: len(unsent)]):
        before = work(guarded)
        answer = ask(guarded, tenants["umbrella"], prompt=prompt)
        assert cached(answer) == 0
        after = work(guarded)
        spent.append({name: after[name] - before[name] for name in before})
    assert spent[0] == spent[1]
    assert spent[0]["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert spent[0]["lease_hits"] == spent[0]["cached_store_tokens"] == 0


def test_secrets_and_prompts_show_nowhere(
    cluster: Cluster, guarded: App, tenants: dict[str, str]
) -> None:
    """Not in a log of any process, nor in what `ps` and the application's status tell."""
    assert cached(ask(guarded, tenants["acme"])) >= 0
    keep = [SECRET, *tenants.values(), PROMPT[:40]]
    told = [" ".join(process.cmdline()) for process in ray_processes()]
    told.append(str(serve.status()))
    for path in cluster.session.rglob("*"):
        if path.is_file() and path.suffix in {".log", ".out", ".err", ".json", ".txt"}:
            told.append(path.read_text("utf-8", errors="replace"))
    assert len(told) > 20
    for text in told:
        for secret in keep:
            assert secret not in text, text[: text.index(secret)][-200:]


def test_no_way_in_without_a_key(cluster: Cluster, guarded: App, tenants: dict[str, str]) -> None:
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
    # The proxy's own, which ask for none: what they tell is in docs/how-to/keys.md.
    proxy = f"http://127.0.0.1:{cluster.port}/-"
    assert httpx.get(f"{proxy}/healthz", timeout=WAIT_S).text == "success"
    told = httpx.get(f"{proxy}/routes", timeout=WAIT_S).json()
    assert told["/guarded"] == "guarded"
    assert set(told) <= {f"/{name}".removesuffix("main") for name in serve.status().applications}
    for path in ("/metrics", "/stats", "/admin", "/"):
        assert httpx.get(f"{proxy}{path}", timeout=WAIT_S).status_code in {401, 404}, path
