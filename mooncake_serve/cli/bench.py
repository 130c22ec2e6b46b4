"""`mooncake-serve bench …`: hand the rest of the command line to the benchmark of that name."""

from __future__ import annotations

from importlib import import_module

import typer

app = typer.Typer(no_args_is_help=True, help="Measure this machine; --json prints one object.")

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _run(name: str, context: typer.Context) -> None:
    raise typer.Exit(import_module(f"mooncake_serve.bench.{name}").main(context.args))


@app.command("store", context_settings=PASS_ON)
def bench_store(context: typer.Context) -> None:
    """Lease, read and put from another process, beside memcpy and Ray's object store."""
    _run("store", context)


@app.command("engine", context_settings=PASS_ON)
def bench_engine(context: typer.Context) -> None:
    """Prefill, decode and warm starts, beside transformers' generate."""
    _run("engine", context)


@app.command("accuracy", context_settings=PASS_ON)
def bench_accuracy(context: typer.Context) -> None:
    """The native forward against float32, beside transformers' own bf16."""
    _run("accuracy", context)


@app.command("footprint", context_settings=PASS_ON)
def bench_footprint(context: typer.Context) -> None:
    """Bytes and latency of one workload: unshared, shared, and shared and coded."""
    _run("footprint", context)


@app.command("serve", context_settings=PASS_ON)
def bench_serve(context: typer.Context) -> None:
    """Load on a server: time to first token, between tokens, throughput, cached share."""
    _run("serve", context)


@app.command("batch", context_settings=PASS_ON)
def bench_batch(context: typer.Context) -> None:
    """A batch over shared documents, beside the same jobs in random order without a store."""
    _run("batch", context)


@app.command("codec", context_settings=PASS_ON)
def bench_codec(context: typer.Context) -> None:
    """Ratio and rates of the lossless codecs on real KV, beside memcpy and other codecs."""
    _run("codec", context)


@app.command("router", context_settings=PASS_ON)
def bench_router(context: typer.Context) -> None:
    """A routing decision over a million indexed blocks, and updates of the index."""
    _run("router", context)


@app.command("cluster", context_settings=PASS_ON)
def bench_cluster(context: typer.Context) -> None:
    """Two nodes, four replicas: our router and stores beside Serve's default."""
    _run("cluster", context)
