"""How things end: a store that nobody uses, and a `serve run` that has nothing to serve."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from mooncake_serve.config import StoreSettings
from mooncake_serve.store import StoreClient
from mooncake_serve.store_actor import StoreActor
from tests.e2e.cluster import ROOT, Cluster
from tests.waiting import WAIT_S, eventually

IDLE_S = 1.0


def test_a_store_leaves_when_nobody_has_been_attached_for_long(cluster: Cluster) -> None:
    del cluster
    settings = {"dram": "32MiB", "ingest": "1MiB", "idle_exit_s": IDLE_S}
    with tempfile.TemporaryDirectory(prefix="mk-") as folder:
        socket = str(Path(folder) / "store.sock")
        remote: Any = ray.remote(StoreActor)
        actor = remote.options(num_cpus=0).remote(
            socket, StoreSettings.model_validate(settings).model_dump(mode="json")
        )
        pid = ray.get(actor.pid.remote(), timeout=WAIT_S)
        with StoreClient.connect(socket, ingest_bytes=0) as client:
            time.sleep(3 * IDLE_S)
            client.ping()
        eventually(lambda: not psutil.pid_exists(pid))


@pytest.mark.slow
def test_a_bad_configuration_reaches_the_terminal_and_ends_serve_run(tmp_path: Path) -> None:
    """`serve run` itself, as a person would type it."""
    text = (ROOT / "deployments" / "app-plain-proxy.yaml").read_text("utf-8")
    config = tmp_path / "app.yaml"
    config.write_text(text.replace("threads: 1", "colour: red"))
    serve = Path(sys.executable).with_name("serve")
    done = subprocess.run(
        [serve, "run", str(config)],
        check=False,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        cwd=ROOT,
    )
    assert done.returncode != 0
    assert "engine.colour: unknown setting" in done.stdout + done.stderr
