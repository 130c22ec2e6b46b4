"""Two nodes under load while replicas, stores and a whole node are killed at random.

    python -m tests.e2e.chaos MODEL_FOLDER SECONDS SEED

The node is killed once, halfway or so, and another takes its place. Prints one JSON object: how
many requests there were, what was killed, and every failure that cannot be laid at a killed
process's door. Greedy answers are compared with those given before the first kill. A process of its
own, because it needs a Ray with several nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray
from ray.exceptions import RayError

from mooncake_serve.app import stores as product
from mooncake_serve.bench import cluster as bench
from mooncake_serve.bench.cluster_workloads import TINY, multi_turn
from mooncake_serve.store_actor import NAMESPACE, actor_name
from tests.waiting import WAIT_S

CLIENTS = 4
PAUSE_S = (2.0, 6.0)
REPLICA, STARTING = "ray::ServeReplica:bench:model", ("__init__", "initialize_and_get_metadata")
"""How Ray titles a replica's process, and what it adds while the replica starts."""
OF_THE_KILLED = {"replica_died"}
"""Codes of answers whose replica died after their first token."""


class Load:
    """Clients that ask known prompts until told to stop."""

    def __init__(self, url: str, prompts: list[list[int]], seed: int) -> None:
        self._url = url
        self._prompts = prompts
        self._seed = seed
        self.ended = threading.Event()
        self.failures: list[str] = []
        self.wrong = 0
        self.answered = 0
        self.with_the_killed = 0
        self._lock = threading.Lock()
        self._texts = [self._ask(prompt)[1] for prompt in prompts]
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let every client finish its request."""
        self.ended.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a request hangs"

    def _run(self, number: int) -> None:
        drawn = random.Random(f"{self._seed} {number}")
        while not self.ended.is_set():
            at = drawn.randrange(len(self._prompts))
            status, text = self._ask(self._prompts[at])
            with self._lock:
                if status == "ok":
                    self.answered += 1
                    self.wrong += text != self._texts[at]
                elif status in OF_THE_KILLED:
                    self.with_the_killed += 1
                else:
                    self.failures.append(status)

    def _ask(self, prompt: list[int]) -> tuple[str, str]:
        body = {"model": "bench", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        try:
            answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=WAIT_S)
        except httpx.HTTPError as error:
            return type(error).__name__, ""
        if answer.status_code == 200:
            return "ok", answer.json()["choices"][0]["text"]
        error = answer.json().get("error", {})
        return str(error.get("code") or f"{answer.status_code} {error.get('message')}"), ""


def replicas() -> list[int]:
    """Processes of the replicas that have started, but for the last one: requests need it."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if words.startswith(REPLICA) and not any(step in words for step in STARTING):
                found.append(process.pid)
    return found[1:]


def stores() -> list[int]:
    """Processes of the stores that answer. Requests need none."""
    found = []
    for node in product.nodes():
        with contextlib.suppress(RayError, ValueError):
            actor = ray.get_actor(actor_name(node), namespace=NAMESPACE)
            found.append(ray.get(actor.pid.remote(), timeout=PAUSE_S[0]))
    return found


VICTIMS = {"replica": replicas, "store": stores}


def kill_one(kind: str, drawn: random.Random) -> bool:
    """SIGKILL a random process of that kind, if there is one."""
    running = VICTIMS[kind]()
    if running:
        os.kill(drawn.choice(running), signal.SIGKILL)
    return bool(running)


def run(model: str, seconds: float, seed: int) -> dict[str, Any]:
    """Do harm for that long; what came of it."""
    drawn = random.Random(seed)
    killed: dict[str, int] = {"replica": 0, "store": 0, "node": 0}
    with (
        tempfile.TemporaryDirectory(prefix="mk-") as folder,
        bench.ray_cluster(Path(folder)) as (url, nodes),
        bench.deployed(bench.arguments(model, 32, Path(folder), "ours", None, TINY), "ours"),
    ):
        load = Load(url, [job.prompt for job in multi_turn(TINY, seed)], seed)
        load.start()
        begun, node_at = time.monotonic(), seconds * drawn.uniform(0.4, 0.6)
        while (passed := time.monotonic() - begun) < seconds:
            time.sleep(drawn.uniform(*PAUSE_S))
            if passed > node_at and not killed["node"]:
                nodes.remove_node(next(iter(nodes.worker_nodes)), allow_graceful=False)
                killed["node"] += 1
                nodes.add_node(**bench.NODE)
                continue
            kind = drawn.choice(list(VICTIMS))
            killed[kind] += kill_one(kind, drawn)
        load.stop()
        alive = sum(node["Alive"] for node in ray.nodes())
    return {
        "seed": seed,
        "killed": killed,
        "nodes_left": alive,
        "answered": load.answered,
        "with_the_killed": load.with_the_killed,
        "failures": load.failures,
        "wrong": load.wrong,
    }


def main(model: str, seconds: float, seed: int) -> None:
    """See the module."""
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints what its processes say.
        summary = run(model, seconds, seed)
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
