"""Real HTTP through Ray Serve: two replicas, one store, the official client."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest
from ray import serve
from ray.serve.config import RequestRouterConfig

from mooncake_serve import app as product
from tests.e2e.broken_router import BrokenRouter
from tests.e2e.cluster import CONTEXT, MODEL, App, Cluster
from tests.waiting import WAIT_S, eventually

PROMPT = "a long document, " * 20
HELLO = [{"role": "user", "content": "hello"}]


def route(response: httpx.Response) -> dict:
    return json.loads(response.headers["x-mooncake-route"])


def test_official_client(app: App) -> None:
    with app.client() as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        whole = client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=6, temperature=0
        )
        stream = client.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 6
    assert chunks[-2].choices[0].finish_reason == "length"


def test_errors_keep_their_shape_through_the_proxy(app: App) -> None:
    with app.client() as client:
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=HELLO)
        with pytest.raises(openai.BadRequestError, match="colour"):
            client.chat.completions.create(
                model=MODEL, messages=HELLO, extra_body={"colour": "red"}
            )
    long = app.post("x" * CONTEXT)
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    for path, status in (("/nowhere", 404), ("/v1/completions", 405)):
        response = httpx.get(f"{app.url}{path}", headers={"x-request-id": "id-1"})
        assert response.status_code == status
        assert response.json()["error"]["message"]
        assert response.headers["x-request-id"] == "id-1"


def test_the_other_replica_answers_from_the_shared_store(app: App) -> None:
    cold = app.post(PROMPT, replica=0)
    eventually(lambda: app.store_stats()["blocks"] >= len(PROMPT) // 32)
    warm = app.post(PROMPT, replica=1)
    assert route(cold)["replica"] != route(warm)["replica"]
    assert warm.json()["choices"][0]["text"] == cold.json()["choices"][0]["text"]
    cached = warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= len(PROMPT) // 2
    # The index follows what stores and pools hold; it may be a moment behind the first answer.
    eventually(lambda: route(app.post(PROMPT, replica=1))["matched_tokens"] == cached)


def test_a_burst_uses_both_replicas_and_keeps_its_answers(app: App) -> None:
    prompts = [f"{n} {PROMPT}" for n in range(24)]
    with ThreadPoolExecutor(12) as pool:
        first = list(pool.map(app.post, prompts))
        second = list(pool.map(app.post, prompts))
    assert {response.status_code for response in first + second} == {200}
    assert len({route(response)["replica"] for response in first}) == 2
    texts = [[r.json()["choices"][0]["text"] for r in answers] for answers in (first, second)]
    assert texts[0] == texts[1]


def test_pinning_a_replica_that_does_not_exist(app: App) -> None:
    response = app.post("x", replica=7)
    assert response.status_code == 400
    assert "x-mooncake-replica" in response.json()["error"]["message"]


def test_haproxy_serves(app: App, cluster: Cluster) -> None:
    """The fast proxy of `deployments/app.yaml` is the process that listens on the port."""
    listeners = [
        psutil.Process(connection.pid).name()
        for connection in psutil.net_connections("tcp")
        if connection.status == "LISTEN"
        and connection.laddr.port == cluster.port
        and connection.pid
    ]
    assert listeners
    assert set(listeners) == {"haproxy"}


def test_a_router_that_raises_still_routes(cluster: Cluster, app: App) -> None:
    config = product.load_app_config(cluster.args(replicas={"count": 1, "num_cpus": 0.1}))
    settings = config.model_dump(mode="json")
    model = product._model_deployment(config).options(
        request_router_config=RequestRouterConfig(request_router_class=BrokenRouter)
    )
    broken = cluster.deploy(
        "broken", product._ingress_deployment().bind(settings, model.bind(settings))
    )
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(broken.post, [f"{n} {PROMPT}" for n in range(16)]))
        assert {answer.status_code for answer in answers} == {200}
    finally:
        serve.delete("broken")


def test_without_replicas_the_answer_is_503_at_once(cluster: Cluster, app: App) -> None:
    never = {"count": 1, "num_cpus": 64}
    empty = cluster.deploy("empty", cluster.build(replicas=never), wait=False)
    try:
        ingress = eventually(lambda: _answer(empty))
        assert ingress.status_code == 503
        assert ingress.json()["error"]["code"] == "no_replica"
        assert int(ingress.headers["retry-after"]) >= 1
        streamed = empty.post("x", stream=True)
        assert streamed.status_code == 503
        assert httpx.get(f"{empty.url}/health", timeout=WAIT_S).status_code == 503
    finally:
        serve.delete("empty")


def _answer(app: App) -> httpx.Response | None:
    """An answer of this application: until the proxy knows its prefix, `main` answers 404."""
    response = app.post("x")
    return response if response.status_code != 404 else None


def test_a_redeploy_keeps_the_store(cluster: Cluster, app: App) -> None:
    before, prompt = app.store_pid(), f"redeployed {PROMPT}"
    cold = app.post(prompt)
    blocks = len(prompt) // 32
    eventually(lambda: app.store_stats()["blocks"] >= blocks)
    cluster.deploy("main", cluster.build(api={"request_timeout_s": WAIT_S - 1}))
    warm = eventually(lambda: r if (r := app.post(prompt)).status_code == 200 else None)
    assert app.store_pid() == before
    assert warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt) // 2
    assert warm.json()["choices"][0]["text"] == cold.json()["choices"][0]["text"]


def test_nothing_of_ours_is_in_dev_shm(app: App) -> None:
    listed = subprocess.run(["ls", "/dev/shm"], capture_output=True, text=True, check=True)
    assert "mooncake" not in listed.stdout
