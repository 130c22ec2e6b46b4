"""How much memory this process may use: the machine's, or its cgroups' if that is less."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

OWN_CGROUPS = Path("/proc/self/cgroup")
CGROUP_MOUNT = Path("/sys/fs/cgroup")


def memory_total() -> int:
    """Bytes of memory the machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_limit(cgroups: Path = OWN_CGROUPS, mount: Path = CGROUP_MOUNT) -> int:
    """Bytes this process may use: the machine's, or the least of its cgroups' if that is less."""
    limit = memory_total()
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
