"""`serve run`, but an application that cannot be deployed ends it.

Ray's `serve run` submits a config and then sleeps, whatever becomes of it. Here it runs in the main
thread of this process, as Ray wrote it, while another thread watches the applications: when one
cannot be deployed, the reason is printed and the exit status is 1. Ctrl-C and SIGTERM both stop as
Ctrl-C stops `serve run`, once the stores have written to disk what only memory has.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview
from ray.serve.scripts import cli

from mooncake_serve.app import stores

POLL_S = 1.0
PROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}
"""Where Ray lets HAProxy put its files, and their names; each in a folder of its Ray node."""


def run(config: Path) -> int:
    """Run the applications of `config` until it is told to stop or one fails to deploy: status."""
    # A shell script's background jobs ignore Ctrl-C, and then nothing could end this one.
    signal.signal(signal.SIGINT, _interrupt)
    with _private_proxy_files():
        # `serve run` would do this, and `ray.init` takes SIGTERM for a handler that drains nothing.
        ray.init(namespace=SERVE_NAMESPACE)
        signal.signal(signal.SIGTERM, _interrupt)
        return _serve_run(config)


def _serve_run(config: Path) -> int:
    failures: list[str] = []
    threading.Thread(target=_watch, args=(failures,), name="deployments", daemon=True).start()
    try:
        cli.main(["run", str(config)], standalone_mode=False)
    except SystemExit:
        if not failures:
            raise
    for failure in failures:
        print(f"mooncake-serve: {failure}", file=sys.stderr)
    return 1 if failures else 0


@contextmanager
def _private_proxy_files() -> Iterator[None]:
    """Keep other users of this machine from HAProxy, if Ray is started here.

    In /tmp, where Ray has it put them, everybody may connect to the socket that commands it.
    """
    # Short: with the id of a Ray node the sockets' paths have 97 bytes at most.
    with tempfile.TemporaryDirectory(prefix="mk-", ignore_cleanup_errors=True) as folder:
        for variable, name in PROXY_FILES.items():
            os.environ.setdefault(variable, str(Path(folder) / name))
        yield


def _interrupt(_number: int, _frame: object) -> None:
    """A Ray that was started here ends with us, so the stores write to disk first."""
    for number in (signal.SIGINT, signal.SIGTERM):  # Another one does not wait for the disk.
        signal.signal(number, signal.default_int_handler)
    try:
        if ray.is_initialized():
            stores.drain(stores.nodes())
    except RayError as err:
        print(f"mooncake-serve: the stores were not asked to write to disk: {err}", file=sys.stderr)
    raise KeyboardInterrupt


def _watch(failures: list[str]) -> None:
    """Until everything runs, interrupt the main thread when an application fails to deploy."""
    while True:
        time.sleep(POLL_S)
        applications = _applications()
        for name, application in applications.items():
            if application.status == "DEPLOY_FAILED":
                failures.append(f"{name} was not deployed: {_reason(application)}")
        if failures:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if failures or "RUNNING" in {one.status for one in applications.values()}:
            return


def _reason(application: ApplicationStatusOverview) -> str:
    """The application's message, and the last line of what its deployments say."""
    said = [one.message for one in application.deployments.values() if one.status != "HEALTHY"]
    lines = [text.strip().splitlines()[-1] for text in (application.message, *said) if text.strip()]
    return " ".join(lines)


def _applications() -> dict[str, ApplicationStatusOverview]:
    if not ray.is_initialized():  # Asking for the status would start a Ray.
        return {}
    try:
        return serve.status().applications
    except (RayError, RayServeException):
        return {}
