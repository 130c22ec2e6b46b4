"""`serve run`, but a bad configuration ends it.

Ray's `serve run` submits a config and then sleeps, whatever becomes of it. This watches the
application: when it cannot be deployed, the reason is printed and the exit status is 1.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError

POLL_S = 1.0
STOP_TIMEOUT_S = 90.0


def run(config: Path) -> int:
    """Run the applications of `config` until Ctrl-C or until one fails to deploy: exit status."""
    process = subprocess.Popen([str(Path(sys.executable).with_name("serve")), "run", str(config)])
    try:
        failure = _watch(process)
    except KeyboardInterrupt:
        # The terminal sent Ctrl-C to Serve as well: it is shutting down already.
        failure = None
    if failure is not None:
        print(f"mooncake-serve: {failure}", file=sys.stderr)
        process.send_signal(signal.SIGINT)
    process.wait(STOP_TIMEOUT_S)
    return 1 if failure is not None else process.returncode


def _watch(process: subprocess.Popen[bytes]) -> str | None:
    """Wait for the server's end, or for an application that failed to deploy: its message."""
    while process.poll() is None:
        time.sleep(POLL_S)
        try:
            if not ray.is_initialized():
                ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
            applications = serve.status().applications
        except (ConnectionError, RayError, RuntimeError):
            continue
        for name, application in applications.items():
            if application.status == "DEPLOY_FAILED":
                return f"{name} was not deployed: {application.message}"
    return None
