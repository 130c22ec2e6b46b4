"""`mooncake-serve chat`: talk to a running server from a terminal."""

from __future__ import annotations

from typing import Annotated

import typer


def chat(
    message: Annotated[str | None, typer.Argument(help="Ask this once, then exit.")] = None,
    url: Annotated[str | None, typer.Option(help="Server; default MOONCAKE_URL.")] = None,
    model: Annotated[str | None, typer.Option(help="Model; default the first one.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
) -> None:
    """Chat with a running server. An empty line ends the conversation."""
    from mooncake_serve.client import Client

    with Client(url, model=model) as client:
        history: list[dict[str, str]] = []
        while True:
            asked = message or typer.prompt("you", default="", show_default=False)
            if not asked:
                return
            history.append({"role": "user", "content": asked})
            options = {"max_tokens": max_tokens, "temperature": temperature}
            with client.chat(history, stream=True, **options) as stream:
                for chunk in stream:
                    typer.echo(chunk.text, nl=False)
                answer = stream.result()
            usage = answer.usage
            typer.echo()
            typer.secho(
                f"[{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached, "
                f"{usage.completion_tokens} generated]",
                dim=True,
                err=True,
            )
            if message:
                return
            history.append({"role": "assistant", "content": answer.text})
