"""A Ray with Serve for a benchmark, in the fast mode that `deployments/app.yaml` ships.

Everything listens on loopback and free ports, HAProxy's files are in a folder of their own, and all
processes end with the `with` block, so that a server that runs on the machine is not disturbed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
import ray
import yaml
from ray import serve
from ray.serve.scripts import cli

from mooncake_serve.errors import Unavailable

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "deployments" / "app.yaml"
READY_WAIT_S = 300.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def proxy_settings(folder: str) -> dict[str, str]:
    """The environment of `deployments/app.yaml`, with ports and files of our own."""
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    return {
        **config["controller_options"]["runtime_env"]["env_vars"],
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/haproxy.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/haproxy-state",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
    }


class Serving:
    """Ray and Serve in this process and its children.

    Applications are deployed from a config, as `serve run` does it: built in a process that has the
    controller's environment. A handle made here would send by actor calls, not by gRPC.
    """

    def __enter__(self) -> Self:
        # Short: a Unix socket's path has 108 bytes.
        self._folder = tempfile.TemporaryDirectory(prefix="mkb-")
        self._applications: dict[str, dict[str, Any]] = {}
        self.port = free_port()
        os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        # "local": not a cluster that somebody has running on this machine.
        ray.init(
            "local", num_cpus=8, include_dashboard=False, log_to_driver=False, namespace="serve"
        )
        self._settings = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "controller_options": {"runtime_env": {"env_vars": proxy_settings(self._folder.name)}},
        }
        return self

    def run(self, name: str, args: dict[str, Any], build: str = "mooncake_serve.app:build") -> str:
        """Deploy what `build` makes of `args` under its own prefix: its URL, once it answers."""
        prefix = f"/{name}"
        self._applications[name] = {
            "name": name,
            "route_prefix": prefix,
            "import_path": build,
            "args": args,
        }
        self._submit()
        url = f"http://127.0.0.1:{self.port}{prefix}"
        deadline = time.monotonic() + READY_WAIT_S
        while not (self._running(name) and _listens(url)):
            if time.monotonic() > deadline:
                raise Unavailable(f"{name} does not answer after {READY_WAIT_S:.0f} s")
            time.sleep(0.2)
        return url

    def delete(self, name: str) -> None:
        """Take an application down; its processes have ended when this returns."""
        del self._applications[name]
        self._submit()
        deadline = time.monotonic() + READY_WAIT_S
        while name in serve.status().applications:
            if time.monotonic() > deadline:
                raise Unavailable(f"{name} still runs after {READY_WAIT_S:.0f} s")
            time.sleep(0.2)

    def _submit(self) -> None:
        config = Path(self._folder.name) / "serve.yaml"
        applications = list(self._applications.values())
        config.write_text(yaml.safe_dump({**self._settings, "applications": applications}))
        with contextlib.redirect_stdout(sys.stderr):
            cli.main(["run", "--non-blocking", str(config)], standalone_mode=False)

    def _running(self, name: str) -> bool:
        application = serve.status().applications.get(name)
        if application is not None and application.status == "DEPLOY_FAILED":
            raise Unavailable(f"{name} was not deployed: {application.message}")
        return application is not None and application.status == "RUNNING"

    def replica_pids(self, name: str) -> list[int]:
        """Every process of an application: its ingress and its model's replicas."""
        title = f"ray::ServeReplica:{name}:"
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if " ".join(process.cmdline()).startswith(title):
                    found.append(process.pid)
        return found

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        children = psutil.Process().children(recursive=True)
        ray.shutdown()
        # HAProxy drains for half a minute when asked politely.
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(children, timeout=20)
        self._folder.cleanup()


def _listens(url: str) -> Any:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/openapi.json", timeout=5).status_code == 200
    return False


def shipped_args(**sections: dict[str, Any]) -> dict[str, Any]:
    """`args:` of `deployments/app.yaml` with some settings changed, keeping no files."""
    args = yaml.safe_load(CONFIG.read_text("utf-8"))["applications"][0]["args"]
    changes: dict[str, dict[str, Any]] = {"api": {"state_dir": None}, **sections}
    for section, values in changes.items():
        args[section] = {**args.get(section, {}), **values}
    return args
