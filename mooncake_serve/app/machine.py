"""Does the configuration fit this machine? Checked before Ray is asked for anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from mooncake_serve.config import GIB, AppConfig
from mooncake_serve.errors import ConfigError

OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")
REPLICA_OVERHEAD = GIB // 2
"""A replica's process without weights and KV: Python, torch, Ray."""


def memory_limit(cgroups: Path = OWN_CGROUPS, mount: Path = CGROUP_MOUNT) -> int:
    """Bytes this process may use: the machine's, or the least of its cgroups' if that is less."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _limit_files(cgroups, mount):
        try:
            text = path.read_text("ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            limit = min(limit, int(text))
    return limit


def _limit_files(cgroups: Path, mount: Path) -> Iterator[Path]:
    """Of each cgroup from this process's to the root; some do not exist."""
    try:
        lines = cgroups.read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, name = mount, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's; the root is then the container's own.
        own = base / path.lstrip("/")
        yield from (folder / name for folder in (own, *own.parents) if folder.is_relative_to(base))


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
