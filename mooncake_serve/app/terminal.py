"""A failed `build` ends the `serve run` that asked for it.

Ray's `serve run` starts a Ray of its own, submits the configuration and then sleeps, whatever
becomes of it: a person who mistyped a setting would look at a quiet terminal. `build` runs in a
worker of that Ray, two generations below `serve run`. Only such a parent is ended, and only while
it serves nothing else: a bad configuration sent to a running cluster (`serve deploy`) harms nobody.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import psutil
from ray import serve

from mooncake_serve.errors import MooncakeError

LOG_DELAY_S = 3.0
"""Ray copies a worker's output to the terminal about once a second."""
END_TIMEOUT_S = 5.0


def end_serve_run(err: MooncakeError) -> None:
    """Print `err` and end the waiting `serve run`, if there is one."""
    print(f"mooncake-serve: {err}", file=sys.stderr, flush=True)
    driver = waiting_driver()
    if driver is not None and not _serves_something():
        time.sleep(LOG_DELAY_S)
        _end(driver)


def waiting_driver() -> psutil.Process | None:
    """The `serve run` that started the Ray of this worker."""
    for parent in psutil.Process().parents():
        command = [Path(part).name for part in parent.cmdline()[:3]]
        if "serve" in command[:-1] and command[command.index("serve") + 1] == "run":
            return parent
    return None


def _end(driver: psutil.Process) -> None:
    """Quietly by SIGHUP; Ray answers SIGTERM with a stack trace, which nohup leaves as the way."""
    driver.send_signal(signal.SIGHUP)
    try:
        driver.wait(END_TIMEOUT_S)
    except psutil.TimeoutExpired:
        driver.terminate()


def _serves_something() -> bool:
    applications = serve.status().applications.values()
    return any(application.deployments for application in applications)
