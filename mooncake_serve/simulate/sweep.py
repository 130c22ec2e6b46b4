"""Many simulations as one table: routers against sizes and loads, policies against capacities.

A load is given as speed per node, so that one number means the same utilization at every size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from mooncake_serve.progress import shown
from mooncake_serve.simulate.run import Options, Profile, Trace, simulate

SUMMARY = ("hit_rate", "imbalance", "rejected", "ttft_s", "queue_s")


def sweep_routers(
    trace: Trace,
    profile: Profile,
    options: Options,
    nodes: Sequence[int],
    loads: Sequence[float],
    routers: Sequence[str],
) -> list[dict[str, Any]]:
    """One cell per size, load and router."""
    cells = []
    chosen = list(itertools.product(nodes, loads, routers))
    with shown("simulating", len(chosen)) as show:
        for size, load, router in chosen:
            one = options.but(nodes=size, speed=load * size, router=router)
            report = simulate(trace, profile, one)
            cell = {"nodes": size, "load": load, "speed": one.speed, "router": router}
            cells.append(cell | {key: report[key] for key in SUMMARY})
            show(len(cells))
    return cells


def sweep_policies(
    trace: Trace,
    profile: Profile,
    options: Options,
    capacities: Sequence[int],
    policies: Sequence[str],
) -> list[dict[str, Any]]:
    """Hit rate of one pool per capacity and policy."""
    cells = []
    chosen = list(itertools.product(capacities, policies))
    with shown("simulating", len(chosen)) as show:
        for blocks, policy in chosen:
            report = simulate(
                trace, profile, options.but(nodes=1, dram_blocks=blocks, policy=policy)
            )
            cells.append({"blocks": blocks, "policy": policy, "hit_rate": report["hit_rate"]})
            show(len(cells))
    return cells


def router_table(cells: Sequence[dict[str, Any]]) -> str:
    """Mean / p99 time to first token in seconds, one row per size and load; best mean marked *."""
    routers = list(dict.fromkeys(cell["router"] for cell in cells))
    lines = ["nodes  speed   " + "".join(f"{router:>20}" for router in routers)]
    for size, speed in dict.fromkeys((cell["nodes"], cell["speed"]) for cell in cells):
        row = {c["router"]: c for c in cells if (c["nodes"], c["speed"]) == (size, speed)}
        best = min(cell["ttft_s"]["mean"] for cell in row.values())
        texts = []
        for router in routers:
            ttft = row[router]["ttft_s"]
            mark = "*" if ttft["mean"] == best else " "
            texts.append(f"{ttft['mean']:9.2f}{mark}/{ttft['p99']:8.2f} ")
        lines.append(f"{size:5d}  x{speed:<6g} " + "".join(texts))
    return "\n".join(lines)


def policy_table(cells: Sequence[dict[str, Any]]) -> str:
    """Hit rates, one row per policy."""
    capacities = list(dict.fromkeys(cell["blocks"] for cell in cells))
    lines = ["policy  " + "".join(f"{blocks:>9}" for blocks in capacities)]
    for policy in dict.fromkeys(cell["policy"] for cell in cells):
        row = {cell["blocks"]: cell["hit_rate"] for cell in cells if cell["policy"] == policy}
        lines.append(f"{policy:8}" + "".join(f"{row[blocks]:9.4f}" for blocks in capacities))
    return "\n".join(lines)
