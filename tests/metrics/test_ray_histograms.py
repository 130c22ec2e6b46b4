"""Snapshots of a histogram, as single observations for Ray."""

from __future__ import annotations

import random
from bisect import bisect_left

from mooncake_serve.metrics import Distribution
from mooncake_serve.metrics.store import NVME_READ_TIME
from mooncake_serve.ray_metrics import observations

BOUNDS = NVME_READ_TIME.buckets


def counted(values: list[float]) -> Distribution:
    within = tuple(float(sum(value <= bound for value in values)) for bound in BOUNDS)
    return Distribution(within, float(len(values)), sum(values))


def by_bucket(values: list[float]) -> list[int]:
    at = [bisect_left(BOUNDS, value) for value in values]
    return [at.count(bucket) for bucket in range(len(BOUNDS) + 1)]


def test_counts_are_exact_and_the_sum_is_right() -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    for _ in range(50):
        before = [10 ** rng.uniform(-5, -0.1) for _ in range(rng.randrange(20))]
        fresh = [10 ** rng.uniform(-5, -0.1) for _ in range(rng.randrange(1, 20))]
        told = list(observations(NVME_READ_TIME, counted([*before, *fresh]), counted(before)))
        assert by_bucket(told) == by_bucket(fresh)
        assert abs(sum(told) - sum(fresh)) < 1e-3 * len(fresh)


def test_a_store_that_started_again_counts_in_full() -> None:
    old, new = counted([0.002] * 9), counted([0.0002, 7.0])
    told = list(observations(NVME_READ_TIME, new, old))
    assert by_bucket(told) == by_bucket([0.0002, 7.0])
    assert list(observations(NVME_READ_TIME, new, new)) == []
