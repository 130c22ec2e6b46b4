"""Mooncake Store, measured in the same run as ours: put and get of the same blocks.

Its master and the process that owns the memory segment run beside a client process, in the two ways
that its documentation describes: a client that shares memory with that process, as applications on
the segment's node do, and one that reaches it over TCP. Buffers are registered and touched before.
Whatever cannot be measured is null, with a reason.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import socket as sockets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from mooncake_serve.bench.report import progress, quantile

MIB = 1 << 20
MODES = {"shared memory": "mooncake", "tcp": "mooncake_tcp"}
"""How a client reaches the segment, and what the keys of its figures begin with."""
DISTINCT = 8
LEASE_S = 0.1
"""How long the master keeps what was read: no block is removed before that."""
READY_S = 60.0
HOST = "127.0.0.1"


class Mooncake:
    """Clients of one Mooncake Store, each a process of its own."""

    def __init__(self, clients: dict[str, subprocess.Popen[str]], why: dict[str, str]) -> None:
        self._clients = clients
        self._why = why

    def measure(self, nbytes: int, count: int) -> dict[str, float | None]:
        """`PREFIX_put_gb_s` and `PREFIX_get_gb_s` of every mode; medians over distinct blocks."""
        figures: dict[str, float | None] = {}
        for mode, prefix in MODES.items():
            client = self._clients.get(mode)
            answer = _ask(client, nbytes, count) if client else {}
            if client and "error" in answer:
                self._why[f"{prefix}_gb_s"] = answer["error"]
            for name in ("put_gb_s", "get_gb_s"):
                figures[f"{prefix}_{name}"] = answer.get(name)
        return figures


@contextmanager
def mooncake_store(nbytes: int, why: dict[str, str]) -> Iterator[Mooncake]:
    """A Mooncake Store with a segment of `nbytes`; without clients, and the reason in `why`, where
    it is not installed or does not start."""
    clients: dict[str, subprocess.Popen[str]] = {}
    if importlib.util.find_spec("mooncake") is None:
        why["mooncake_gb_s"] = why["mooncake_tcp_gb_s"] = (
            "Mooncake Store is not installed (pip install mooncake-transfer-engine-non-cuda)"
        )
        yield Mooncake(clients, why)
        return
    progress("starting Mooncake Store")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-")))
        try:
            _start(stack, folder, nbytes, clients)
        except (OSError, RuntimeError) as error:
            for prefix in MODES.values():
                why[f"{prefix}_gb_s"] = f"Mooncake Store did not start ({error})"
            clients.clear()
        yield Mooncake(clients, why)


def _start(
    stack: ExitStack, folder: Path, nbytes: int, clients: dict[str, subprocess.Popen[str]]
) -> None:
    """Master, owner of the segment, and a client of each mode that answers."""
    master, owner = _free_port(), _free_port()
    log = stack.enter_context((folder / "log").open("w"))
    flags = [f"--rpc_port={master}", f"--metrics_port={_free_port()}", f"--rpc_address={HOST}"]
    flags.append(f"--default_kv_lease_ttl={int(LEASE_S * 1000)}")
    stack.enter_context(_running(["mooncake.cli", *flags], log))
    _wait_for(master)
    flags = [f"--host={HOST}", f"--port={owner}", f"--global_segment_size={nbytes // MIB}MB"]
    flags += [f"--master_server_address={HOST}:{master}", "--metadata_server=P2PHANDSHAKE"]
    stack.enter_context(_running(["mooncake.cli_client", *flags, "--protocol=tcp"], log))
    _wait_for(owner)
    for mode in MODES:
        command = ["mooncake_serve.bench.store_mooncake", mode, str(master), str(owner)]
        client = stack.enter_context(_running(command, log))
        assert client.stdout is not None
        if client.stdout.readline() != "ready\n":
            raise RuntimeError(f"no client over {mode}: {_tail(folder / 'log')}")
        clients[mode] = client


@contextmanager
def _running(module: list[str], log: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", *module]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _ask(client: subprocess.Popen[str], nbytes: int, count: int) -> dict[str, Any]:
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(f"{nbytes} {count}\n")
    client.stdin.flush()
    line = client.stdout.readline()
    return json.loads(line) if line else {"error": "its client ended"}


def _free_port() -> int:
    with sockets.create_server((HOST, 0)) as server:
        return server.getsockname()[1]


def _wait_for(port: int) -> None:
    patience = time.monotonic() + READY_S
    while True:
        try:
            sockets.create_connection((HOST, port), 1.0).close()
        except OSError as error:
            if time.monotonic() > patience:
                raise RuntimeError(f"nothing listens on port {port}") from error
            time.sleep(0.05)
        else:
            return


def _tail(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "its log is empty"


def _serve(mode: str, master: str, owner: str) -> None:
    """Be a client: sizes and counts come on stdin, figures go to stdout."""
    # The library and its children may write to stdout, which is ours.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from mooncake.store import MooncakeDistributedStore  # pyright: ignore[reportMissingImports]

    store = MooncakeDistributedStore()
    room = 256 * MIB
    if mode == "tcp":
        code = store.setup(HOST, "P2PHANDSHAKE", 0, room, "tcp", "", f"{HOST}:{master}")
    else:
        code = store.setup_dummy(room, room, f"{HOST}:{owner}")
    if code:
        raise SystemExit(f"its client answered {code}")
    answers.write("ready\n")
    answers.flush()
    for line in sys.stdin:
        nbytes, count = map(int, line.split())
        try:
            answer = _measure(store, mode, nbytes, count)
        except RuntimeError as error:
            answer = {"error": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _measure(store: Any, mode: str, nbytes: int, count: int) -> dict[str, Any]:
    """Put `count` blocks and get each once, into and from registered buffers."""
    room = 2 * DISTINCT * nbytes
    memory = None
    if mode == "tcp":
        from mooncake_serve.bench.store_peers import touched

        memory = touched(1, room)
        start = memory.ctypes.data
    else:
        start = store.alloc_from_mem_pool(room)
    buffers = (ctypes.c_ubyte * room).from_address(start)
    ctypes.memmove(buffers, os.urandom(DISTINCT * nbytes), DISTINCT * nbytes)
    ctypes.memset(start + room // 2, 1, room // 2)
    _check(store.register_buffer(start, room), "register_buffer")
    keys = [f"bench {nbytes} {at}" for at in range(count)]
    _put_all(store, start, nbytes, keys)
    # Twice, because the segment's pages may be touched for the first time in the first round.
    _remove_all(store)
    puts = _put_all(store, start, nbytes, keys)
    gets = []
    for at, key in enumerate(keys):
        offset = at % DISTINCT * nbytes
        target = start + room // 2 + offset
        begun = time.perf_counter()
        got = store.get_into(key, target, nbytes)
        gets.append(time.perf_counter() - begun)
        if got != nbytes or ctypes.string_at(target, 64) != ctypes.string_at(start + offset, 64):
            raise RuntimeError(f"a block of {nbytes} bytes could not be read back ({got})")
    _remove_all(store)
    _check(store.unregister_buffer(start), "unregister_buffer")
    rate = {"put_gb_s": puts, "get_gb_s": gets}
    return {name: nbytes / quantile(sorted(took), 0.5) / 1e9 for name, took in rate.items()}


def _put_all(store: Any, start: int, nbytes: int, keys: list[str]) -> list[float]:
    seconds = []
    for at, key in enumerate(keys):
        source = start + at % DISTINCT * nbytes
        begun = time.perf_counter()
        code = store.put_from(key, source, nbytes)
        seconds.append(time.perf_counter() - begun)
        _check(code, f"put_from of {nbytes} bytes")
    return seconds


def _remove_all(store: Any) -> None:
    time.sleep(2 * LEASE_S)
    if store.remove_all() < 0:
        raise RuntimeError("remove_all failed")


def _check(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} answered {code}")


if __name__ == "__main__":
    _serve(*sys.argv[1:])
