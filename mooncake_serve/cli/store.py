"""`mooncake-serve store …`: run a store by itself, and look into a live one."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from mooncake_serve.errors import ConfigError

app = typer.Typer(
    invoke_without_command=True,
    no_args_is_help=True,
    help="Run a store outside Ray, or look into a running one.",
    epilog="Example: mooncake-serve store --dram 4GiB --socket /run/user/1000/kv/store.sock",
)

Socket = Annotated[Path, typer.Option(help="The store's Unix socket.")]
STATS_TIMEOUT_S = 5.0


def parse_size(field: str, text: str) -> int:
    """Bytes in "4GiB". Raises ConfigError naming `field`."""
    try:
        size = TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        size = ByteSize(0)
    if size <= 0:
        raise ConfigError(field, f"{text!r} is not a size; write it as 512MiB or 4GiB")
    return int(size)


@app.callback()
def run(
    context: typer.Context,
    dram: Annotated[str, typer.Option(help="Hard cap of memory.")] = "2GiB",
    socket: Annotated[Path | None, typer.Option(help="Where clients connect.")] = None,
    ingest: Annotated[str, typer.Option(help="Largest put buffer of a client.")] = "64MiB",
    max_sessions: Annotated[int, typer.Option(min=1, max=4096)] = 64,
) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    if context.invoked_subcommand:
        return
    if socket is None:
        raise ConfigError("--socket", "name the Unix socket to serve on")
    from mooncake_serve.store import StoreServer

    server = StoreServer(
        socket=str(socket),
        dram_bytes=parse_size("--dram", dram),
        ingest_bytes_max=parse_size("--ingest", ingest),
        max_sessions=max_sessions,
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    typer.echo(f"reserving {dram} of memory", err=True)
    server.start()
    typer.echo(f"store serves on {socket}, pid {server.pid}", err=True)
    while not ended.wait(1.0):
        if not server.is_running:
            typer.echo("the store stopped by itself; its last message says why", err=True)
            raise typer.Exit(1)
    server.stop(drain=True)


@app.command()
def stats(
    socket: Socket,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print a live store's counters."""
    from mooncake_serve.store import StoreClient

    client = StoreClient.connect(str(socket), timeout_s=STATS_TIMEOUT_S)
    try:
        counters = client.stats()
    finally:
        client.close()
    if as_json:
        typer.echo(json.dumps(counters))
        return
    width = max(len(name) for name in counters)
    for name, value in counters.items():
        typer.echo(f"{name:<{width}}  {value}")
