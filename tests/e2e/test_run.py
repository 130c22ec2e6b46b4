"""`mooncake-serve serve` as a container or a service manager runs it: SIGTERM is a planned stop."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from mooncake_serve.store import StoreClient, StoreServer
from tests.e2e.cluster import BLOCK_TOKENS, MODEL, ROOT, free_port, save_tiny_model
from tests.store.container import Cgroup, with_dev_shm
from tests.waiting import WAIT_S, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MIB = 1 << 20
START_S = 300.0
CONTAINER = 4 << 30
PROMPT = "what a container that is stopped must not lose, " * 12
BLOCKS = (len(PROMPT) - 1) // BLOCK_TOKENS
COMMAND = str(Path(sys.executable).with_name("mooncake-serve"))


def config(folder: Path, model: Path, nvme: Path) -> Path:
    """`deployments/app.yaml` with a tiny model, a disk and free ports; its file."""
    shipped = yaml.safe_load((ROOT / "deployments" / "app.yaml").read_text("utf-8"))
    shipped["http_options"]["port"] = free_port()
    variables = shipped["controller_options"]["runtime_env"]["env_vars"]
    variables |= {name: str(free_port()) for name in variables if name.endswith("_PORT")}
    (application,) = shipped["applications"]
    disk = {"path": str(nvme), "bytes": "64MiB"}
    application["args"] = {
        "model": {"id": str(model), "name": MODEL},
        "engine": {"threads": 1, "block_tokens": BLOCK_TOKENS, "pool": "64MiB"},
        "store": {"dram": "256MiB", "ingest": "8MiB", "socket_dir": str(folder), "nvme": disk},
        "replicas": {"count": 1, "num_cpus": 0.1},
        "api": {"state_dir": str(folder)},
    }
    path = folder / "app.yaml"
    path.write_text(yaml.safe_dump(shipped))
    return path


@contextmanager
def serving(
    app: Path, *, within: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process that serves `app`, started by `within`, and its URL."""
    url = f"http://127.0.0.1:{yaml.safe_load(app.read_text())['http_options']['port']}"
    with (app.parent / "log").open("w+") as log:
        process = subprocess.Popen(
            [*within, COMMAND, "serve", str(app)],
            # A Ray of its own, whatever else runs on this machine.
            env={**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
            start_new_session=True,
            text=True,
        )
        try:
            eventually(lambda: process.poll() is not None or answers(url), START_S)
            log.seek(0)
            assert process.poll() is None, log.read()[-4000:]
            yield process, url
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def complete(url: str, prompt: str) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).raise_for_status().json()


def in_store(folder: Path) -> int:
    """How many blocks the store with its socket in `folder` holds."""
    (path,) = folder.glob("*.sock")
    with StoreClient.connect(str(path), ingest_bytes=0, timeout_s=5.0) as client:
        return client.stats()["blocks"]


def on_disk(nvme: Path) -> int:
    """How many blocks a store that starts there finds."""
    with tempfile.TemporaryDirectory(prefix="mk-") as folder:
        options: dict[str, Any] = {"nvme_path": str(nvme), "nvme_bytes": 64 * MIB}
        server = StoreServer(socket=str(Path(folder) / "s"), dram_bytes=64 * MIB, **options)
        with server:
            return server.stats()["nvme_recovered_blocks"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: a Unix socket's path has 108 bytes."""
    with tempfile.TemporaryDirectory(prefix="mk-") as path:
        yield Path(path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_stop_loses_nothing(number: signal.Signals, folder: Path, model: Path) -> None:
    """Sent to the first process only, as `docker stop` does; a block nobody read is in memory."""
    app = config(folder, model, folder / "blocks")
    with serving(app) as (process, url):
        assert complete(url, PROMPT)["usage"]["completion_tokens"] == 4
        eventually(lambda: in_store(folder) >= BLOCKS)
        os.kill(process.pid, number)
        assert process.wait(WAIT_S) == 0
    assert on_disk(folder / "blocks") >= BLOCKS


def test_no_other_user_commands_the_proxy(folder: Path, model: Path) -> None:
    """HAProxy's admin socket lets in whoever reaches it: only the owner passes its directory."""
    with serving(config(folder, model, folder / "blocks")) as (process, _):
        children = psutil.Process(process.pid).children(recursive=True)
        proxy = next(child for child in children if child.name() == "haproxy")
        own = Path(proxy.cmdline()[proxy.cmdline().index("-f") + 1]).parents[1]
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        assert len(list(own.glob("*/admin.sock"))) == 1
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert not own.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")
def test_a_container_is_enough(folder: Path, model: Path) -> None:
    """Docker's own /dev/shm, a memory limit that holds the sum, SIGTERM at the end."""
    try:
        cgroup = Cgroup(CONTAINER)
    except OSError as err:
        pytest.skip(f"no memory cgroup can be made here: {err.strerror}")
    try:
        within = cgroup.command(*with_dev_shm("64m", cgroup.as_root))
        app = config(folder, model, folder / "blocks")
        with serving(app, within=within) as (process, url):
            assert complete(url, PROMPT)["usage"]["completion_tokens"] == 4
            assert cgroup.usage <= CONTAINER
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
    finally:
        cgroup.close()
