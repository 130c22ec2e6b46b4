"""Mixed load on a store with a disk tier, with random kills: no wrong byte, and nothing leaks.

    python -m tests.store.soak --seconds 120 --seed 7

Workers put, match, read, lease, pin and evict blocks whose bytes follow from their keys, so that
each read can be checked by whoever makes it. Now and then a worker, all of them, or the store is
killed with SIGKILL and replaced. After every kill of a worker its sessions must end and the
accounts hold; once all are dead, nothing may be held: no lease, no reservation, no descriptor, and
no more private memory than when the store was first at rest. Disk and shared memory stay within
their caps.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mooncake_serve.errors import StoreError
from mooncake_serve.store import BlockShape, Hint, StoreClient, block_keys
from tests.store.processes import MIB, Process
from tests.waiting import eventually

NBYTES = 256 << 10
SHAPE = BlockShape.opaque(NBYTES)
CHAIN = 12
CHAINS = 60
WORKERS = 4
DRAM = 64 * MIB
DISK = 160 * MIB
SESSIONS = 3
"""Of one client at most."""
FDS_MAX = 64
"""Of a store with all workers attached: sockets, memfds, the disk, threads' events."""
FDS_SPARE = 8
PRIVATE_SPARE = 24 * MIB
"""Between two rests of one store: pools of threads and allocators that fill up once."""


def keys_of(chain: int) -> list[bytes]:
    return block_keys(f"soak {chain}", b"", range(CHAIN), 1)


def content(key: bytes) -> bytes:
    return key * (NBYTES // len(key))


def work(socket: str, seed: int) -> None:
    """Until killed; a wrong byte ends the process with a message."""
    rng = random.Random(seed)
    buffers = [bytearray(NBYTES) for _ in range(CHAIN)]
    while True:
        try:
            with StoreClient.connect(socket, timeout_s=5.0) as client:
                sys.stdout.write("attached\n")
                sys.stdout.flush()
                while True:
                    step(client, rng, buffers)
        except StoreError:
            time.sleep(0.1)


def step(client: StoreClient, rng: random.Random, buffers: list[bytearray]) -> None:
    keys = keys_of(min(int(rng.expovariate(1 / 12)), CHAINS - 1))
    count = rng.randint(1, CHAIN)
    hint = Hint(session_end=rng.random() < 0.2, expected_reuse_s=rng.choice([0, 0, 5, 600]))
    match rng.randrange(20):
        case 0:
            client.evict(keys[rng.randrange(CHAIN) :])
        case 1:
            client.pin(keys[:1], ttl_s=1)
        case 2:
            held = client.lease(keys[:count], hint=hint)
            time.sleep(rng.random() * 0.05)
            del held
        case n if n < 10:
            blocks = [content(key) for key in keys[:count]]
            client.put(keys[:count], [None, *keys[: count - 1]], blocks, SHAPE, hint=hint)
        case _:
            matched = client.match(keys)
            read = client.read_into(keys[:matched], buffers[:matched], hint=hint)
            for key, buffer in zip(keys[:read], buffers, strict=False):
                if buffer != content(key):
                    sys.exit("a read gave wrong bytes")


class Worker:
    """One loading process."""

    def __init__(self, socket: Path, seed: int) -> None:
        command = [sys.executable, "-m", "tests.store.soak", "--work", str(socket), str(seed)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def check(self) -> None:
        assert self.process.poll() is None, "a worker found wrong bytes, or failed"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def accounted(client: StoreClient) -> dict[str, Any]:
    """The store's counters, in which every byte must be somewhere."""
    stats = client.stats()
    parts = ("free", "reserved", "resident", "leased", "quarantined")
    assert sum(stats[f"{part}_bytes"] for part in parts) == stats["capacity_bytes"]
    return stats


def settled(client: StoreClient) -> bool:
    """Nothing is held, and every byte is accounted for."""
    stats = accounted(client)
    held = stats["leases"] + stats["reserved_bytes"] + stats["quarantined_bytes"]
    return held == 0 and stats["sessions"] <= SESSIONS


def ended(client: StoreClient, left: int) -> None:
    """Wait until there are sessions of `client` and so many workers only."""
    eventually(lambda: accounted(client)["sessions"] <= SESSIONS * (left + 1))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident(pid: int, kind: str) -> int:
    """Bytes of a process's memory, RssAnon or RssShmem."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith(kind))


def bounded(pid: int, nvme: Path) -> None:
    """The store's descriptors, shared memory and disk."""
    assert descriptors(pid) <= FDS_MAX, f"{descriptors(pid)} descriptors"
    shared = resident(pid, "RssShmem")
    assert shared <= DRAM, f"{shared >> 20} MiB of shared memory"
    du = subprocess.run(["du", "-s", "-B1", nvme], capture_output=True, check=True, timeout=60)
    assert int(du.stdout.split()[0]) <= DISK, f"{int(du.stdout.split()[0]) >> 20} MiB on disk"


class Rest:
    """What a store takes at rest; a later rest must not take more."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[int, int]] = {}

    def check(self, pid: int, client: StoreClient) -> None:
        eventually(lambda: settled(client))
        fds, private = descriptors(pid), resident(pid, "RssAnon")
        first_fds, first_private = self._first.setdefault(pid, (fds, private))
        assert fds <= first_fds + FDS_SPARE, f"{first_fds} descriptors, then {fds}"
        grown = private - first_private
        assert grown <= PRIVATE_SPARE, f"{grown >> 20} MiB of private memory more"


def run(seconds: float, seed: int) -> dict[str, int]:
    """Load and kill for that long; what happened."""
    rng = random.Random(seed)
    done = {"seed": seed, "workers_killed": 0, "stores_killed": 0, "rests": 0}
    rest = Rest()

    def worker() -> Worker:
        return Worker(socket, rng.randrange(1 << 32))

    with tempfile.TemporaryDirectory(prefix="mooncake-", dir="/var/tmp") as folder:
        socket, nvme = Path(folder) / "s" / "store.sock", Path(folder) / "nvme"
        store = Process("disk_store", socket, nvme, DRAM, DISK)
        workers = [worker() for _ in range(WORKERS)]
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(rng.uniform(0.2, 3.0))
                [each.check() for each in workers]
                bounded(store.pid, nvme)
                chance = rng.random()
                if chance < 0.15:
                    store.kill()
                    store = Process("disk_store", socket, nvme, DRAM, DISK)
                    done["stores_killed"] += 1
                    continue
                every = chance < 0.35
                killed = list(range(WORKERS)) if every else [rng.randrange(WORKERS)]
                [workers[at].kill() for at in killed]
                with StoreClient.connect(socket, timeout_s=30.0) as client:
                    ended(client, WORKERS - len(killed))
                    if every:
                        rest.check(store.pid, client)
                        done["rests"] += 1
                for at in killed:
                    workers[at] = worker()
                done["workers_killed"] += len(killed)
            [each.check() for each in workers]
            [each.kill() for each in workers]
            with StoreClient.connect(socket, timeout_s=30.0) as client:
                rest.check(store.pid, client)
                checked = client.verify(timeout_s=120.0)
                assert checked["corrupt"] == 0, checked
                done["blocks_checked"] = checked["checked"]
            bounded(store.pid, nvme)
        finally:
            [each.kill() for each in workers]
            store.kill()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work[0], int(options.work[1]))
    sys.stderr.write(f"seed {options.seed}\n")
    sys.stdout.write(f"{run(options.seconds, options.seed)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
