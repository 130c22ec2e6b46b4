"""Documented commands that stay in the foreground or take minutes; `make test-slow` runs them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from mooncake_serve.errors import StoreError
from mooncake_serve.store import StoreClient
from tests.docs.blocks import Block, marked
from tests.docs.running import environment, expanded, run, scratch
from tests.e2e.cluster import free_port
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
MINUTES_S = 1500.0
START_S = 300.0
END_S = 120.0
STORE_EXAMPLE = """
import os
token_ids = list(range(1024))
blocks = [os.urandom(60 * 256 * 192 * 2) for _ in range(4)]
buffers = [bytearray(60 * 256 * 192 * 2) for _ in range(4)]
"""
"""What a reader of the store's example has: token ids, and blocks of them."""


@contextmanager
def foreground(code: str, folder: Path, ready: Callable[[], Any]) -> Iterator[None]:
    """Run until it is ready, and end it with Ctrl-C; it must end well."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {code}"],
        cwd=folder,
        env=environment(RAY_USAGE_STATS_ENABLED="0"),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        eventually(lambda: process.poll() is not None or ready(), START_S)
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        yield
        # A terminal's Ctrl-C reaches the whole foreground group.
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=END_S)
        assert process.returncode in {0, 1, 130, -signal.SIGINT}, said[-4000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def with_free_ports(folder: Path) -> str:
    """The repository's application on ports of this test; its URL."""
    deployments = folder / "deployments"
    shipped = deployments.resolve()
    deployments.unlink()
    deployments.mkdir()
    for path in shipped.iterdir():
        config = yaml.safe_load(path.read_text("utf-8"))
        config["http_options"]["port"] = free_port()
        variables = config.get("controller_options", {}).get("runtime_env", {}).get("env_vars", {})
        variables |= {name: str(free_port()) for name in variables if name.endswith("_PORT")}
        (deployments / path.name).write_text(yaml.safe_dump(config))
    port = yaml.safe_load((deployments / "app.yaml").read_text())["http_options"]["port"]
    return f"http://127.0.0.1:{port}"


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def serves(socket: Path) -> bool:
    try:
        with StoreClient.connect(socket, ingest_bytes=0) as client:
            client.ping()
    except StoreError:
        return False
    return True


@pytest.mark.parametrize("block", marked("in the foreground"), ids=str)
def test_what_stays_in_the_foreground(block: Block, tmp_path: Path) -> None:
    (command,) = expanded(block.code).strip().splitlines()
    folder = scratch(tmp_path)
    if " store " not in command:
        url = with_free_ports(folder)
        with foreground(command, folder, lambda: answers(url)):
            body = {"model": "smollm2-135m", "prompt": "Once", "max_tokens": 4}
            told = httpx.post(f"{url}/v1/completions", json=body, timeout=END_S)
            assert told.json()["usage"]["completion_tokens"] == 4
        return
    socket = tmp_path / "kv" / "store.sock"
    command = command.replace("/tmp/kv", str(socket.parent)).replace("4GiB", "256MiB")
    with foreground(command.replace(":9400", f":{free_port()}"), folder, lambda: serves(socket)):
        for example in marked("with a store"):
            code = example.code.replace("/tmp/kv", str(socket.parent))
            run(STORE_EXAMPLE + code, folder, END_S, example.language)


@pytest.mark.parametrize("block", marked("in minutes"), ids=str)
def test_what_takes_minutes(block: Block, tmp_path: Path) -> None:
    """As documented, but for `--quick`: a test is no measurement."""
    code = expanded(block.code, extra="--quick")
    lines = [
        f"{line} --quick"
        if line.startswith("mooncake-serve bench ") and "--quick" not in line
        else line
        for line in code.splitlines()
    ]
    run("\n".join(lines), scratch(tmp_path), MINUTES_S, RAY_USAGE_STATS_ENABLED="0")
