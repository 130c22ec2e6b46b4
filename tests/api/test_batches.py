"""Files and batches: OpenAI's objects and states, and a server that is killed in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.fake import MODEL
from tests.e2e.cluster import free_port
from tests.waiting import eventually

CHAT = "/v1/chat/completions"


class Server:
    """A server process that can be killed and started again on the same directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=30
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.api.batch_server", str(self.port), str(self.folder)]
        self._process = subprocess.Popen(command)
        eventually(self._answers)

    def kill(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait(20)
            self._process = None

    def ran(self) -> Counter[str]:
        log = self.folder / "ran"
        return Counter(log.read_text().splitlines()) if log.exists() else Counter()

    def create(self, lines: list[dict[str, Any]], endpoint: Any = CHAT) -> Any:
        raw = "\n".join(json.dumps(line) for line in lines).encode()
        return self.create_raw(raw, endpoint)

    def create_raw(self, raw: bytes, endpoint: Any = CHAT) -> Any:
        file = self.client.files.create(file=("in.jsonl", raw), purpose="batch")
        return self.client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"}
        )

    def ended(self, batch_id: str) -> Any:
        states = {"completed", "failed", "cancelled", "expired"}
        eventually(lambda: self.client.batches.retrieve(batch_id).status in states)
        return self.client.batches.retrieve(batch_id)

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(line) for line in self.client.files.content(file_id).text.splitlines()]

    def _answers(self) -> bool:
        try:
            return len(self.client.models.list().data) == 1
        except openai.APIConnectionError:
            return False


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("batches"))
    server.start()
    yield server
    server.kill()


def line(number: int, text: str = "", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text or f"question {number}"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, **body}
    return {"custom_id": f"job-{number}", "method": "POST", "url": CHAT, "body": body}


def test_a_batch_runs_to_its_end(running: Server) -> None:
    lines = [line(0), line(1), line(2, max_tokens=-1), line(3, colour="red")]
    batch = running.create(lines)
    assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
    batch = running.ended(batch.id)
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 2, "failed": 2}
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    good, bad = running.lines(batch.output_file_id), running.lines(batch.error_file_id)
    assert [each["custom_id"] for each in good] == ["job-0", "job-1"]
    assert good[0]["error"] is None
    assert good[0]["response"]["status_code"] == 200
    assert good[0]["response"]["body"]["choices"][0]["message"]["content"] == "ab"
    assert [each["custom_id"] for each in bad] == ["job-2", "job-3"]
    assert bad[0]["response"]["status_code"] == 400
    assert bad[1]["response"]["body"]["error"]["param"] == "colour"
    listed = running.client.batches.list(limit=1)
    assert [each.id for each in listed.data] == [batch.id]


def test_completions_too(running: Server) -> None:
    wanted = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    one = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": wanted}
    batch = running.ended(running.create([one], "/v1/completions").id)
    [answer] = running.lines(batch.output_file_id)
    assert answer["response"]["body"]["choices"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "empty_file"),
        (b"{", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (b'{"custom_id": 1}', "missing_required_parameter"),
        (json.dumps(line(0) | {"method": "GET"}).encode(), "invalid_method"),
        (json.dumps(line(0) | {"url": "/v1/completions"}).encode(), "mismatched_endpoint"),
        (json.dumps(line(0) | {"body": 1}).encode(), "missing_required_parameter"),
        (json.dumps(line(0, stream=True)).encode(), "invalid_request"),
        (b"\n".join([json.dumps(line(0)).encode()] * 2), "duplicate_custom_id"),
    ],
)
def test_a_wrong_file_fails_the_batch(running: Server, raw: bytes, code: str) -> None:
    batch = running.ended(running.create_raw(raw).id)
    assert batch.status == "failed"
    assert [error.code for error in batch.errors.data] == [code]
    assert batch.request_counts.total == 0


def test_files(running: Server) -> None:
    client = running.client
    made = [client.files.create(file=(f"{n}.jsonl", b"x" * n), purpose="batch") for n in (1, 2, 3)]
    assert client.files.retrieve(made[1].id).bytes == 2
    assert client.files.content(made[2].id).read() == b"xxx"
    page = client.files.list(limit=2)
    assert [each.id for each in page.data] == [made[2].id, made[1].id]
    assert next(each.id for each in client.files.list(limit=2, after=made[1].id).data) == made[0].id
    assert client.files.delete(made[0].id).deleted
    for gone in (lambda: client.files.retrieve(made[0].id), lambda: client.files.content("file-x")):
        with pytest.raises(openai.NotFoundError):
            gone()
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.create(file=("a", b"x"), purpose="fine-tune")
    assert caught.value.param == "purpose"
    with pytest.raises(openai.NotFoundError):
        client.batches.create(
            input_file_id="../batches.sqlite", endpoint=CHAT, completion_window="24h"
        )


def test_cancelling_keeps_what_was_answered(running: Server) -> None:
    batch = running.create([line(n, f"cancel {n}") for n in range(200)])
    eventually(lambda: running.client.batches.retrieve(batch.id).request_counts.completed > 4)
    with pytest.raises(openai.BadRequestError, match="has not ended"):
        running.client.files.delete(batch.input_file_id)
    assert running.client.batches.cancel(batch.id).status == "cancelling"
    batch = running.ended(batch.id)
    assert batch.status == "cancelled"
    good, bad = running.lines(batch.output_file_id), running.lines(batch.error_file_id)
    assert len(good) == batch.request_counts.completed >= 4
    assert {each["error"]["code"] for each in bad} == {"batch_cancelled"}
    assert len(good) + len(bad) == 200


def test_lines_that_share_a_document_wait_for_its_first(running: Server) -> None:
    document = "d" * 1200
    texts = [f"{document} {n}" if n % 2 else f"alone {n}" for n in range(12)]
    batch = running.create([line(n, text) for n, text in enumerate(texts)])
    running.ended(batch.id)
    order = [text for text in (running.folder / "ran").read_text().splitlines() if document in text]
    assert order[0].endswith(" 1")


def test_killed_twice_nothing_is_lost_or_repeated(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        server.start()
        batch = server.create([line(n, f"kill {n}") for n in range(120)])
        for share in (20, 60):
            eventually(
                lambda share=share: (
                    server.client.batches.retrieve(batch.id).request_counts.completed >= share
                )
            )
            server.kill()
            server.start()
        done = server.ended(batch.id)
    finally:
        server.kill()
    assert done.status == "completed"
    names = [json.loads(text)["custom_id"] for text in _output(tmp_path, done.output_file_id)]
    assert names == [f"job-{n}" for n in range(120)]
    ran = server.ran()
    assert len(ran) == 120
    # What ran when a kill came runs again; an answered line never does.
    assert sum(ran.values()) - 120 <= 2 * 4


def _output(folder: Path, file_id: str) -> list[str]:
    return (folder / "state" / "files" / file_id).read_text().splitlines()
