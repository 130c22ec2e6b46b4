"""`bench serve`: load on a running server, or on one started for it.

Without `--url` it deploys the application of `deployments/app.yaml` on a Ray of its own and ends it
afterwards. `--echo` measures the serving path alone (see `bench/echo.py`).
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mooncake_serve.bench import workloads
from mooncake_serve.bench.load import Measured, closed_loop, open_loop
from mooncake_serve.bench.report import emit, machine, progress, version
from mooncake_serve.client import AsyncClient

EXAMPLES = """examples:
  mooncake-serve bench serve --workload shared-doc --json
  mooncake-serve bench serve --url http://127.0.0.1:8000 --workload multi-turn --concurrency 8
  mooncake-serve bench serve --workload trace --trace conversation.jsonl --scale 0.5 --speed 2
  mooncake-serve bench serve --echo --json
"""
WARM_UP_TOKENS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 0 unless requests failed."""
    chosen = _parser().parse_args(argv)
    if chosen.echo:
        from mooncake_serve.bench import echo

        result = echo.measure(quick=chosen.quick)
        failed = 0
    else:
        result = _loaded(chosen)
        failed = result["failed"]
    emit({**result, "machine": machine(), "version": version(), "runs": 1})
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "mooncake-serve bench serve",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = ("shared-doc", "multi-turn", "trace")
    parser.add_argument("--workload", choices=kinds, default="shared-doc")
    parser.add_argument("--echo", action="store_true", help="the serving path without a model")
    parser.add_argument("--url", help="a running server; default: one of its own")
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--api-key")
    parser.add_argument("--concurrency", type=int, default=8, help="clients of the closed loop")
    parser.add_argument("--rate", type=float, help="sessions a second: an open loop")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--questions", type=int, default=8, help="about each document")
    parser.add_argument("--document-words", type=int, default=3000)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-words", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--trace", type=Path, help="requests in the Mooncake format")
    parser.add_argument("--requests", type=int, default=100, help="of the trace")
    parser.add_argument("--scale", type=float, default=1.0, help="of the trace's lengths")
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals, times the trace's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="within a minute")
    parser.add_argument("--json", action="store_true", help="accepted: the output is always JSON")
    return parser


def _loaded(chosen: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        url = chosen.url
        if url is None:
            from mooncake_serve.bench.serving import Serving, shipped_args

            serving = stack.enter_context(Serving())
            progress("starting the application of deployments/app.yaml")
            url = serving.run("bench", shipped_args())
        return asyncio.run(_run(url, chosen))


async def _run(url: str, chosen: argparse.Namespace) -> dict[str, Any]:
    # A refusal is a result here: retried, it would count as a slow success.
    async with AsyncClient(
        url, api_key=chosen.api_key, model=chosen.model, max_retries=0
    ) as client:
        context = (await client.tokenize("ready?")).max_context
        await client.chat("Warm up.", max_tokens=WARM_UP_TOKENS)
        sessions = _sessions(chosen, context)
        opened = chosen.rate is not None or chosen.workload == "trace"
        if chosen.rate is not None:
            sessions = workloads.poisson(sessions, chosen.rate, chosen.seed)
        mode = "open" if opened else "closed"
        progress(f"{chosen.workload}: {len(sessions)} sessions, {mode} loop, seed {chosen.seed}")
        measured = await _measure(client, sessions, chosen, opened)
    return {"workload": chosen.workload, "mode": mode, "seed": chosen.seed, **measured.report()}


async def _measure(
    client: AsyncClient,
    sessions: list[workloads.Session],
    chosen: argparse.Namespace,
    opened: bool,
) -> Measured:
    if opened:
        return await open_loop(client, sessions, chosen.speed)
    return await closed_loop(client, sessions, chosen.concurrency)


def _sessions(chosen: argparse.Namespace, context: int) -> list[workloads.Session]:
    seed, tokens = chosen.seed, chosen.max_tokens
    if chosen.workload == "trace":
        if chosen.trace is None:
            raise SystemExit("--workload trace needs --trace FILE")
        requests = min(chosen.requests, 20) if chosen.quick else chosen.requests
        return workloads.trace(chosen.trace, requests, context, chosen.scale)
    if chosen.workload == "multi-turn":
        conversations = 2 if chosen.quick else chosen.conversations
        return workloads.multi_turn(conversations, chosen.turns, chosen.turn_words, tokens, seed)
    documents, words = (2, 1000) if chosen.quick else (chosen.documents, chosen.document_words)
    return workloads.shared_doc(documents, chosen.questions, words, tokens, seed)
