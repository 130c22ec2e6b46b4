"""`mooncake-serve keys`: the API keys that `api.keys_file` names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys.")

File = Annotated[Path, typer.Argument(help="The file that api.keys_file names.")]


@app.command(epilog="Example: mooncake-serve keys create keys.json acme --concurrency 8")
def create(
    file: File,
    tenant: Annotated[str, typer.Argument(help="Whose key it is; keys of one tenant share KV.")],
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
) -> None:
    """Add a key and print it. It cannot be shown again: only its hash is kept."""
    from mooncake_serve.api import keys

    made = keys.create(
        file, tenant, requests_per_minute=requests_per_minute, concurrency=concurrency
    )
    typer.echo(made)


@app.command("list", epilog="Example: mooncake-serve keys list keys.json")
def list_keys(file: File) -> None:
    """Print the ids of all keys, whose they are and since when."""
    from mooncake_serve.api import keys

    for key in keys.load(file).values():
        day = time.strftime("%Y-%m-%d", time.gmtime(key.created))
        typer.echo(f"{key.id}  {day}  {key.tenant}")


@app.command(epilog="Example: mooncake-serve keys revoke keys.json 1f0c5a2e")
def revoke(file: File, key_id: Annotated[str, typer.Argument(help="As `list` prints it.")]) -> None:
    """Remove a key; a running server refuses it within a second."""
    from mooncake_serve.api import keys

    keys.revoke(file, key_id)
