"""What a container is made of, for tests: a memory cgroup, and a /dev/shm of its own size."""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path

import pytest

from tests.waiting import WAIT_S, eventually

CGROUPS = Path("/sys/fs/cgroup")


class Cgroup:
    """A memory cgroup of `limit` bytes, version 1 or 2. Raises OSError where none can be made."""

    def __init__(self, limit: int) -> None:
        first = (CGROUPS / "memory").is_dir()
        self.folder = (CGROUPS / "memory" if first else CGROUPS) / f"mooncake-{uuid.uuid4().hex}"
        self._limit = "memory.limit_in_bytes" if first else "memory.max"
        self._usage = "memory.usage_in_bytes" if first else "memory.current"
        self.folder.mkdir()
        try:
            (self.folder / self._limit).write_text(str(limit))
        except OSError:
            self.folder.rmdir()
            raise

    @property
    def as_root(self) -> str:
        """A mount after which it is all there is, as processes in a container see their own."""
        return f"mount --bind {self.folder} {self.folder.parent}"

    @property
    def usage(self) -> int:
        return int((self.folder / self._usage).read_text())

    def command(self, *arguments: str) -> list[str]:
        """A command that runs inside."""
        return ["sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh", *arguments]

    def close(self) -> None:
        eventually(lambda: not (self.folder / "cgroup.procs").read_text())
        self.folder.rmdir()


def with_dev_shm(size: str, *mounts: str) -> list[str]:
    """What a command is to follow that sees a /dev/shm of `size` and other `mounts`.

    Skips the test where none can be made.
    """
    steps = [f"mount -t tmpfs -o size={size} tmpfs /dev/shm", *mounts, 'exec "$@"']
    command = ["unshare", "-m", "sh", "-c", " && ".join(steps), "sh"]
    tried = subprocess.run([*command, "true"], capture_output=True, timeout=WAIT_S, check=False)
    if tried.returncode:
        pytest.skip(f"no mount namespace can be made here: {tried.stderr.decode().strip()}")
    return command
