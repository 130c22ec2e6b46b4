"""`mooncake-serve serve`: run an application; a bad configuration ends it with a message."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(config: Annotated[Path, typer.Argument(help="A Serve config file.")]) -> None:
    """Check a configuration, then run it on this machine until Ctrl-C."""
    from mooncake_serve.app.check import check
    from mooncake_serve.app.run import run

    findings = check(config)
    for finding in findings:
        typer.echo(f"{config}: {finding}", err=True)
    raise typer.Exit(1 if findings else run(config))
