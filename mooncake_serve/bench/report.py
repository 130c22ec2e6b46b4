"""What every benchmark reports alike: the machine, the version, one JSON object on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mooncake_serve


def machine() -> dict[str, Any]:
    """Cores this process may use, the CPU's name, memory in bytes."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": names[0] if names else "unknown",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def version() -> str:
    """`git describe` in a checkout, else the installed version."""
    root = Path(mooncake_serve.__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--tags"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return mooncake_serve.__version__


def progress(message: str) -> None:
    """Say on stderr what is being measured."""
    sys.stderr.write(f"  {message}\n")
    sys.stderr.flush()


def emit(result: dict[str, Any]) -> None:
    """Print one JSON object to stdout."""
    json.dump(result, sys.stdout, indent=2)
    sys.stdout.write("\n")


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of `times` calls, sorted."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)


def quantile(ordered: list[float], share: float) -> float:
    """The value below which `share` of an ordered list lies."""
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
