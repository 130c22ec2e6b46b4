"""`mooncake-serve serve`: `serve run`, but a bad configuration ends it.

Ray's `serve run` submits a config and then sleeps, whatever becomes of it. This checks first, and
watches the application afterwards: when it cannot be deployed, the reason is printed and the exit is
non-zero.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

POLL_S = 1.0
STOP_TIMEOUT_S = 90.0


def serve(
    config: Annotated[Path, typer.Argument(help="A Serve config file.")],
    check: Annotated[bool, typer.Option(help="Check the configuration first.")] = True,
) -> None:
    """Run an application on this machine until Ctrl-C."""
    if check:
        from mooncake_serve.app.check import check as find

        findings = find(config)
        for finding in findings:
            typer.echo(f"{config}: {finding}", err=True)
        if findings:
            raise typer.Exit(1)
    command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
    process = subprocess.Popen(command)
    try:
        failure = _watch(process)
    except KeyboardInterrupt:
        # The terminal sent Ctrl-C to Serve as well: it is shutting down already.
        failure = None
    if failure is not None:
        typer.echo(f"mooncake-serve: {failure}", err=True)
        process.send_signal(signal.SIGINT)
    process.wait(STOP_TIMEOUT_S)
    raise typer.Exit(1 if failure is not None else process.returncode)


def _watch(process: subprocess.Popen[bytes]) -> str | None:
    """Wait for the server's end, or for an application that failed to deploy: its message."""
    import ray
    from ray import serve as ray_serve
    from ray.exceptions import RayError

    while process.poll() is None:
        time.sleep(POLL_S)
        try:
            if not ray.is_initialized():
                ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
            applications = ray_serve.status().applications
        except (ConnectionError, RayError, RuntimeError):
            continue
        for name, application in applications.items():
            if application.status == "DEPLOY_FAILED":
                return f"{name} was not deployed: {application.message}"
    return None
