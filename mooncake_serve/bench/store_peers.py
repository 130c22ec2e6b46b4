"""Ray's object store, measured in the same run as ours."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mooncake_serve.bench.report import progress, quantile, timed


@contextmanager
def ray_object_store(nbytes: int, why: dict[str, str]) -> Iterator[Any | None]:
    """The `ray` module with a fresh local cluster, or None with the reason in `why`."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        why["ray"] = f"Ray is not installed ({error})"
        yield None
        return
    progress("starting Ray")
    ray.init(
        address="local",
        num_cpus=1,
        object_store_memory=nbytes,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def measure_ray(ray: Any | None, nbytes: int, working_set: int) -> dict[str, float | None]:
    """put, get (a zero-copy view) and get + copy into memory that was touched before; medians."""
    if ray is None:
        return {"get_us_p50": None, "get_copy_gb_s": None, "put_gb_s": None}
    count = min(working_set // 2 // nbytes, 256)
    source = np.random.default_rng(0).integers(0, 256, (8, nbytes), np.uint8)
    target = np.ones((4, nbytes), np.uint8)
    refs: list[Any] = []

    def put() -> None:
        refs.append(ray.put(source[len(refs) % 8]))

    # Twice, because the object store's pages are touched for the first time in the first round.
    timed(put, count)
    refs.clear()
    puts = timed(put, count)
    turn = iter(range(1 << 30))
    gets = timed(lambda: ray.get(refs[next(turn) % count]), 4 * count)
    copies = timed(
        lambda: np.copyto(target[next(turn) % 4], ray.get(refs[next(turn) % count])), 2 * count
    )
    refs.clear()
    return {
        "get_us_p50": quantile(gets, 0.5) * 1e6,
        "get_copy_gb_s": nbytes / quantile(copies, 0.5) / 1e9,
        "put_gb_s": nbytes / quantile(puts, 0.5) / 1e9,
    }
