"""The command line of the simulator.

simulate TRACE --nodes 8 --dram-blocks 5860 --router ours --policy ours --no-reject --json
simulate sweep TRACE --nodes 4,8,16 --loads 0.2,0.225,0.2375
simulate policies TRACE --capacities 2000,5000,10000
simulate generate OUT --seed 1 --requests 4000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mooncake_serve.progress import shown
from mooncake_serve.simulate.plots import plot
from mooncake_serve.simulate.run import POLICIES, ROUTERS, Options, Profile, Trace, simulate
from mooncake_serve.simulate.sweep import (
    policy_table,
    router_table,
    sweep_policies,
    sweep_routers,
)

DEFAULT_SLO_S = 30.0
"""Time to first token beyond which a request is refused, unless told otherwise."""


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success. Raises ConfigError for what the parser cannot see."""
    words = list(sys.argv[1:] if args is None else args)
    commands = {"sweep": _sweep, "policies": _policies, "generate": _generate}
    if words and words[0] in commands:
        commands[words[0]](words[1:])
    else:
        _run(words)
    return 0


def _run(words: list[str]) -> None:
    parser = _parser("simulate", "Replay a trace on a simulated cluster.")
    parser.epilog = "Other commands: simulate sweep|policies|generate --help"
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--router", choices=ROUTERS, default="ours")
    parser.add_argument("--policy", choices=POLICIES, default="ours")
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals, times the trace's")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write plots there as PNG")
    chosen = parser.parse_args(words)
    profile, trace = _inputs(chosen)
    options = _options(chosen).but(
        nodes=chosen.nodes, router=chosen.router, policy=chosen.policy, speed=chosen.speed
    )
    started = time.perf_counter()
    with shown(f"simulating {trace.requests:,} requests", announce=False):
        report = simulate(trace, profile, options.but(series=chosen.plots is not None))
    wall_s = time.perf_counter() - started
    if chosen.plots is not None:
        title = f"{trace.name}: {chosen.router}, {chosen.nodes} nodes, x{chosen.speed:g}"
        for path in plot(report, chosen.nodes, title, chosen.plots):
            print(path, file=sys.stderr)
    report.pop("series", None)
    fields = ("nodes", "router", "policy", "speed", "dram_blocks", "nvme_blocks", "device_blocks")
    head = {"trace": trace.name} | {name: getattr(options, name) for name in fields}
    result = head | report | {"profile": profile.name, "wall_s": wall_s, "runs": 1} | _where()
    _print(result, "\n".join(f"{key:22} {value}" for key, value in result.items()), chosen.json)


def _sweep(words: list[str]) -> None:
    parser = _parser("simulate sweep", "Compare routers over cluster sizes and loads.")
    parser.add_argument("--nodes", type=_list(int), default=[4, 8, 16])
    parser.add_argument(
        "--loads", type=_list(float), default=[0.2, 0.225, 0.2375], help="speed per node"
    )
    parser.add_argument("--routers", type=_list(str), default=list(ROUTERS))
    parser.add_argument("--policy", choices=POLICIES, default="ours")
    chosen = parser.parse_args(words)
    profile, trace = _inputs(chosen)
    options = _options(chosen).but(policy=chosen.policy)
    cells = sweep_routers(trace, profile, options, chosen.nodes, chosen.loads, chosen.routers)
    result = {"trace": trace.name, "profile": profile.name, "cells": cells} | _where()
    _print(result, router_table(cells), chosen.json)


def _policies(words: list[str]) -> None:
    parser = _parser("simulate policies", "Compare eviction policies on one pool.")
    capacities = [2000, 5000, 10000, 20000, 40000]
    parser.add_argument("--capacities", type=_list(int), default=capacities)
    parser.add_argument("--policies", type=_list(str), default=list(POLICIES))
    chosen = parser.parse_args(words)
    profile, trace = _inputs(chosen)
    options = _options(chosen).but(slo_s=None)
    cells = sweep_policies(trace, profile, options, chosen.capacities, chosen.policies)
    result = {"trace": trace.name, "profile": profile.name, "cells": cells} | _where()
    _print(result, policy_table(cells), chosen.json)


def _generate(words: list[str]) -> None:
    parser = argparse.ArgumentParser("simulate generate", description="Make a trace from a seed.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--block-tokens", type=int, default=512)
    chosen = parser.parse_args(words)
    trace = Trace.generate(chosen.seed, chosen.requests, chosen.rate, chosen.block_tokens)
    chosen.out.write_text(trace.text())


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    """The options all simulations share."""
    parser = argparse.ArgumentParser(name, description=description)
    parser.add_argument("trace", type=Path, help="requests in the Mooncake format")
    parser.add_argument("--profile", default="a800x8-llama70b", help="costs: a file or a name")
    parser.add_argument("--device-blocks", type=int, default=0, help="of each engine's cache")
    parser.add_argument("--dram-blocks", type=int, default=5860, help="of each store in memory")
    parser.add_argument("--nvme-blocks", type=int, default=0, help="of each store on disk")
    parser.add_argument("--hints", type=_hints, default=None, metavar="none|oracle:SHARE")
    parser.add_argument("--slice", type=_slice, default=(0.0, 1.0), metavar="FROM:TO")
    parser.add_argument("--slo-s", type=float, default=DEFAULT_SLO_S, help="refuse beyond")
    parser.add_argument("--no-reject", action="store_true", help="refuse nothing")
    parser.add_argument("--isolated", action="store_true", help="nodes share no blocks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _inputs(chosen: argparse.Namespace) -> tuple[Profile, Trace]:
    profile = Profile.load(chosen.profile)
    return profile, Trace.load(chosen.trace, profile.block_tokens)


def _options(chosen: argparse.Namespace) -> Options:
    return Options(
        device_blocks=chosen.device_blocks,
        dram_blocks=chosen.dram_blocks,
        nvme_blocks=chosen.nvme_blocks,
        slo_s=None if chosen.no_reject else chosen.slo_s,
        hint_accuracy=chosen.hints,
        peers=not chosen.isolated,
        seed=chosen.seed,
        slice=chosen.slice,
    )


def _hints(text: str) -> float | None:
    if text == "none":
        return None
    kind, _, share = text.partition(":")
    if kind != "oracle":
        raise argparse.ArgumentTypeError(f"{text!r}: use none or oracle:0.8")
    return float(share)


def _slice(text: str) -> tuple[float, float]:
    start, _, end = text.partition(":")
    return float(start), float(end)


def _list(kind: type) -> Any:
    def parse(text: str) -> list[Any]:
        return [kind(word) for word in text.split(",")]

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def _where() -> dict[str, Any]:
    """The machine and the version that produced a result."""
    try:
        release = version("mooncake-serve")
    except PackageNotFoundError:
        release = "not installed"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = {"cores": os.cpu_count(), "cpu": platform.machine(), "memory": memory}
    return {"machine": machine, "version": release}


def _print(result: dict[str, Any], text: str, as_json: bool) -> None:
    print(json.dumps(result) if as_json else text)
