"""`mooncake-serve status`: does a server answer, what does it serve, what has it done?"""

from __future__ import annotations

from typing import Annotated

import typer

SHOWN = {
    "vllm:num_requests_running": "requests running",
    "vllm:prompt_tokens_total": "prompt tokens",
    "vllm:prefix_cache_hits_total": "  found in a pool",
    "vllm:external_prefix_cache_hits_total": "  found in a store",
    "vllm:generation_tokens_total": "generated tokens",
}


def status(
    url: Annotated[str | None, typer.Option(help="Server; default MOONCAKE_URL.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Default MOONCAKE_API_KEY.", show_default=False)
    ] = None,
) -> None:
    """Show whether a server answers, its model and its counters; exit status 1 when it does not."""
    from mooncake_serve.client import Client

    with Client(url, api_key=api_key, max_retries=0) as client:
        healthy = client.health()
        state = "answers" if healthy else "does not answer"
        typer.echo(f"{client.base_url} {state}")
        if not healthy:
            raise typer.Exit(1)
        for name in client.models():
            typer.echo(f"  {'model':24} {name}")
        for line in (client.metrics() or "").splitlines():
            name = line.partition("{")[0]
            if name in SHOWN:
                typer.echo(f"  {SHOWN[name]:24} {float(line.rpartition(' ')[2]):,.0f}")
