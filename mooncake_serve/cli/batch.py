"""`mooncake-serve batch`: run many long-context jobs against a server, to their end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mooncake_serve.client import BatchReport, Client, Document, Job
    from mooncake_serve.client.batch.report import OnProgress, Progress

app = typer.Typer(
    no_args_is_help=True,
    help="Run many jobs; those that share a document compute it once. Run again to go on.",
)

Output = Annotated[Path, typer.Option("--output", "-o", help="Answers, appended as they come.")]
Url = Annotated[str | None, typer.Option(help="Server; default MOONCAKE_URL.")]
ApiKey = Annotated[str | None, typer.Option(help="Default MOONCAKE_API_KEY.", show_default=False)]
Concurrency = Annotated[int, typer.Option(min=1, help="Jobs at once, at most.")]
RetryFailed = Annotated[bool, typer.Option(help="Run again what failed in an earlier run.")]
Report = Annotated[Path | None, typer.Option(help="Write tokens and seconds per job here, JSONL.")]


class TooLong(StrEnum):
    """What to do with a document that does not fit the context."""

    REFUSE = "refuse"
    SPLIT = "split"


@app.command(
    epilog="Example: mooncake-serve batch run in.jsonl -o out.jsonl --url http://127.0.0.1:8000"
)
def run(
    jobs: Annotated[Path, typer.Argument(help="Jobs in OpenAI's batch format.", exists=True)],
    output: Output,
    url: Url = None,
    api_key: ApiKey = None,
    concurrency: Concurrency = 32,
    retry_failed: RetryFailed = False,
    report: Report = None,
) -> None:
    """Run the jobs of a JSONL file."""
    from mooncake_serve.client import Client, read_jobs

    with Client(url, api_key=api_key) as client:
        _run(client, read_jobs(jobs), output, concurrency, retry_failed, report)


@app.command(
    epilog="Example: mooncake-serve batch ask contracts/ 'notes/*.md' -q 'Who signed?' -o out.jsonl"
)
def ask(
    documents: Annotated[list[str], typer.Argument(help="Files, folders or glob patterns.")],
    output: Output,
    question: Annotated[list[str] | None, typer.Option("--question", "-q")] = None,
    questions: Annotated[Path | None, typer.Option(help="A file with a question a line.")] = None,
    template: Annotated[
        Path | None, typer.Option(help="A text with {document} and {question} in it.")
    ] = None,
    too_long: Annotated[
        TooLong, typer.Option(help="A document beyond the context: refuse it, or ask each part.")
    ] = TooLong.REFUSE,
    max_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    url: Url = None,
    api_key: ApiKey = None,
    concurrency: Concurrency = 32,
    retry_failed: RetryFailed = False,
    report: Report = None,
) -> None:
    """Ask every question about every document."""
    from mooncake_serve.client import Client, document_jobs, read_documents
    from mooncake_serve.client.batch.jobs import TEMPLATE
    from mooncake_serve.errors import BatchError

    asked = [*(question or []), *(questions.read_text("utf-8").splitlines() if questions else [])]
    asked = [each for each in asked if each.strip()]
    if not asked:
        raise BatchError("no question; give --question or --questions")
    form = template.read_text("utf-8") if template else TEMPLATE
    options = {"max_tokens": max_tokens, "temperature": temperature}
    with Client(url, api_key=api_key) as client:
        parts = [
            part
            for document in read_documents(documents)
            for part in _fitting(client, document, asked, form, max_tokens, too_long)
        ]
        jobs = document_jobs(parts, asked, template=form, options=options)
        _run(client, jobs, output, concurrency, retry_failed, report)


def _fitting(
    client: Client,
    document: Document,
    questions: Sequence[str],
    template: str,
    max_tokens: int,
    too_long: TooLong,
) -> list[Document]:
    """The document, or its parts if that was chosen; one that is refused fails as its jobs do."""
    from mooncake_serve.client import Document, document_jobs
    from mooncake_serve.client.batch import split

    longest = max(questions, key=len)

    def fits(text: str) -> bool:
        [job] = document_jobs([Document(document.name, text)], [longest], template=template)
        tokens = client.tokenize(job.body["messages"])
        return len(tokens.ids) + max_tokens <= tokens.max_context

    if too_long is TooLong.SPLIT:
        return split(document, fits)
    if not fits(document.text):
        typer.echo(
            f"{document.name}: longer than the context, refused; --too-long split asks its parts",
            err=True,
        )
    return [document]


def _run(
    client: Client,
    jobs: Sequence[Job],
    output: Path,
    concurrency: int,
    retry_failed: bool,
    report: Path | None,
) -> None:
    with _shown(len(jobs)) as on_progress:
        done = client.batch(
            jobs,
            output=output,
            concurrency=concurrency,
            retry_failed=retry_failed,
            on_progress=on_progress,
        )
    if report is not None:
        _write_report(report, done)
    for job in done.failed[:10]:
        typer.echo(f"{job.custom_id}: {job.error}", err=True)
    typer.echo(
        f"{len(done.jobs)} jobs, {len(done.failed)} failed, {done.resumed} of an earlier run, "
        f"{done.wall_s:.1f} s, {done.cached_share:.0%} of prompt tokens cached, "
        f"about {done.seconds_saved:.0f} s of prefill saved",
        err=True,
    )
    raise typer.Exit(1 if done.failed else 0)


def _write_report(path: Path, report: BatchReport) -> None:
    fields = (
        "custom_id",
        "error",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "seconds",
        "seconds_saved",
    )
    lines = [json.dumps({field: getattr(job, field) for field in fields}) for job in report.jobs]
    path.write_text("".join(line + "\n" for line in lines), "utf-8")


@contextmanager
def _shown(total: int) -> Iterator[OnProgress | None]:
    """A progress bar on a terminal; elsewhere nothing, the report follows."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = [
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]} tokens/s"),
        TextColumn("{task.fields[cached]} cached"),
        TextColumn("{task.fields[failed]} failed", style="red"),
        TextColumn("{task.fields[eta]}"),
    ]
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total, **_fields(None))

        def show(progress: Progress) -> None:
            bar.update(task, completed=progress.done, **_fields(progress))

        yield show


def _fields(progress: Progress | None) -> dict[str, Any]:
    if progress is None:
        return {"rate": "–", "cached": "–", "failed": 0, "eta": ""}
    left = progress.eta_s
    eta = "" if left is None else f"{int(left) // 60}:{int(left) % 60:02d} left"
    return {
        "rate": f"{progress.tokens_per_s:,.0f}",
        "cached": f"{progress.cached_share:.0%}",
        "failed": progress.failed,
        "eta": eta,
    }
