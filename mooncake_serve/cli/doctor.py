"""`mooncake-serve doctor`: can this machine run a store, and what should change?"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from mooncake_serve.memory import memory_limit

GIB = 1 << 30
FDS_WANTED = 4096
MEMORY_WANTED = 4 * GIB
"""A small store and one replica of the default model."""
# Linux's numbers; Python does not name them.
F_SEAL_FUTURE_WRITE = 0x10
SO_PEERPIDFD = 77


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what was found and, when it is not good, what to change."""

    name: str
    ok: bool
    found: str
    fix: str = ""


def _memory() -> Finding:
    text = Path("/proc/meminfo").read_text("ascii")
    fields = dict(line.split(":", 1) for line in text.splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = memory_limit()
    found = f"{available / GIB:.1f} GiB available, {limit / GIB:.1f} GiB allowed to this process"
    return Finding("memory", limit >= MEMORY_WANTED, found, "give its container 4 GiB or more")


def _seals() -> Finding:
    fd = os.memfd_create("doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
    except OSError as err:
        return Finding("memfd seals", False, str(err), "run a Linux kernel of 5.1 or newer")
    finally:
        os.close(fd)
    return Finding("memfd seals", True, "write seals work")


def _liveness() -> Finding:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError:
            found = "a client's death shows at its last descriptor; from Linux 6.5 on, at once"
            return Finding("client liveness", True, found)
    return Finding("client liveness", True, "a client's death shows at once")


def _fds() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} allowed (hard limit {hard})"
    return Finding("open files", soft >= FDS_WANTED, found, "ulimit -n 65536")


CHECKS = (_memory, _seals, _liveness, _fds)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check this machine and say what to change. Exits non-zero when a store could not run."""
    findings = [check() for check in CHECKS]
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            mark = "ok " if finding.ok else "BAD"
            fix = "" if finding.ok else f"; {finding.fix}"
            typer.echo(f"{mark} {finding.name}: {finding.found}{fix}")
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)
