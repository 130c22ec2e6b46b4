"""Does the configuration fit this machine? Checked before Ray is asked for anything."""

from __future__ import annotations

import os

from mooncake_serve.config import GIB, AppConfig
from mooncake_serve.errors import ConfigError
from mooncake_serve.memory import memory_limit

REPLICA_OVERHEAD = GIB // 2
"""A replica's process without weights and KV: Python, torch, Ray."""


def check_machine(config: AppConfig, limit: int | None = None) -> None:
    """Raise ConfigError when store and replicas together need more memory than there is."""
    limit = limit if limit is not None else memory_limit()
    store = config.store.dram if config.store.enabled else 0
    if store > limit:
        raise ConfigError(
            "store.dram", f"{_gib(store)} is more than the {_gib(limit)} this machine allows"
        )
    on_cpu = not config.engine.device.startswith("cuda") and config.replicas.num_gpus == 0
    replica = REPLICA_OVERHEAD + (config.engine.pool if on_cpu else 0)
    need = store + config.replicas.count * replica
    if on_cpu and need > limit:
        raise ConfigError(
            "engine.pool",
            f"the store ({_gib(store)}) and {config.replicas.count} replicas of {_gib(replica)} "
            f"need {_gib(need)}, this machine allows {_gib(limit)}; lower engine.pool, "
            "store.dram or replicas.count",
        )
    cpus = len(os.sched_getaffinity(0))
    if on_cpu and config.engine.threads > cpus:
        raise ConfigError("engine.threads", f"{config.engine.threads} on a machine of {cpus} cores")


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}GiB"
