"""`make demo`: a long-context job on two replicas that share one store.

Starts the application as a user would (`serve run`), asks several questions about one long document
through the SDK, compares cold and warm answers token by token, prints a table and writes
`build/demo.json`. Ends only what it started. Every wait is bounded; when the server fails, the end
of its log is shown and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from mooncake_serve.client import Client, Completion
from mooncake_serve.config import AppConfig, load_app_config
from mooncake_serve.errors import APIStatusError, MooncakeError

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path.cwd() / "build"
"""Where make runs, as of all that make writes."""
CONFIG = ROOT / "deployments" / "app.yaml"
SOURCES = ("LICENSE", "ARCHITECTURE.md", "CONTRIBUTING.md", "README.md")
DOCUMENT_TOKENS = 6_600
PROMPT_TOKENS_MIN = 6_000
ANSWER_TOKENS = 32
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 90.0
INTERRUPTED = 130
"""Exit status of a program that Ctrl-C ended, by convention."""
QUESTIONS = (
    "What must you do to redistribute the work?",
    "When does the patent licence end?",
    "Who is liable for damages?",
    "What does the document say about trademarks?",
)


class DemoError(MooncakeError):
    """The demonstration could not be completed."""


class Server:
    """`serve run` in a session of its own, with its log in `build/`."""

    def __init__(self, config: Path) -> None:
        BUILD.mkdir(exist_ok=True)
        self.log = BUILD / "demo-server.log"
        command = [str(Path(sys.executable).with_name("serve")), "run", str(config)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True
            )

    def wait_ready(self, client: Client, replicas: int) -> None:
        """Return once all replicas answer. Raises DemoError with the log's end otherwise."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (client.health() and _answers(client, replicas - 1)):
            if self._process.poll() is not None:
                raise self._ended()
            if time.monotonic() > deadline:
                raise DemoError(f"not ready in {START_TIMEOUT_S:.0f} s\n{self._tail()}")
            time.sleep(0.5)

    def wait_end(self) -> None:
        """Return never: raises DemoError when the server ends by itself."""
        self._process.wait()
        raise self._ended()

    def stop(self) -> None:
        """End it as Ctrl-C would, then whatever of its Ray is left."""
        try:
            started = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            started = []
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        _, left = psutil.wait_procs(started, timeout=10)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)

    def _ended(self) -> DemoError:
        return DemoError(f"the server ended with {self._process.returncode}\n{self._tail()}")

    def _tail(self, lines: int = 20) -> str:
        text = self.log.read_text("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])


def _answers(client: Client, replica: int) -> bool:
    """Whether the replica of this index runs; it does when all before it do."""
    try:
        client.complete("ready?", replica=replica, max_tokens=1)
    except APIStatusError:
        return False
    return True


def read_config(path: Path) -> tuple[AppConfig, str]:
    """The application in a Serve config, and its URL. Raises DemoError with what to change."""
    from mooncake_serve.app.check import check as find

    findings = find(path)
    if findings:
        raise DemoError("\n".join(f"{path}: {finding}" for finding in findings))
    raw = yaml.safe_load(path.read_text("utf-8"))
    http = raw.get("http_options", {})
    url = f"http://{http.get('host', '127.0.0.1')}:{http.get('port', 8000)}"
    return load_app_config(raw["applications"][0].get("args") or {}), url


def document(config: AppConfig) -> str:
    """The repository's own prose, `DOCUMENT_TOKENS` long, under a heading never seen before.

    The heading holds a random number, so that the first question is cold even on a warm store.
    """
    from mooncake_serve.models import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    text = "\n\n".join((ROOT / name).read_text("utf-8") for name in SOURCES)
    tokens = tokenizer.encode(f"Document {secrets.token_hex(8)}\n\n{text}")
    return tokenizer.decode(tokens[:DOCUMENT_TOKENS])


@contextmanager
def step(console: Console, title: str) -> Iterator[None]:
    """Show that a step runs, and for how long."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=1)
        yield
        progress.advance(task)


def ask(client: Client, text: str, question: str, replica: int | None = None) -> Completion:
    """One streamed, greedy answer about the document."""
    options: dict[str, Any] = {"max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": True}
    prompt = f"{text}\n\nQuestion: {question}"
    with client.chat(prompt, stream=True, replica=replica, explain=True, **options) as stream:
        return stream.result()


def run_job(
    client: Client, text: str, console: Console
) -> tuple[dict[str, Completion], list[Completion]]:
    """The same question cold, warm and on the other replica; then every other question."""
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
    """What `build/demo.json` holds. Identical means: each token and its log-probability."""
    cold, same, other = answers.values()
    return {
        "prompt_tokens": cold.usage.prompt_tokens,
        "answer_tokens": len(cold.logprobs),
        "cold_ttft_s": cold.ttft_s,
        "warm_ttft_same_replica_s": same.ttft_s,
        "warm_ttft_other_replica_s": other.ttft_s,
        "cached_tokens_other_replica": other.usage.cached_tokens,
        "outputs_identical": bool(cold.logprobs)
        and cold.logprobs == same.logprobs == other.logprobs
        and cold.text == same.text == other.text,
        "replicas": [cold.replica, same.replica, other.replica],
        "store": store,
    }


def table(answers: dict[str, Completion], more: list[Completion]) -> Table:
    """What a person wants to see."""
    rows = Table("question", "replica", "prompt", "cached", "first token", expand=True)
    rows.add_column("answer", ratio=1, no_wrap=True, overflow="ellipsis")
    numbered = [(f"1, {name}", answer) for name, answer in answers.items()]
    numbered += [(str(number), answer) for number, answer in enumerate(more, start=2)]
    for name, answer in numbered:
        rows.add_row(
            name,
            answer.replica or "?",
            str(answer.usage.prompt_tokens),
            str(answer.usage.cached_tokens),
            f"{answer.ttft_s:.2f} s",
            " ".join(answer.text.split()),
        )
    return rows


def check(result: dict[str, Any]) -> None:
    """Raise DemoError unless the job showed what it is for."""
    if result["prompt_tokens"] < PROMPT_TOKENS_MIN:
        raise DemoError(
            f"the prompt has {result['prompt_tokens']} tokens, {PROMPT_TOKENS_MIN} wanted"
        )
    first, _, other = result["replicas"]
    if first == other:
        raise DemoError("one replica answered everything; `replicas.count` must be 2 or more")
    if not result["outputs_identical"]:
        raise DemoError("cold and warm answers differ; see build/demo.json")
    if not result["cached_tokens_other_replica"]:
        raise DemoError(
            "the other replica found nothing in the store; `mooncake-serve store stats` may say why"
        )


def store_stats(config: AppConfig) -> dict[str, Any]:
    """The node store's counters that the report quotes."""
    from mooncake_serve.store import StoreClient
    from mooncake_serve.store.location import sockets

    # The newest socket: this demonstration's Ray has just made it.
    newest = sockets(config.store)[0]
    with StoreClient.connect(newest, ingest_bytes=0) as client:
        counters = client.stats()
    return {
        "logical_bytes": counters["logical_bytes"],
        "physical_bytes": counters["capacity_bytes"] - counters["free_bytes"],
        "blocks": counters["blocks"],
    }


def demonstrate(server: Server, client: Client, config: AppConfig, console: Console) -> None:
    """Wait for the server, run the job, report. Raises DemoError when it shows something else."""
    with step(console, f"starting {config.replicas.count} replicas and a store"):
        text = document(config)
        server.wait_ready(client, config.replicas.count)
    answers, more = run_job(client, text, console)
    result = report(answers, store_stats(config))
    (BUILD / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    console.print(table(answers, more))
    check(result)


def main() -> int:
    """Run the demonstration; 0 when it showed what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exit", action="store_true", help="stop the server at the end")
    parser.add_argument("--config", type=Path, default=CONFIG)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        config, url = read_config(arguments.config)
        with Client(url, model=config.model.served_name, timeout_s=START_TIMEOUT_S) as client:
            if client.health():
                raise DemoError(f"a server runs at {url} already; stop it first")
            _run(arguments.config, client, config, console, leave=arguments.exit)
    except KeyboardInterrupt:
        return INTERRUPTED
    except MooncakeError as err:
        console.print(str(err), style="red", markup=False, highlight=False)
        return 1
    return 0


def _run(path: Path, client: Client, config: AppConfig, console: Console, *, leave: bool) -> None:
    server = Server(path)
    try:
        demonstrate(server, client, config, console)
        if not leave:
            console.print(
                f"The server runs at {client.base_url}, log {server.log}. Ctrl-C ends it."
            )
            with suppress(KeyboardInterrupt):
                server.wait_end()
    finally:
        # An impatient second Ctrl-C must not leave processes behind.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        with step(console, "stopping the server"):
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
