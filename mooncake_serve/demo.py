"""`make demo`: a long-context job on two replicas that share one store.

Starts the application as a user would (`serve run`), asks several questions about one long document
through the SDK, compares cold and warm answers, prints a table and writes `build/demo.json`. Ends
only what it started. Every wait is bounded; when the server fails, the end of its log is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from mooncake_serve.client import Client, Completion
from mooncake_serve.errors import APIConnectionError, MooncakeError

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
CONFIG = ROOT / "deployments" / "app.yaml"
DOCUMENTS = (
    "LICENSE",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "mooncake_serve/config.py",
    "mooncake_serve/errors.py",
)
DOCUMENT_CHARS = 29_500
PROMPT_TOKENS_MIN = 6_000
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
QUESTIONS = (
    "What must you do to redistribute the work?",
    "When does the patent licence end?",
    "Who is liable for damages?",
    "What does the document say about trademarks?",
)


class DemoError(MooncakeError):
    """The demonstration could not be completed."""


def document() -> str:
    """The repository's own prose, long enough to be worth caching, under a heading never seen.

    The heading holds a random number, so that the first question is cold even on a warm store.
    """
    text = "\n\n".join((ROOT / name).read_text("utf-8") for name in DOCUMENTS)
    return f"Document {secrets.token_hex(8)}\n\n{text[:DOCUMENT_CHARS]}"


class Server:
    """`serve run` in a process group of its own, with its log in `build/`."""

    def __init__(self, config: Path) -> None:
        BUILD.mkdir(exist_ok=True)
        self.log = BUILD / "demo-server.log"
        command = [str(Path(sys.executable).parent / "serve"), "run", str(config)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )

    def wait_healthy(self, client: Client) -> None:
        """Return once the server answers; raises DemoError with the log's end otherwise."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not client.health():
            if self.process.poll() is not None:
                raise DemoError(f"the server ended with {self.process.returncode}\n{self.tail()}")
            if time.monotonic() > deadline:
                raise DemoError(
                    f"the server was not healthy in {START_TIMEOUT_S:.0f} s\n{self.tail()}"
                )
            time.sleep(0.5)

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        text = self.log.read_text("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """Interrupt it as Ctrl-C would, and wait; kill the group only if that fails."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(STOP_TIMEOUT_S)


def start(config: Path) -> Server:
    """Check the configuration, then start the server. Raises DemoError with what to change."""
    from mooncake_serve.app.check import check as find

    findings = find(config)
    if findings:
        raise DemoError("\n".join(f"{config}: {finding}" for finding in findings))
    with Client() as client:
        if client.health():
            raise DemoError(f"a server runs at {client.base_url} already; stop it first")
    return Server(config)


@contextmanager
def step(console: Console, title: str) -> Iterator[None]:
    """Show that a step runs, and for how long."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=False) as progress:
        task = progress.add_task(title, total=1)
        yield
        progress.advance(task)


def ask(client: Client, text: str, question: str, replica: int | None = None) -> Completion:
    """One streamed answer about the document."""
    prompt = f"{text}\n\nQuestion: {question}"
    with client.chat(
        prompt, stream=True, replica=replica, explain=True, max_tokens=32, temperature=0
    ) as stream:
        return stream.result()


def run_job(client: Client, console: Console) -> tuple[dict[str, Completion], list[Completion]]:
    """The same question cold, warm and on the other replica; then every question."""
    text = document()
    answers: dict[str, Completion] = {}
    for name, replica in (("cold", 0), ("warm, same replica", 0), ("warm, other replica", 1)):
        with step(console, f"question 1, {name}"):
            answers[name] = ask(client, text, QUESTIONS[0], replica)
    more = []
    for number, question in enumerate(QUESTIONS[1:], start=2):
        with step(console, f"question {number}, wherever the router sends it"):
            more.append(ask(client, text, question))
    return answers, more


def report(answers: dict[str, Completion], store: dict[str, Any]) -> dict[str, Any]:
    """`build/demo.json`."""
    cold, same, other = answers.values()
    return {
        "prompt_tokens": cold.usage.prompt_tokens,
        "cold_ttft_s": cold.ttft_s,
        "warm_ttft_same_replica_s": same.ttft_s,
        "warm_ttft_other_replica_s": other.ttft_s,
        "cached_tokens_other_replica": other.usage.cached_tokens,
        "outputs_identical": cold.text == same.text == other.text,
        "replicas": [cold.replica, same.replica, other.replica],
        "store": store,
    }


def table(answers: dict[str, Completion], more: list[Completion]) -> Table:
    """What a person wants to see."""
    rows = Table("question", "replica", "prompt", "cached", "first token", "answer")
    numbered = [(f"1, {name}", answer) for name, answer in answers.items()]
    numbered += [(str(number), answer) for number, answer in enumerate(more, start=2)]
    for name, answer in numbered:
        usage = answer.usage
        rows.add_row(
            name,
            answer.replica or "?",
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            f"{answer.ttft_s:.2f} s",
            answer.text.strip().replace("\n", " ")[:40],
        )
    return rows


def check(result: dict[str, Any]) -> None:
    """Raise DemoError unless the job showed what it is for."""
    if result["prompt_tokens"] < PROMPT_TOKENS_MIN:
        raise DemoError(
            f"the prompt has {result['prompt_tokens']} tokens, {PROMPT_TOKENS_MIN} wanted"
        )
    if not result["outputs_identical"]:
        raise DemoError("cold and warm answers differ; see build/demo.json")
    if not result["cached_tokens_other_replica"]:
        raise DemoError(
            "the other replica found nothing in the store; `mooncake-serve store stats` may say why"
        )


def store_stats() -> dict[str, Any]:
    """The node store's counters that the report quotes."""
    from mooncake_serve.config import AppConfig
    from mooncake_serve.store import StoreClient
    from mooncake_serve.store.location import sockets

    newest = sockets(AppConfig().store)[0]
    client = StoreClient.connect(str(newest), timeout_s=5.0)
    try:
        counters = client.stats()
    finally:
        client.close()
    return {
        "logical_bytes": counters["logical_bytes"],
        "physical_bytes": counters["resident_bytes"] + counters["leased_bytes"],
        "blocks": counters["blocks"],
    }


def main() -> int:
    """Run the demonstration; 0 when it showed what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exit", action="store_true", help="stop the server at the end")
    parser.add_argument("--config", type=Path, default=CONFIG)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    try:
        server = start(arguments.config)
    except DemoError as err:
        console.print(f"[red]{err}[/red]")
        return 1
    try:
        with Client(timeout_s=START_TIMEOUT_S) as client:
            with step(console, "starting two replicas and a store"):
                server.wait_healthy(client)
            answers, more = run_job(client, console)
            result = report(answers, store_stats())
        (BUILD / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
        console.print(table(answers, more))
        check(result)
        if not arguments.exit:
            console.print(
                f"The server runs at {client.base_url} (log: {server.log}). Ctrl-C ends it."
            )
            server.process.wait()
    except KeyboardInterrupt:
        pass
    except (DemoError, APIConnectionError) as err:
        console.print(f"[red]{err}[/red]")
        return 1
    finally:
        with step(console, "stopping the server"):
            server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
