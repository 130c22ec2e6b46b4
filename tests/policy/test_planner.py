"""The router's planner through the binding: arguments, answers, reservations."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

import pytest

COSTS: dict[str, Any] = {
    "prefill": {"fixed_s": 0.03, "token_s": 1e-4, "attn_s": 2e-9},
    "tiers": [
        {"latency_s": 0, "bytes_per_s": None},
        {"latency_s": 0.0005, "bytes_per_s": 1e11},
        {"latency_s": 0.002, "bytes_per_s": 2.4e10},
        {"latency_s": 0.001, "bytes_per_s": 8.7e10},
    ],
    "kv_bytes_per_token": 327680,
    "block_tokens": 256,
}
KEYS = [key * 0x9E3779B97F4A7C15 % 2**64 for key in range(1, 126)]
TOKENS = 32_000
policy: Any = import_module("mooncake_serve._store").policy


def planner(replicas: int, **options: Any) -> Any:
    made = policy.Planner(json.dumps(COSTS), **options)
    for replica in range(replicas):
        made.report(replica, 0.0)
    return made


def test_a_plan_explains_itself() -> None:
    runs = [(0, 0, 0), (50, 100, 110), (0, 0, 0)]
    plan, ttft_s = planner(3).plan(1, TOKENS, KEYS, runs, 120, 0.0)
    assert plan.replica == 1
    assert plan.blocks == [50, 50, 10, 10]
    assert ttft_s == plan.ttft_s == plan.queue_s + plan.load_s + plan.prefill_s
    assert "replica=1" in repr(plan)


def test_reservations_spread_a_burst_and_cancelling_undoes_one() -> None:
    made = planner(4)
    chosen = [made.plan(request, TOKENS, [request], [], 0, 0.0)[0].replica for request in range(8)]
    assert sorted(chosen) == [0, 0, 1, 1, 2, 2, 3, 3]
    made.cancel(5)
    plan, _ = made.plan(9, TOKENS, [99], [], 0, 0.0)
    assert plan.replica == chosen[5]


def test_without_a_replica_or_over_the_objective_there_is_no_plan() -> None:
    assert planner(0).plan(1, TOKENS, KEYS, [], 0, 0.0) == (None, float("inf"))
    made = planner(1, slo_s=1.0)
    made.report(0, 1.0, queue_s=7.0)
    plan, best_s = made.plan(1, TOKENS, KEYS, [], 0, 1.0)
    assert plan is None
    assert best_s > 7.0
    made.report(0, 2.0, accepting=False)
    assert made.plan(2, TOKENS, KEYS, [], 0, 2.0) == (None, float("inf"))


def test_new_measurements_change_the_prediction() -> None:
    made = planner(1)
    _, before_s = made.plan(1, TOKENS, [1], [], 0, 0.0)
    made.cancel(1)
    slow = COSTS["prefill"] | {"token_s": 2e-4}
    made.set_costs(json.dumps(COSTS | {"prefill": slow}))
    _, after_s = made.plan(2, TOKENS, [2], [], 0, 0.0)
    assert after_s - before_s == pytest.approx(TOKENS * 1e-4)


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        ("{}", {}, "costs: missing field"),
        (json.dumps(COSTS), {"router": "best"}, "use ours, round-robin"),
    ],
)
def test_mistakes_are_value_errors(costs: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy.Planner(costs, **options)
