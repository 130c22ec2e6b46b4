"""Processes are killed and stopped under load: no request hangs, none gets wrong tokens, and the
service returns to normal by itself.
"""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import psutil
import pytest
from ray import serve

from tests.e2e.cluster import BLOCK_TOKENS, MODEL, App, Cluster
from tests.waiting import eventually

ROUNDS, CLIENTS = 4, 6
LONG_ANSWER = 1500
WORDS = "some words of a document, " * 12
UNREAD = {"model": MODEL, "prompt": WORDS, "max_tokens": 7000}


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def cached(response: httpx.Response) -> int:
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


class Load:
    """The same prompts again and again, from several clients, against known answers."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.prompts = [f"{uuid.uuid4()} {WORDS}" for _ in range(CLIENTS)]
        self.expected = {
            prompt: text_of(app.post(prompt, max_tokens=24)) for prompt in self.prompts
        }
        self.half_done = threading.Event()
        self._done = 0

    def run(self) -> list[str]:
        """Prompts that were answered differently than before."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            return [p for p, ok in pool.map(self._ask, self.prompts * ROUNDS) if not ok]

    def _ask(self, prompt: str) -> tuple[str, bool]:
        text = text_of(self._app.post(prompt, max_tokens=24))
        self._done += 1
        if self._done >= len(self.prompts) * ROUNDS // 2:
            self.half_done.set()
        return prompt, text == self.expected[prompt]


def warm_again(app: App) -> bool:
    """Whether a new prompt, computed on one replica, is loaded by the other."""
    prompt = f"{uuid.uuid4()} {WORDS}"
    blocks = len(prompt) // BLOCK_TOKENS
    text_of(app.post(prompt, replica=0))
    second = app.post(prompt, replica=1)
    # 400: the second replica is not back yet, so there is none of that index.
    return second.status_code == 200 and cached(second) >= (blocks - 1) * BLOCK_TOKENS


def run_while(load: Load, harm: Any) -> list[str]:
    """Run the load and do harm in the middle of it."""
    with ThreadPoolExecutor(1) as pool:
        running: Future[list[str]] = pool.submit(load.run)
        assert load.half_done.wait(60)
        harm()
        return running.result(timeout=120)


def test_the_store_is_killed_under_load(app: App) -> None:
    load, pid = Load(app), app.store_pid()
    assert pid is not None
    assert run_while(load, lambda: os.kill(pid, signal.SIGKILL)) == []
    assert eventually(app.store_pid) != pid
    eventually(lambda: warm_again(app))


@pytest.mark.slow
def test_the_store_is_stopped_under_load(app: App) -> None:
    load, pid = Load(app), app.store_pid()
    assert pid is not None
    assert run_while(load, lambda: os.kill(pid, signal.SIGSTOP)) == []
    assert load.run() == []
    # Nobody here continues or kills it: its clients find that it hangs.
    eventually(lambda: not psutil.pid_exists(pid))
    assert eventually(app.store_pid) != pid
    eventually(lambda: warm_again(app))


def stream(app: App, prompt: str, started: threading.Event) -> str | None:
    """The whole answer, or None after a clean error."""
    parts = []
    with app.client() as client:
        try:
            chunks = client.completions.create(
                model=MODEL, prompt=prompt, max_tokens=LONG_ANSWER, temperature=0, stream=True
            )
            for chunk in chunks:
                parts.append(chunk.choices[0].text)
                started.set()
        except openai.APIError as err:
            if "replica died" in str(err):
                return None
            raise
    return "".join(parts)


def test_a_replica_is_killed_while_it_answers(app: App) -> None:
    prompts = [f"{uuid.uuid4()} {WORDS}" for _ in range(6)]
    started = [threading.Event() for _ in prompts]
    victim = app.replica_pids()[0]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(stream, app, *pair) for pair in zip(prompts, started, strict=True)]
        assert all(event.wait(60) for event in started)
        os.kill(victim, signal.SIGKILL)
        got = [answer.result(timeout=120) for answer in answers]
    assert None in got, "no stream was on the killed replica"
    finished = {p: text for p, text in zip(prompts, got, strict=True) if text is not None}
    assert finished, "no stream was on the other replica"
    # Requests that had no token yet were sent elsewhere; new ones are answered meanwhile.
    for prompt, text in finished.items():
        assert text_of(app.post(prompt, max_tokens=LONG_ANSWER)) == text
    eventually(lambda: len(app.replica_pids()) == 2 and victim not in app.replica_pids())
    eventually(lambda: app.store_stats()["leased_bytes"] == 0)
    eventually(lambda: warm_again(app))


def test_a_client_that_leaves_a_stream_frees_its_place(app: App) -> None:
    with frees_its_place(), httpx.Client() as client:
        url = f"{app.url}/v1/completions"
        with client.stream("POST", url, json={**UNREAD, "stream": True}, timeout=60) as response:
            assert response.status_code == 200
            next(response.iter_lines())


def test_a_client_that_leaves_without_a_stream_frees_its_place(app: App) -> None:
    """Asked behind the proxy: HAProxy 2.8 does not always pass on that such a client left."""
    with frees_its_place(), pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{app.ingress_url()}/v1/completions", json=UNREAD, timeout=0.5)


@contextmanager
def frees_its_place() -> Iterator[None]:
    """What is asked inside ends in the engines before it is complete."""
    before = sum(engine["generated_tokens"] for engine in engines())
    yield
    eventually(lambda: all(engine["running"] == engine["waiting"] == 0 for engine in engines()))
    generated = sum(engine["generated_tokens"] for engine in engines()) - before
    assert generated < UNREAD["max_tokens"]


def engines() -> list[dict[str, Any]]:
    """Counters of every replica's engine."""
    handle: Any = serve.get_deployment_handle("model", "main")
    answers = handle.broadcast("stats").results(timeout_s=30)
    return [answer["engine"] for answer in answers]


@pytest.fixture
def mismatched(cluster: Cluster) -> Iterator[str]:
    cluster.deploy("other", cluster.build(store={"dram": "128MiB"}), wait=False)
    yield "other"
    serve.delete("other")


@pytest.mark.slow
def test_another_store_size_is_an_error_and_not_a_second_store(app: App, mismatched: str) -> None:
    pid = app.store_pid()

    def failure() -> str:
        deployments = serve.status().applications[mismatched].deployments
        return " ".join(deployment.message for deployment in deployments.values())

    message = eventually(lambda: text if "store.dram" in (text := failure()) else "")
    assert "mooncake-serve store restart" in message
    assert app.store_pid() == pid
