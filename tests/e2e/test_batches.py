"""Batches on a running application whose client and whose processes are killed: every job ends,
and is in the output once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.cluster import MODEL, App
from tests.waiting import WAIT_S, eventually

CHAT = "/v1/chat/completions"
DOCUMENTS = 4
SIZES = [24, pytest.param(200, marks=pytest.mark.slow)]


def lines(jobs: int) -> list[dict[str, Any]]:
    """Questions about a few documents, in random order."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)
    texts = [f"{dice.random()} some words of a document, " * 12 for _ in range(DOCUMENTS)]
    made = []
    for number in range(jobs):
        content = f"{texts[number % DOCUMENTS]}\n{number}?"
        body = {"model": MODEL, "max_tokens": 48, "temperature": 0}
        body["messages"] = [{"role": "user", "content": content}]
        made.append({"custom_id": f"j{number}", "method": "POST", "url": CHAT, "body": body})
    dice.shuffle(made)
    return made


def answered(text: str) -> list[str]:
    """Jobs of an output, sorted; all of them have an answer. A cut last line does not count."""
    whole = text[: text.rfind("\n") + 1]
    found = [json.loads(line) for line in whole.splitlines()]
    assert {line["response"]["status_code"] for line in found} <= {200}
    return sorted(line["custom_id"] for line in found)


def kill_the_server(app: App) -> None:
    """SIGKILL for the ingress and every replica."""
    for pid in app.pids():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("jobs", SIZES)
def test_the_command_line_goes_on(app: App, tmp_path: Path, jobs: int) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    made = lines(jobs)
    source.write_text("".join(json.dumps(line) + "\n" for line in made))
    code = "from mooncake_serve.cli import main; main()"
    command = [sys.executable, "-c", code, "batch", "run", str(source), "-o", str(output)]
    command += ["--url", app.url, "--concurrency", "4"]

    def has(share: float) -> bool:
        return output.exists() and len(answered(output.read_text())) >= share * jobs

    client = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    eventually(lambda: has(0.25))
    os.kill(client.pid, signal.SIGKILL)
    client.wait(WAIT_S)
    client = subprocess.Popen(command, stderr=subprocess.PIPE)
    eventually(lambda: has(0.5))
    kill_the_server(app)
    _, said = client.communicate(timeout=2 * WAIT_S)
    assert client.returncode == 0, said
    assert f"{jobs} jobs, 0 failed".encode() in said
    assert answered(output.read_text()) == sorted(line["custom_id"] for line in made)


@pytest.mark.parametrize("jobs", SIZES)
def test_a_batch_on_the_server_goes_on(app: App, jobs: int) -> None:
    made = lines(jobs)
    with app.client(max_retries=5) as client:
        raw = "\n".join(map(json.dumps, made)).encode()
        file = client.files.create(file=("in.jsonl", raw), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")

        def state() -> Any:
            with suppress(openai.APIError):
                return client.batches.retrieve(batch.id)
            return None

        def has(share: float) -> bool:
            now = state()
            return now is not None and now.request_counts.completed >= share * jobs

        for share in (0.25, 0.5):
            eventually(lambda share=share: has(share))
            kill_the_server(app)
        eventually(lambda: (now := state()) and now.status == "completed", 2 * WAIT_S)
        done = client.batches.retrieve(batch.id)
        assert (done.request_counts.completed, done.request_counts.failed) == (jobs, 0)
        assert done.output_file_id is not None
        text = client.files.content(done.output_file_id).text
    assert answered(text) == sorted(line["custom_id"] for line in made)
