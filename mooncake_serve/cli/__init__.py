"""`mooncake-serve`: one command for the store, the checks, the benchmarks and a chat.

Heavy imports happen inside the commands, so that `--help` answers at once. A failure is one line on
stderr that says what to do, and a non-zero exit; `--debug` shows the traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mooncake_serve.cli import batch, bench, chat, doctor, keys, serve, status, store
from mooncake_serve.errors import MooncakeError

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="The memory layer for long-context LLM serving on Ray.",
    epilog="Example: mooncake-serve check deployments/app.yaml",
)
app.add_typer(store.app, name="store")
app.add_typer(batch.app, name="batch")
app.add_typer(bench.app, name="bench")
app.add_typer(keys.app, name="keys")
app.command("doctor")(doctor.doctor)
app.command("chat", epilog="Example: mooncake-serve chat 'Name a colour.'")(chat.chat)
app.command("status", epilog="Example: mooncake-serve status --url http://127.0.0.1:8000")(
    status.status
)
app.command("serve", epilog="Example: mooncake-serve serve deployments/app.yaml")(serve.serve)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option(help="Show tracebacks of failures.")] = False,
) -> None:
    """Options of every command; `main` reads --debug itself, before parsing can fail."""
    del debug


@app.command("simulate", context_settings=bench.PASS_ON)
def simulate(context: typer.Context) -> None:
    """Replay a trace on a simulated cluster with the product's router and eviction policy."""
    from mooncake_serve.simulate import main as run

    raise typer.Exit(run(context.args))


@app.command()
def version() -> None:
    """Print the version."""
    import mooncake_serve

    typer.echo(mooncake_serve.__version__)


@app.command(epilog="Example: mooncake-serve check deployments/app.yaml")
def check(config: Annotated[Path, typer.Argument(help="A Serve config file.")]) -> None:
    """Find what is wrong with a configuration, without starting Ray."""
    from mooncake_serve.app.check import check as find

    findings = find(config)
    for finding in findings:
        typer.echo(f"{config}: {finding}", err=True)
    if findings:
        raise typer.Exit(1)
    typer.echo(f"{config}: ok")


def main() -> None:
    """Entry point of the `mooncake-serve` script."""
    try:
        app()
    except MooncakeError as err:
        if "--debug" in sys.argv:
            raise
        typer.echo(f"mooncake-serve: {err}", err=True)
        sys.exit(1)
