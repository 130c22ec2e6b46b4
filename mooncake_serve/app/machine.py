"""Does the configuration fit this machine? Checked before Ray is asked for anything."""

from __future__ import annotations

import os

from mooncake_serve.budget import node_budget, on_cpu
from mooncake_serve.config import AppConfig
from mooncake_serve.errors import ConfigError
from mooncake_serve.memory import memory_limit


def check_machine(config: AppConfig, *, weights: int = 0, limit: int | None = None) -> None:
    """Raise ConfigError when store and replicas together need more than there is.

    Each replica has `weights` bytes; `limit` is this machine's memory unless it is given.
    """
    budget = node_budget(config, config.replicas.most_per_node, weights)
    budget.check(memory_limit() if limit is None else limit)
    cpus = len(os.sched_getaffinity(0))
    if on_cpu(config) and config.engine.threads > cpus:
        raise ConfigError("engine.threads", f"{config.engine.threads} on a machine of {cpus} cores")
