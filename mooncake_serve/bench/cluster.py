"""`mooncake-serve bench cluster`: two Ray nodes with two replicas each, three ways to serve them.

`no_store`: Serve's default router, each replica's own pool only. `serve_default`: the same router
over our stores, one per node, which fetch from each other. `ours`: our router over the same
stores. All arms run the same engine, are asked the same prompts in the same order by the same two
closed-loop clients over HTTP, and start cold. With a paced link the stores send at 1 Gbit/s.

The nodes are raylets of one machine (`ray.cluster_utils.Cluster`), so they share its cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

from mooncake_serve.bench.cluster_workloads import FULL, QUICK, TINY, WORKLOADS, Job, Sizes
from mooncake_serve.bench.default_router import DefaultRouter
from mooncake_serve.bench.http_stream import Answer, ask
from mooncake_serve.bench.report import emit, machine, progress, quantile, version

NODES, REPLICAS_PER_NODE = 2, 2
CLIENTS = 2
ANSWER_TOKENS = 8
PACED_BYTES_PER_S = 125_000_000
READY_S = 180.0
INGEST = "16MiB"
NODE: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 128 << 20}
"""What a raylet offers: more than a small machine has, which all of them share."""
ARMS = ("no_store", "serve_default", "ours")
APP = "bench"


def main(argv: list[str] | None = None) -> int:
    """Entry of `mooncake-serve bench cluster`."""
    parser = argparse.ArgumentParser(prog="mooncake-serve bench cluster", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object (the default)")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter prompts")
    parser.add_argument("--model", default="smollm2-135m", help="model id, or a local folder")
    parser.add_argument("--tiny", action="store_true", help="sizes for a model of a test")
    parser.add_argument("--block-tokens", type=int, default=None)
    parser.add_argument("--pool", help="each replica's own pool, such as 384MiB")
    parser.add_argument("--dram", help="each node's store, such as 1GiB")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    sizes = TINY if options.tiny else QUICK if options.quick else FULL
    given = {name: getattr(options, name) for name in ("pool", "dram") if getattr(options, name)}
    sizes = replace(sizes, **given)
    # Ray prints what its processes say.
    with contextlib.redirect_stdout(sys.stderr):
        result = measure(options.model, sizes, options.block_tokens, options.seed)
    emit(result)
    return 0


def measure(model: str, sizes: Sizes, block_tokens: int | None, seed: int) -> dict[str, Any]:
    """The object that `--json` prints."""
    workloads = {name: make(sizes, seed) for name, make in WORKLOADS.items()}
    runs: dict[tuple[str, int | None], Arm] = {}
    with tempfile.TemporaryDirectory(prefix="mk-") as folder, ray_cluster(Path(folder)) as (url, _):
        for link in (None, 1):
            for arm in ARMS:
                if link is not None and arm == "no_store":
                    # Nothing of it crosses the link.
                    runs[arm, link] = runs[arm, None]
                    continue
                progress(f"{arm}, link {link or 'loopback'}")
                args = arguments(model, block_tokens, Path(folder), arm, link, sizes)
                with deployed(args, arm):
                    runs[arm, link] = Arm.run(url, workloads)
    answers = [runs[key].texts() for key in runs]
    ours = [answer for link in (None, 1) for answer in runs["ours", link].answers()]
    return {
        "machine": machine(),
        "version": version(),
        "runs": 1,
        "model": model,
        "nodes": NODES,
        "replicas": NODES * REPLICAS_PER_NODE,
        "clients": CLIENTS,
        "pool": sizes.pool,
        "dram": sizes.dram,
        "workloads": [
            {"name": name, "link_gbit": link, "requests": len(jobs)}
            | {arm: runs[arm, link].figures(name) for arm in ARMS}
            for link in (None, 1)
            for name, jobs in workloads.items()
        ],
        "predicted_equals_actual_share": sum(a.predicted == a.cached for a in ours) / len(ours),
        "mispredicted": [
            {"predicted": answer.predicted, "cached": answer.cached}
            for answer in ours
            if answer.predicted != answer.cached
        ],
        "failed": sum(not answer.ok for run in runs.values() for answer in run.answers()),
        "outputs_identical": all(other == answers[0] for other in answers),
    }


@dataclass
class Arm:
    """What one deployment answered, by workload, in the order of its jobs."""

    by_workload: dict[str, list[Answer]]
    fetched_blocks: int

    @classmethod
    def run(cls, url: str, workloads: dict[str, list[Job]]) -> Arm:
        """Ask everything; each workload starts when the one before has ended."""
        by_workload = {name: ask_all(url, jobs) for name, jobs in workloads.items()}
        return cls(by_workload, sum(stats.get("peer_fetched_blocks", 0) for stats in store_stats()))

    def answers(self) -> list[Answer]:
        """All of them."""
        return [answer for answers in self.by_workload.values() for answer in answers]

    def texts(self) -> list[str]:
        """Their texts."""
        return [answer.text for answer in self.answers()]

    def figures(self, workload: str) -> dict[str, Any]:
        """Of one workload."""
        good = [answer for answer in self.by_workload[workload] if answer.ok]
        if not good:
            return {"ttft_mean_s": None, "ttft_p99_s": None, "cached_share": None}
        seconds = sorted(answer.ttft_s for answer in good)
        prompt = sum(answer.prompt_tokens for answer in good)
        return {
            "ttft_mean_s": round(statistics.fmean(seconds), 4),
            "ttft_p99_s": round(quantile(seconds, 0.99), 4),
            "cached_share": round(sum(answer.cached for answer in good) / prompt, 4),
            "fetched_blocks": self.fetched_blocks,
        }


def ask_all(url: str, jobs: list[Job]) -> list[Answer]:
    """Closed-loop clients take the jobs in order; a job waits for the one before in its thread."""
    turns: dict[int, threading.Lock] = {job.thread: threading.Lock() for job in jobs}
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for at in range(len(jobs)):
        waiting.put(at)
    answers: dict[int, Answer] = {}

    def client() -> None:
        with httpx.Client(timeout=READY_S) as http:
            while True:
                try:
                    at = waiting.get_nowait()
                except queue.Empty:
                    return
                with turns[jobs[at].thread]:
                    answers[at] = ask(http, url, jobs[at].prompt, ANSWER_TOKENS)

    clients = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    return [answers[at] for at in range(len(jobs))]


def arguments(
    model: str, block_tokens: int | None, folder: Path, arm: str, link: int | None, sizes: Sizes
) -> dict[str, Any]:
    """`args:` of an arm's application."""
    peer = {"listen": "127.0.0.1:0", "max_bytes_per_s": PACED_BYTES_PER_S if link else None}
    return {
        "model": {"id": model, "name": "bench"},
        "engine": {"threads": 1, "pool": sizes.pool, "block_tokens": block_tokens},
        "store": {
            "enabled": arm != "no_store",
            "dram": sizes.dram,
            "ingest": INGEST,
            "socket_dir": str(folder / "sockets"),
            "peer": peer,
        },
        "replicas": {
            "count": NODES * REPLICAS_PER_NODE,
            "max_per_node": REPLICAS_PER_NODE,
            "num_cpus": 0.1,
        },
    }


@contextlib.contextmanager
def ray_cluster(folder: Path) -> Iterator[tuple[str, Any]]:
    """Two raylets and Serve on the first; the URL applications answer on, and Ray's `Cluster`."""
    # Unlike `ray.init`, this brings up several nodes on one machine.
    cluster_class: Any = import_module("ray.cluster_utils").Cluster
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"
    cluster = cluster_class(initialize_head=True, head_node_args=NODE)
    try:
        for _ in range(NODES - 1):
            cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (folder / "sockets").mkdir(mode=0o700)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}", cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


@contextlib.contextmanager
def deployed(args: dict[str, Any], arm: str) -> Iterator[None]:
    """One application, ready; afterwards it and its stores are gone."""
    from mooncake_serve import app as product
    from mooncake_serve.app import stores

    config = product.load_app_config(args)
    settings = config.model_dump(mode="json")
    model = product._model_deployment(config)
    if arm != "ours":
        # Ray's pydantic model hides its constructor's types.
        router: Any = DefaultRouter
        model = model.options(
            request_router_config=RequestRouterConfig(request_router_class=router)
        )
    # On the first node, like the proxy, so that the others can come and go.
    options = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
    ingress = product._ingress_deployment().options(ray_actor_options=options)
    application = ingress.bind(settings, model.bind(settings))
    serve.run(application, name=APP, route_prefix="/")
    try:
        if config.store.enabled:
            wait_for_peers()
        yield
    finally:
        serve.delete(APP)
        stores.stop()


def store_stats() -> list[dict[str, Any]]:
    """Counters of every node's store."""
    from mooncake_serve.app import stores
    from mooncake_serve.store_actor import NAMESPACE, actor_name

    actors = [ray.get_actor(actor_name(node), namespace=NAMESPACE) for node in stores.nodes()]
    return ray.get([actor.stats.remote() for actor in actors], timeout=30)


def wait_for_peers() -> None:
    """Until every store follows all others."""
    patience = time.monotonic() + READY_S
    while [stats["peers_connected"] for stats in store_stats()] != [NODES - 1] * NODES:
        if time.monotonic() > patience:
            raise RuntimeError("the stores of the nodes did not meet")
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())
