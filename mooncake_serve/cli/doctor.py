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

from mooncake_serve.budget import node_budget
from mooncake_serve.config import AppConfig
from mooncake_serve.errors import MooncakeError
from mooncake_serve.memory import memory_limit

MIB, GIB = 1 << 20, 1 << 30
FDS_WANTED = 4096
READ_WANTED = 200 * MIB
"""Bytes/s; from a slower disk a prefix comes hardly sooner than it is computed."""
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
    config = AppConfig()
    budget = node_budget(config, config.replicas.most_per_node, weights=0)
    found += (
        f"; by default the store, put buffers included, takes {budget.store / GIB:.1f} GiB and "
        f"{budget.replicas} replicas {budget.replica / GIB:.1f} GiB each, but for weights"
    )
    fix = f"give its container {budget.total / GIB:.0f} GiB, or lower store.dram and engine.pool"
    return Finding("memory", limit >= budget.total, found, fix)


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


def _disk(folder: Path) -> list[Finding]:
    from mooncake_serve.cli.disk import probe

    try:
        disk = probe(folder)
    except (MooncakeError, OSError) as err:
        fix = "name a directory of yours on a local disk, with 256 MiB of space"
        return [Finding("disk", False, str(err), fix)]
    reads = "reads are batched" if disk.io_uring else "refused here, threads read instead"
    direct = "works" if disk.direct_io else "refused here, blocks fill the page cache too"
    default = AppConfig.model_validate({"store": {"nvme": {"path": str(folder), "bytes": GIB}}})
    assert default.store.nvme is not None
    most = int(default.store.nvme.write_bytes_per_s)
    rates = [f"{rate / MIB:.0f} MiB/s" for rate in (disk.write_rate, disk.read_rate, most)]
    return [
        Finding("io_uring", disk.io_uring, reads, "allow it in the container's seccomp profile"),
        Finding("direct I/O", disk.direct_io, direct, "use a local file system: ext4 or xfs"),
        Finding(
            "disk writes",
            disk.write_rate >= most,
            f"{rates[0]}; store.nvme.write_bytes_per_s allows {rates[2]} by default",
            f"set store.nvme.write_bytes_per_s to {max(int(disk.write_rate / 2 / MIB), 1)}MiB",
        ),
        Finding(
            "disk reads",
            disk.read_rate >= READ_WANTED,
            f"{rates[1]}, verified",
            "use a local NVMe disk: from this one prefixes come hardly sooner than computed",
        ),
    ]


CHECKS = (_memory, _seals, _liveness, _fds)


def doctor(
    nvme: Annotated[
        Path | None, typer.Option(help="Also check the disk of this directory, for store.nvme.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Check this machine and say what to change. Exits non-zero when something should be."""
    findings = [check() for check in CHECKS]
    if nvme is not None:
        findings += _disk(nvme)
    if as_json:
        typer.echo(json.dumps({"checks": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            mark = "ok " if finding.ok else "BAD"
            fix = "" if finding.ok else f"; {finding.fix}"
            typer.echo(f"{mark} {finding.name}: {finding.found}{fix}")
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)
