"""`mooncake-serve doctor`: can this machine run a store, and what should change?"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

FDS_WANTED = 4096
# Linux's <linux/memfd.h> and <linux/fcntl.h>; the names are missing from Python's fcntl.
F_ADD_SEALS = 1033
F_SEAL_FUTURE_WRITE = 0x10


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found and, when it is not good, what to change."""

    name: str
    ok: bool
    found: str
    fix: str = ""


def _memory() -> Finding:
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text("ascii").splitlines()
    )
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return Finding("memory", True, f"{available / 2**30:.1f} GiB available")


def _cgroup() -> Finding:
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text("ascii").strip() if limit.exists() else "max"
    if text == "max":
        return Finding("cgroup memory", True, "no limit")
    return Finding(
        "cgroup memory",
        True,
        f"limit {int(text) / 2**30:.1f} GiB, shared by store, replicas and Ray",
    )


def _seals() -> Finding:
    import fcntl

    fd = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    except OSError as err:
        return Finding("memfd seals", False, str(err), "run a Linux kernel of 5.1 or newer")
    finally:
        os.close(fd)
    return Finding("memfd seals", True, "write seals work")


def _peer_pidfd() -> Finding:
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    if release >= (6, 5):
        return Finding("client liveness", True, "by pidfd")
    return Finding(
        "client liveness", True, "by end of file only", "Linux 6.5 also notices forked children"
    )


def _fds() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ok = soft >= FDS_WANTED
    return Finding("open files", ok, f"{soft} (hard {hard})", "" if ok else "ulimit -n 65536")


CHECKS = (_memory, _cgroup, _seals, _peer_pidfd, _fds)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check this machine and say what to change. Exits non-zero when a store could not run."""
    findings = [check() for check in CHECKS]
    if as_json:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps({"checks": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            mark = "ok " if finding.ok else "BAD"
            fix = f"; {finding.fix}" if finding.fix else ""
            typer.echo(f"{mark} {finding.name}: {finding.found}{fix}")
    sys.exit(0 if all(finding.ok for finding in findings) else 1)
