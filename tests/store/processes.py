"""Real processes for store tests: a store, and clients that can be killed at a chosen moment.

Run as `python -m tests.store.processes <role> <args…>`; a role prints one line when it has reached
the state its name promises, and then waits to be killed.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from mooncake_serve.store import (
    BlockShape,
    PeerSettings,
    StoreClient,
    StoreServer,
    block_keys,
)
from tests.waiting import eventually

MIB = 1 << 20


def chain(name: str, blocks: int) -> tuple[list[bytes], list[bytes | None]]:
    """Keys of a chain of blocks, and their parents."""
    keys = block_keys(name, b"", range(4 * blocks), 4)
    return keys, [None, *keys[:-1]]


class Process:
    """A role in a process of its own; killed at the end of `with`."""

    def __init__(self, role: str, *args: object) -> None:
        command = [sys.executable, "-m", "tests.store.processes", role, *map(str, args)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.said = self.listen()
        assert self.said, f"{role} died before it was ready"

    def listen(self) -> str:
        """What it prints next; "" if it ends instead."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP, and wait until every thread has stopped."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.pid}/task")
        stats = [task / "stat" for task in tasks.iterdir()]
        eventually(
            lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()


def store(socket: Path, dram_mib: int = 64) -> Process:
    """A store process that serves `socket`."""
    return Process("store", socket, dram_mib * MIB)


def run_store(socket: str, dram_bytes: str) -> None:
    server = StoreServer(socket=socket, dram_bytes=int(dram_bytes))
    server.start()
    say_and_wait("serving")


def run_few_fds_store(socket: str, dram_bytes: str, fds: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(fds), int(fds)))
    run_store(socket, dram_bytes)


def run_disk_store(socket: str, nvme: str, dram_bytes: str, nvme_bytes: str) -> None:
    server = StoreServer(
        socket=socket, dram_bytes=int(dram_bytes), nvme_path=nvme, nvme_bytes=int(nvme_bytes)
    )
    server.start()
    say_and_wait("serving")


def run_quota_store(socket: str, dram_bytes: str, tenant_bytes: str, nvme: str, disk: str) -> None:
    """No quota for a `tenant_bytes` of 0, no disk for a `disk` of 0."""
    options: dict[str, Any] = {}
    if int(tenant_bytes):
        options |= {"tenant_bytes": int(tenant_bytes), "tenant_nvme_bytes": int(disk) // 4}
    if int(disk):
        options |= {"nvme_path": nvme, "nvme_bytes": int(disk)}
    server = StoreServer(socket=socket, dram_bytes=int(dram_bytes), **options)
    server.start()
    say_and_wait("serving")


def run_peer_store(socket: str, name: str, address: str, nvme: str) -> None:
    """Meets the peers that lines on its standard input name, and answers each line."""
    peer = PeerSettings(node=name, listen=f"{address}:7400", token=b"of these tests' stores")
    disk: dict[str, Any] = {"nvme_path": nvme, "nvme_bytes": 64 * MIB}
    server = StoreServer(socket=socket, dram_bytes=32 * MIB, peer=peer, **disk)
    server.start()
    say("serving")
    for line in sys.stdin:
        server.set_peers(line.split())
        say("met")


def run_flood(socket: str, tenant: str, nbytes: str) -> None:
    """Puts blocks of a tenant until it is killed; says when it has put a thousand."""
    client = StoreClient.connect(socket)
    shape = BlockShape.opaque(int(nbytes))
    block = os.urandom(int(nbytes))
    for round_ in range(1_000_000):
        keys, parents = chain(f"{tenant}/{round_}", 8)
        client.put(keys, parents, [block] * 8, shape, tenant)
        if round_ == 125:
            say("a thousand blocks")


def run_hold_leases(socket: str, name: str, blocks: str) -> None:
    client = StoreClient.connect(socket)
    keys, _ = chain(name, int(blocks))
    leases = client.lease(keys)
    say_and_wait(f"{sum(lease is not None for lease in leases)} leases")


def run_hold_and_read(socket: str, name: str, blocks: str) -> None:
    """Says the digest of what it has leased, and again at a SIGUSR1."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    client = StoreClient.connect(socket)
    keys, _ = chain(name, int(blocks))
    leases = client.lease(keys)
    for _ in range(2):
        views = [memoryview(lease) for lease in leases if lease is not None]
        say(hashlib.sha256(b"".join(views)).hexdigest())
        signal.sigwait([signal.SIGUSR1])


def run_hold_leases_forked(socket: str, name: str, blocks: str) -> None:
    """Holds leases, and has a child that inherited the socket and outlives it."""
    client = StoreClient.connect(socket)
    keys, _ = chain(name, int(blocks))
    leases = client.lease(keys)
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    del leases[0]
    say_and_wait(str(child))


def run_put_for_ever(socket: str, name: str, nbytes: str) -> None:
    client = StoreClient.connect(socket)
    shape = BlockShape.opaque(int(nbytes))
    say("putting")
    for round_ in range(1_000_000):
        keys, parents = chain(f"{name}/{round_}", 4)
        block = bytes([round_ % 256]) * int(nbytes)
        client.put(keys, parents, [block] * 4, shape)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def say_and_wait(line: str) -> None:
    say(line)
    signal.pause()


if __name__ == "__main__":
    globals()[f"run_{sys.argv[1]}"](*sys.argv[2:])
