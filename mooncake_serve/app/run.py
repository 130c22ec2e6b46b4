"""`serve run`, but an application that cannot be deployed ends it.

Ray's `serve run` submits a config and then sleeps, whatever becomes of it. Here it runs in the main
thread of this process, as Ray wrote it, while another thread watches the applications: when one
cannot be deployed, the reason is printed and the exit status is 1. Ctrl-C and SIGTERM mean what
they mean to `serve run`.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatusOverview
from ray.serve.scripts import cli

from mooncake_serve.app import stores

POLL_S = 1.0


def run(config: Path) -> int:
    """Run the applications of `config` until Ctrl-C or until one fails to deploy: exit status."""
    # A shell script's background jobs ignore Ctrl-C, and then nothing could end this one.
    signal.signal(signal.SIGINT, _interrupt)
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


def _interrupt(_number: int, _frame: object) -> None:
    """Ctrl-C: a Ray that was started here ends with us, so the stores write to disk first."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
