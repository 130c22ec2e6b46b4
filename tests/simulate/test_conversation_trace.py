"""The bars on Mooncake's conversation trace, which is not part of the repository.

`MOONCAKE_TRACE_DIR` names the folder that holds `conversation_trace.jsonl`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mooncake_serve.simulate import ROUTERS, Options, Profile, Trace, simulate

FOLDER = Path(os.environ.get("MOONCAKE_TRACE_DIR", "."))
FILE = FOLDER / "conversation_trace.jsonl"
PROFILE = Profile.load("a800x8-llama70b")

pytestmark = pytest.mark.skipif(
    not FILE.is_file(), reason="set MOONCAKE_TRACE_DIR to the folder of conversation_trace.jsonl"
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.load(FILE, PROFILE.block_tokens)


def hit_rate(trace: Trace, blocks: int, **changes: object) -> float:
    options = Options(nodes=1, dram_blocks=blocks).but(**changes)
    return simulate(trace, PROFILE, options)["hit_rate"]


def test_the_controls_reproduce_published_figures(trace: Trace) -> None:
    assert hit_rate(trace, 200_000, policy="lru") == pytest.approx(0.366, abs=0.001)
    assert hit_rate(trace, 10_000, policy="lru") == pytest.approx(0.212, abs=0.001)
    assert hit_rate(trace, 5_000, policy="belady") == pytest.approx(0.341, abs=0.001)
    lonely = Options(router="round-robin", policy="lru", peers=False)
    assert simulate(trace, PROFILE, lonely)["hit_rate"] == pytest.approx(0.113, abs=0.002)


def test_eviction_beats_lru_at_every_size(trace: Trace) -> None:
    ours, lru = (
        {blocks: hit_rate(trace, blocks, policy=policy) for blocks in (2000, 5000, 10000, 40000)}
        for policy in ("ours", "lru")
    )
    assert all(ours[blocks] >= lru[blocks] for blocks in ours), (ours, lru)
    assert ours[5000] >= 1.2 * lru[5000]
    assert ours[10000] >= 0.23
    assert hit_rate(trace, 10_000, hint_accuracy=0.8) >= 0.25


def test_eviction_learns_within_half_a_trace(trace: Trace) -> None:
    second = (0.5, 1.0)
    lru = hit_rate(trace, 10_000, policy="lru", slice=second)
    assert hit_rate(trace, 10_000, slice=second) >= 1.08 * lru


def test_eight_nodes_hit_like_one_pool_and_stay_even(trace: Trace) -> None:
    report = simulate(trace, PROFILE, Options())
    assert report["rejected"] == 0
    assert report["hit_rate"] >= 0.34
    assert report["imbalance"] <= 1.10


CELLS = [(nodes, load) for nodes in (4, 8, 16) for load in (0.2, 0.225, 0.2375, 0.25)]


@pytest.mark.parametrize(("nodes", "load"), CELLS)
def test_ours_has_the_least_latency_where_round_robin_saturates(
    trace: Trace, nodes: int, load: float
) -> None:
    options = Options(nodes=nodes, speed=load * nodes)
    ttft = {
        router: simulate(trace, PROFILE, options.but(router=router))["ttft_s"] for router in ROUTERS
    }
    assert ttft["round-robin"]["mean"] > 1.4 * ttft["ours"]["mean"]
    for router in ROUTERS[1:]:
        assert ttft["ours"]["mean"] < ttft[router]["mean"], (router, ttft)
        assert ttft["ours"]["p99"] < 1.05 * ttft[router]["p99"], (router, ttft)
