"""`mooncake-serve store …`: run a store by itself, and look into or end running ones."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mooncake_serve.errors import ConfigError, StoreTimeout, StoreUnavailable

if TYPE_CHECKING:
    from mooncake_serve.store import StoreClient, StoreServer

app = typer.Typer(
    invoke_without_command=True,
    no_args_is_help=True,
    help="Run a store outside Ray, or look into a running one.",
    epilog="Example: mooncake-serve store --dram 4GiB --socket /run/user/1000/kv/store.sock",
)

AnySocket = Annotated[
    Path | None, typer.Option("--socket", help="A store's Unix socket; default this machine's.")
]
CALL_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 60.0
LONG_CALL_TIMEOUT_S = 600.0
IMPORT_INGEST = 64 << 20
TERMINATE_DRAIN_S = 10.0
"""How long a SIGTERM may take to write to disk; whoever needs all of it calls drain first."""


def parse_size(field: str, text: str) -> int:
    """Bytes in "4GiB". Raises ConfigError naming `field`."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

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
    metrics: Annotated[
        str | None, typer.Option(help="host:port where Prometheus may ask for its counters.")
    ] = None,
    codec: Annotated[str, typer.Option(help="none, fast, dense or auto.")] = "auto",
    eviction: Annotated[str, typer.Option(help="ours or lru.")] = "ours",
    nvme: Annotated[Path | None, typer.Option(help="Directory for blocks on local disk.")] = None,
    nvme_bytes: Annotated[str, typer.Option(help="Hard cap of that directory.")] = "16GiB",
    nvme_write: Annotated[str, typer.Option(help="Most written to it a second.")] = "256MiB",
    nvme_codec: Annotated[
        str | None, typer.Option(help="none, fast, dense or auto there; default: as in memory.")
    ] = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    if context.invoked_subcommand:
        return
    if socket is None:
        raise ConfigError("--socket", "name the Unix socket to serve on")
    from mooncake_serve.store import StoreServer, starting

    disk: dict[str, Any] = {}
    if nvme is not None:
        disk["nvme_path"] = str(nvme)
        disk["nvme_bytes"] = parse_size("--nvme-bytes", nvme_bytes)
        disk["nvme_write_bytes_per_s"] = parse_size("--nvme-write", nvme_write)
        disk["nvme_codec"] = nvme_codec
    server = StoreServer(
        socket=str(socket),
        dram_bytes=parse_size("--dram", dram),
        ingest_bytes_max=parse_size("--ingest", ingest),
        max_sessions=max_sessions,
        codec=codec,
        eviction=eviction,
        **disk,
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    typer.echo(f"reserving {dram} of memory", err=True)
    starting.start(server)
    for warning in server.warnings:
        typer.echo(f"warning: {warning}", err=True)
    stored = server.stats()
    codec = f"codec {stored['codec']} ({stored['codec_why']})"
    typer.echo(f"store serves on {socket}, pid {server.pid}, {codec}", err=True)
    with _exporter(server, metrics):
        while not ended.wait(1.0):
            if not server.is_running:
                typer.echo("the store stopped by itself; its last message says why", err=True)
                raise typer.Exit(1)
    try:
        server.drain(timeout_s=TERMINATE_DRAIN_S)
    except StoreTimeout:
        typer.echo("not all of memory was written to disk in time", err=True)
    server.stop(drain=True)


@contextmanager
def _exporter(server: StoreServer, address: str | None) -> Iterator[None]:
    """Answer scrapes on `address` meanwhile. Raises ConfigError when that cannot be."""
    if address is None:
        yield
        return
    from mooncake_serve.metrics import store_samples
    from mooncake_serve.prometheus import PrometheusSink

    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError("--metrics", f"{address!r} is not host:port, such as 127.0.0.1:9400")
    sink = PrometheusSink()
    sink.watch(lambda: store_samples(server.stats()))
    with ExitStack() as stack:
        try:
            bound = stack.enter_context(sink.serve(host, int(port)))
        except OSError as err:
            raise ConfigError("--metrics", f"{address}: {err.strerror}") from err
        typer.echo(f"metrics on http://{host}:{bound}/metrics", err=True)
        yield


@app.command()
def drain(
    socket: AnySocket = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for it.")] = 600.0,
) -> None:
    """Have a live store write to its disk what it holds in memory; before a planned stop."""
    with _attach(socket) as client:
        typer.echo(f"{client.drain(timeout_s=timeout)} blocks written to disk")


@app.command("list")
def list_blocks(
    socket: AnySocket = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Print every block of a live store: key, tenant, bytes in memory and on disk, use."""
    with _attach(socket) as client:
        tenants = list(client.stats()["tenants"])
        rows = client.list(timeout_s=LONG_CALL_TIMEOUT_S)
    for row in rows:
        row["key"] = row["key"].hex()
        row["tenant"] = tenants[row["tenant"]] if row["tenant"] < len(tenants) else ""
        typer.echo(json.dumps(row) if as_json else "  ".join(str(value) for value in row.values()))


@app.command()
def verify(socket: AnySocket = None) -> None:
    """Check every byte a live store holds; damaged copies are dropped, and the exit status is 1."""
    with _attach(socket) as client:
        done = client.verify(timeout_s=LONG_CALL_TIMEOUT_S)
    typer.echo(f"{done['checked']} copies, {done['bytes']} bytes, {done['corrupt']} damaged")
    if done["corrupt"]:
        raise typer.Exit(1)


@app.command()
def evict(
    keys: Annotated[list[str], typer.Argument(help="Keys of blocks as `list` prints them.")],
    socket: AnySocket = None,
) -> None:
    """Drop blocks of a live store from memory and disk."""
    with _attach(socket) as client:
        typer.echo(f"{client.evict(_parse_keys(keys))} blocks dropped")


@app.command()
def pin(
    keys: Annotated[list[str], typer.Argument(help="Keys of blocks as `list` prints them.")],
    socket: AnySocket = None,
    ttl: Annotated[int | None, typer.Option(min=1, help="Seconds; else until --off.")] = None,
    off: Annotated[bool, typer.Option("--off", help="End pins.")] = False,
) -> None:
    """Keep blocks of a live store in memory."""
    with _attach(socket) as client:
        parsed = _parse_keys(keys)
        count = client.unpin(parsed) if off else client.pin(parsed, ttl)
    typer.echo(f"{count} blocks {'unpinned' if off else 'pinned'}")


def _parse_keys(keys: list[str]) -> list[bytes]:
    try:
        return [bytes.fromhex(key) for key in keys]
    except ValueError as err:
        raise ConfigError("keys", "write them as `mooncake-serve store list` prints them") from err


@app.command()
def stats(
    socket: AnySocket = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print a live store's counters."""
    with _attach(socket) as client:
        counters = client.stats()
    if as_json:
        typer.echo(json.dumps(counters))
        return
    usage = counters.pop("usage")
    width = max(len(name) for name in counters)
    for name, value in counters.items():
        typer.echo(f"{name:<{width}}  {value}")
    for row in usage:
        kind = [row.pop(name) for name in ("tier", "dtype", "codec")]
        figures = ", ".join(f"{name} {value}" for name, value in row.items())
        typer.echo(f"usage of {' '.join(kind)}: {figures}")


@app.command()
def bench(
    socket: AnySocket = None,
    size: Annotated[str, typer.Option("--bytes", help="Size of a block.")] = "1MiB",
    blocks: Annotated[int, typer.Option(min=1, max=4096, help="How many are put.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Time lease, match, put and read_into on a live store; what is put is evicted in the end."""
    from mooncake_serve.cli import store_bench

    nbytes = parse_size("--bytes", size)
    with _attach(socket, ingest_bytes=nbytes) as client:
        measured = store_bench.measure(client, nbytes, blocks)
    if as_json:
        typer.echo(json.dumps(measured))
        return
    for name, value in measured.items():
        typer.echo(
            f"{name:<20}  {value:.1f}" if isinstance(value, float) else f"{name:<20}  {value}"
        )


@app.command("export", epilog="Example: mooncake-serve store export kv.tar")
def export_blocks(
    archive: Annotated[Path, typer.Argument(help="File to write; it must not exist.")],
    socket: AnySocket = None,
) -> None:
    """Write every block of a live store to an archive, in the portable zstd form."""
    from mooncake_serve import archive as archives

    with _attach(socket) as client:
        written = archives.export(client, archive)
    typer.echo(f"{archive}: {written}", err=True)


@app.command("import", epilog="Example: mooncake-serve store import kv.tar")
def import_blocks(
    archive: Annotated[Path, typer.Argument(help="A file that export wrote.")],
    socket: AnySocket = None,
    tenant: Annotated[str, typer.Option(help="Whom the blocks are accounted to.")] = "",
) -> None:
    """Put the blocks of an archive into a live store; those it holds already stay."""
    from mooncake_serve import archive as archives

    with _attach(socket, ingest_bytes=IMPORT_INGEST) as client:
        outcome = archives.restore(client, archive, tenant)
    typer.echo(f"{archive}: {outcome}", err=True)


@app.command()
def stop(
    socket: Annotated[Path | None, typer.Option(help="A store outside Ray.")] = None,
) -> None:
    """End the stores of the Ray cluster, or the store outside Ray on --socket."""
    if socket is not None:
        _terminate(socket)
        typer.echo(f"{socket}: stopped", err=True)
        return
    from mooncake_serve.app import stores

    stores.connect()
    _report(stores.stop(), "stopped")


@app.command(epilog="Example: mooncake-serve store restart deployments/app.yaml")
def restart(config: Annotated[Path, typer.Argument(help="A Serve config file.")]) -> None:
    """Start the stores of the Ray cluster anew, with the settings of a configuration."""
    from mooncake_serve.app import stores
    from mooncake_serve.app.check import store_settings

    settings = store_settings(config)
    stores.connect()
    _report(stores.restart(settings), "restarted")


def _report(nodes: list[str], done: str) -> None:
    for node in nodes:
        typer.echo(f"store of node {node}: {done}", err=True)
    if not nodes:
        typer.echo("no store runs on this cluster; an application starts one", err=True)


def _attach(socket: Path | None, ingest_bytes: int = 0) -> StoreClient:
    """The store on `socket`, or the newest of this machine's that answers. Raises StoreError."""
    from mooncake_serve.config import StoreSettings
    from mooncake_serve.store import StoreClient
    from mooncake_serve.store.location import sockets

    for path in [socket] if socket else sockets(StoreSettings()):
        try:
            return StoreClient.connect(
                str(path), ingest_bytes=ingest_bytes, timeout_s=CALL_TIMEOUT_S
            )
        except StoreUnavailable:
            if socket:
                raise
    raise StoreUnavailable("no store of yours runs on this machine; name one with --socket")


def _terminate(socket: Path) -> None:
    """SIGTERM to the store on `socket`, and wait for its end. Raises StoreError."""
    with _attach(socket) as client:
        process = os.pidfd_open(client.server_pid)
        try:
            client.ping()  # It still serves, so the pid is still its own.
            if b"mooncake-serve" not in Path(f"/proc/{client.server_pid}/cmdline").read_bytes():
                raise ConfigError(
                    "--socket",
                    f"the store runs inside another program, pid {client.server_pid}: end that, or "
                    "leave --socket out if it is Ray",
                )
            signal.pidfd_send_signal(process, signal.SIGTERM)
            client.close()
            ended, _, _ = select.select([process], [], [], STOP_TIMEOUT_S)
        finally:
            os.close(process)
    if not ended:
        raise StoreTimeout(f"{socket}: still running after {STOP_TIMEOUT_S:.0f} s")
