"""`mooncake-serve bench router`: what a routing decision costs, and an update of the index.

Everything is in this process and as in the product: `RoutePlanner` over a cluster index in shared
memory, 32,000-token prompts of 125 blocks. Each prompt shares a prefix of random length with what
some node holds; every decision is followed by the end of an earlier request, so that the number
of reservations is steady. The call from Python is included. Updates are batches of additions and
removals on one thread.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any

from mooncake_serve._store import ClusterIndex, RoutePlanner
from mooncake_serve.bench.report import emit, machine, progress, quantile, version

REPLICAS = 64
NODES = 16
BLOCKS = 1_000_000
PROMPT_TOKENS, BLOCK_TOKENS = 32_000, 256
TOKEN_BYTES = 131_072
KEY_BYTES = 32
IN_FLIGHT = 256
EVENTS = 400_000
BATCH = 1_000


def main(argv: list[str] | None = None) -> int:
    """Entry of `mooncake-serve bench router`."""
    parser = argparse.ArgumentParser(prog="mooncake-serve bench router", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object (the default)")
    parser.add_argument("--quick", action="store_true", help="fewer decisions and sizes")
    parser.add_argument("--plots", type=Path, help="write cost against nodes and blocks here")
    options = parser.parse_args(argv)
    result = measure(options.quick)
    if options.plots:
        plot(result["by_size"], options.plots)
    emit(result)
    return 0


def measure(quick: bool) -> dict[str, Any]:
    """The object that `--json` prints."""
    decisions = 2_000 if quick else 20_000
    progress(f"{REPLICAS} replicas, {BLOCKS:,} blocks")
    main_case = decide(REPLICAS, NODES, BLOCKS, decisions)
    sizes = [(16, 4), (64, 16)] if quick else [(4, 1), (16, 4), (64, 16), (256, 64), (1024, 256)]
    by_size = []
    for blocks in (100_000, BLOCKS):
        for replicas, nodes in sizes:
            progress(f"{replicas} replicas on {nodes} nodes, {blocks:,} blocks")
            by_size.append(decide(replicas, nodes, blocks, decisions // 10))
    progress("index updates")
    return {
        "machine": machine(),
        "version": version(),
        "runs": 1,
        **main_case,
        "prompt_tokens": PROMPT_TOKENS,
        "index_events_per_s": round(events_per_s()),
        "by_size": by_size,
    }


def decide(replicas: int, nodes: int, blocks: int, decisions: int) -> dict[str, Any]:
    """Time `decisions` decisions over an index of `blocks` entries."""
    drawn = random.Random(1)
    index, chains = filled(nodes, blocks)
    planner = RoutePlanner(seed=1)
    planner.set_model(BLOCK_TOKENS, TOKEN_BYTES)
    names = [f"r{at:04}" for at in range(replicas)]
    running = {name: f"node-{at % nodes}" for at, name in enumerate(names)}
    planner.set_replicas(running, time.monotonic())
    planner.set_view(index)
    report_all(index, names, nodes, drawn)
    seconds = []
    for request in range(decisions):
        if request % 50 == 0:
            report_all(index, names[request // 50 % 8 :: 8], nodes, drawn)
        keys = prompt(drawn, chains)
        begun = time.perf_counter()
        route, _ = planner.plan(request, PROMPT_TOKENS, keys, time.monotonic())
        seconds.append(time.perf_counter() - begun)
        assert route is not None
        if request >= IN_FLIGHT:
            planner.end(request - IN_FLIGHT)
    seconds.sort()
    return {
        "replicas": replicas,
        "nodes": nodes,
        "blocks_indexed": blocks,
        "decisions": decisions,
        "decision_us_p50": round(quantile(seconds, 0.5) * 1e6, 1),
        "decision_us_p99": round(quantile(seconds, 0.99) * 1e6, 1),
    }


def filled(nodes: int, blocks: int) -> tuple[ClusterIndex, list[bytes]]:
    """An index whose nodes hold chains of a prompt's length; the chains, keys one after another."""
    index = ClusterIndex("node-0")
    rows = [0, *(index.join(f"node-{at}") for at in range(1, nodes))]
    length = PROMPT_TOKENS // BLOCK_TOKENS
    chains = []
    for at in range(blocks // length):
        chain = os.urandom(length * KEY_BYTES)
        index.apply(rows[at % nodes], chain, 0)
        chains.append(chain)
    index.apply(rows[0], os.urandom(blocks % length * KEY_BYTES), 0)
    return index, chains


def report_all(index: ClusterIndex, names: list[str], nodes: int, drawn: random.Random) -> None:
    """Loads of these replicas."""
    for name in names:
        node = int(name[1:]) % nodes
        index.report(node, name, drawn.randrange(40_000), 1e-4, time.monotonic())


def prompt(drawn: random.Random, chains: list[bytes]) -> list[bytes]:
    """Keys of a prompt that begins like some chain and goes on by itself."""
    length = PROMPT_TOKENS // BLOCK_TOKENS
    shared = drawn.randrange(length + 1)
    chain = drawn.choice(chains)[: shared * KEY_BYTES] + os.urandom((length - shared) * KEY_BYTES)
    return [chain[at : at + KEY_BYTES] for at in range(0, len(chain), KEY_BYTES)]


def events_per_s() -> float:
    """Additions and removals of one node, in a table of a million entries."""
    index, _ = filled(NODES, BLOCKS)
    batches = [os.urandom(BATCH * KEY_BYTES) for _ in range(EVENTS // BATCH // 2)]
    begun = time.perf_counter()
    for keys in batches:
        index.apply(1, keys, 0)
    for keys in batches:
        index.apply(1, keys, 255)
    return EVENTS / (time.perf_counter() - begun)


def plot(by_size: list[dict[str, Any]], folder: Path) -> None:
    """`router_cost.png` in `folder`: p50 and p99 against replicas, a line per number of blocks."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for blocks in sorted({row["blocks_indexed"] for row in by_size}):
        rows = [row for row in by_size if row["blocks_indexed"] == blocks]
        for name, style in (("p50", "-"), ("p99", "--")):
            costs = [row[f"decision_us_{name}"] for row in rows]
            replicas = [row["replicas"] for row in rows]
            axes.plot(replicas, costs, style, marker="o", label=f"{name}, {blocks:,} blocks")
    axes.set(xscale="log", xlabel="replicas", ylabel="µs per decision")
    axes.legend()
    figure.savefig(folder / "router_cost.png", dpi=150)
