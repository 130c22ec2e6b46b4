"""Ray's object store, measured in the same run as ours."""

from __future__ import annotations

import logging
import mmap
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


def touched(count: int, nbytes: int) -> np.ndarray:
    """Buffers whose pages are there, huge ones where granted, like those of an engine's pool."""
    memory = mmap.mmap(-1, count * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    rows = np.frombuffer(memory, np.uint8).reshape(count, nbytes)
    rows[:] = 1
    return rows


def measure_ray(ray: Any | None, nbytes: int, working_set: int) -> dict[str, float | None]:
    """put here; in an actor get (a zero-copy view), and get + copy of each object once; medians."""
    if ray is None:
        return {"get_us_p50": None, "get_copy_gb_s": None, "put_gb_s": None}
    count = min(working_set // 2 // nbytes, 256)
    source = np.random.default_rng(0).integers(0, 256, (8, nbytes), np.uint8)
    refs: list[Any] = []

    def put() -> None:
        refs.append(ray.put(source[len(refs) % 8]))

    # Twice, because the object store's pages are touched for the first time in the first round.
    timed(put, count)
    refs.clear()
    puts = timed(put, count)
    reader = ray.remote(_RayReader).remote()
    copies, gets = ray.get(reader.read.remote([[ref] for ref in refs], nbytes))
    ray.kill(reader)
    refs.clear()
    return {
        "get_us_p50": quantile(gets, 0.5) * 1e6,
        "get_copy_gb_s": nbytes / quantile(copies, 0.5) / 1e9,
        "put_gb_s": nbytes / quantile(puts, 0.5) / 1e9,
    }


class _RayReader:
    """Reads objects in a process that did not put them."""

    def read(self, boxed: list[list[Any]], nbytes: int) -> tuple[list[float], list[float]]:
        """Seconds of get + copy, each object once, each to its place; then of get alone.
        References come boxed, since Ray would resolve bare ones itself."""
        import ray

        refs = [ref for (ref,) in boxed]
        target = touched(len(refs), nbytes)
        turn = iter(range(len(refs)))

        def get_and_copy() -> None:
            at = next(turn)
            np.copyto(target[at], ray.get(refs[at]))

        copies = timed(get_and_copy, len(refs))
        gets = timed(lambda: ray.get(refs[0]), 500)
        return copies, gets
