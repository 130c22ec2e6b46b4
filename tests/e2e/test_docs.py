"""The documents' examples that talk to a server, against this session's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, marked
from tests.docs.running import run, scratch
from tests.e2e.cluster import App
from tests.waiting import WAIT_S

ELSEWHERE = {"serve run", "mooncake-serve serve", "mooncake-serve bench", "mooncake-serve doctor"}
"""Of the README's table: blocks of the documentation run these, without a server."""


def here(code: str, app: App) -> str:
    """The code with this session's server, model and store."""
    for written in ("http://localhost:8000", "localhost:8000"):
        code = code.replace(written, app.url)
    code = code.replace("smollm2-135m", "tiny")
    return re.sub(
        r"mooncake-serve store (stats|drain)",
        rf"mooncake-serve store \1 --socket {app.store_socket}",
        code,
    )


@pytest.mark.parametrize("block", marked("with a server"), ids=str)
def test_examples_run_against_a_server(app: App, block: Block, tmp_path: Path) -> None:
    code = here(block.code, app)
    ran = run(code, scratch(tmp_path), WAIT_S, block.language, MOONCAKE_URL=app.url)
    assert ran.stdout.strip()
    assert "Error" not in ran.stderr, ran.stderr
    assert '"error"' not in ran.stdout, ran.stdout


def commands_of_the_readme() -> list[str]:
    """First column of its table of commands."""
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    return [row for row in rows if shlex.split(row)[0] in {"serve", "mooncake-serve"}]


@pytest.mark.parametrize("command", commands_of_the_readme())
def test_commands_of_the_readmes_table(app: App, command: str, tmp_path: Path) -> None:
    if any(command.startswith(other) for other in ELSEWHERE):
        return
    folder = scratch(tmp_path)
    body = '{"model": "tiny", "prompt": "Once", "max_tokens": 4}'
    line = f'{{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {body}}}\n'
    (folder / "jobs.jsonl").write_text(line)
    # A conversation that ends at once; `Name a colour.` is asked by its own example.
    code = here(command.replace("chat", "chat 'Name a colour.' --max-tokens 4"), app)
    ran = run(code, folder, WAIT_S, MOONCAKE_URL=app.url)
    assert ran.stdout.strip() or ran.stderr.strip()
    if "batch run" in command:
        assert '"custom_id": "a"' in (folder / "answers.jsonl").read_text()
