"""Two stores in network namespaces of their own, joined by a veth pair that can be cut and healed.

Run as `python -m tests.cluster.namespaces NODE ADDRESS SOCKET` inside its namespace: says `here`,
starts the store at the first line it is told, and takes the addresses of its peers from later ones.
Sockets in the file system reach across network namespaces, so tests use the stores from outside.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACES = ("veth-a", "veth-b")
PORT = 7400
SECRET = b"a secret of 24 bytes, yes"


class Refused(Exception):
    """The kernel does not let us make namespaces."""


class Node:
    """A store's process in its namespace; killed at the end of `with`."""

    def __init__(self, at: int, folder: Path) -> None:
        self.address = f"{ADDRESSES[at]}:{PORT}"
        self.socket = str(folder / f"node{at}.sock")
        inside = [sys.executable, "-m", "tests.cluster.namespaces", f"node{at}", self.address]
        self._process = subprocess.Popen(
            ["unshare", "--net", *inside, self.socket],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._hear() != "here":
            raise Refused(_pipe(self._process.stderr).read().strip())

    def ip(self, *words: str) -> None:
        """Run `ip` in the namespace."""
        command = ["nsenter", "--target", str(self.pid), "--net", "ip", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Refused(f"{' '.join(words)}: {done.stderr.strip()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Start the store."""
        self._tell("start")
        assert self._hear() == "ready", _pipe(self._process.stderr).read()

    def meet(self, other: Node) -> None:
        """Make the other its peer."""
        self._tell(other.address)
        assert self._hear() == "met"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            _pipe(pipe).close()

    def _tell(self, line: str) -> None:
        _pipe(self._process.stdin).write(f"{line}\n")
        _pipe(self._process.stdin).flush()

    def _hear(self) -> str:
        return _pipe(self._process.stdout).readline().strip()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@contextmanager
def joined(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Two stores that know each other over a link of their own. Raises Refused."""
    with ExitStack() as stack:
        nodes = []
        for at in range(2):
            node = Node(at, folder)
            stack.callback(node.close)
            nodes.append(node)
        first, second = nodes
        peer = ["peer", "name", INTERFACES[1], "netns", str(second.pid)]
        first.ip("link", "add", INTERFACES[0], "type", "veth", *peer)
        for node, name, address in zip(nodes, INTERFACES, ADDRESSES, strict=True):
            node.ip("address", "add", f"{address}/24", "dev", name)
            node.ip("link", "set", name, "up")
            node.start()
        first.meet(second)
        second.meet(first)
        yield first, second


def cut(node: Node) -> None:
    """Nothing passes any more; nobody is told that a connection ended."""
    node.ip("link", "set", INTERFACES[0], "down")


def heal(node: Node) -> None:
    """The link is back, with the addresses it had."""
    node.ip("link", "set", INTERFACES[0], "up")


def main(name: str, address: str, socket: str) -> None:
    """See the module."""
    from mooncake_serve.store import PeerSettings, StoreServer

    print("here", flush=True)
    sys.stdin.readline()
    peer = PeerSettings(node=name, listen=address, token=SECRET)
    with StoreServer(socket=socket, dram_bytes=64 << 20, peer=peer) as server:
        server.start()
        print("ready", flush=True)
        for line in sys.stdin:
            server.set_peers([line.strip()])
            print("met", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
