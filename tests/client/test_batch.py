"""Batches of jobs: grouping, pace, resuming after a kill, and documents that are too long."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse, Response
from typer.testing import CliRunner

from mooncake_serve.cli import app as cli
from mooncake_serve.client import Client, Document, Job, document_jobs, read_documents, read_jobs
from mooncake_serve.client.batch import split
from mooncake_serve.client.batch.groups import SHARED_CHARS_MIN, group
from mooncake_serve.client.batch.pace import Pace, run_groups
from mooncake_serve.errors import APIConnectionError, BatchError
from tests.client.server import Script, answer, running
from tests.waiting import eventually


class Answering(Script):
    """Answers every job with its own text, after whatever the test puts in front."""

    def __init__(self) -> None:
        super().__init__()
        self.pause_s = 0.0
        self.failures: list[Response] = []
        self.running = self.most = 0
        self.lock = threading.Lock()

    async def handle(self, request: Any) -> Response:
        body = await request.json()
        with self.lock:
            self.bodies.append(body)
            if self.failures:
                return self.failures.pop(0)
            self.running += 1
            self.most = max(self.most, self.running)
        await asyncio.sleep(self.pause_s)
        with self.lock:
            self.running -= 1
        return answer(body["messages"][-1]["content"][-40:])

    @property
    def asked(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]


@pytest.fixture
def script() -> Answering:
    return Answering()


@pytest.fixture
def url(script: Answering) -> Iterator[str]:
    with running(script) as address:
        yield address


def job(name: str, text: str = "") -> Job:
    return Job(name, {"messages": [{"role": "user", "content": text or name}], "max_tokens": 2})


def names(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


def test_groups_are_what_shares_a_beginning() -> None:
    one, other = "a" * SHARED_CHARS_MIN, "b" * SHARED_CHARS_MIN
    prompts = [f"{one} x", "short", f"{other} x", f"{one} y", f"{other} y", f"{one} z"]
    members = sorted(each.members for each in group(prompts))
    assert members == [(0, 3, 5), (1,), (2, 4)]


@given(st.lists(st.text(alphabet="ab", max_size=4), max_size=30))
def test_every_prompt_is_in_one_group(ends: list[str]) -> None:
    prompts = ["x" * SHARED_CHARS_MIN * len(end) + end for end in ends]
    groups = group(prompts)
    assert sorted(n for each in groups for n in each.members) == list(range(len(prompts)))
    for each in groups:
        texts = [prompts[n] for n in each.members]
        assert all(text[: each.shared_chars] == texts[0][: each.shared_chars] for text in texts)


def test_the_window_follows_the_server() -> None:
    now = 0.0
    pace = Pace(16, clock=lambda: now)
    for _ in range(200):
        pace.answered()
    assert pace.window == 16
    now = 1.0
    for _ in range(5):
        pace.refused(0.5)  # All were sent before the window was halved.
    assert pace.window == 8
    pace.refused(2.0)
    assert pace.window == 4


async def test_followers_wait_for_their_pilot() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    dice = random.Random(seed)
    groups = [[(g, n) for n in range(dice.randint(1, 6))] for g in range(20)]
    done: set[tuple[int, int]] = set()

    async def work(member: tuple[int, int]) -> None:
        assert member[1] == 0 or (member[0], 0) in done
        await asyncio.sleep(dice.random() / 500)
        done.add(member)

    await run_groups(groups, work, 8)
    assert len(done) == sum(map(len, groups))


async def test_a_failing_job_ends_the_run() -> None:
    async def work(member: int) -> None:
        await asyncio.sleep(0 if member == 3 else 10)
        raise BatchError(str(member))

    with pytest.raises(BatchError, match="3"):
        await asyncio.wait_for(run_groups([[1], [2], [3]], work, 100), 5)


def test_a_batch_is_complete_and_resumes(script: Answering, url: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    jobs = [job(f"j{n}") for n in range(20)]
    with Client(url, max_retries=0) as client:
        report = client.batch(jobs[:12], output=out)
        assert (len(report.jobs), report.resumed, report.failed) == (12, 0, [])
        assert report.jobs[3].text == "j3"
        assert report.jobs[3].cached_tokens == 4
        with out.open("a") as file:
            file.write('{"custom_id": "j12", "resp')  # A kill in the middle of a line.
        report = client.batch(jobs, output=out)
    assert (report.resumed, len(report.jobs)) == (12, 20)
    assert sorted(names(out)) == sorted(each.custom_id for each in jobs)
    assert Counter(script.asked) == Counter(each.custom_id for each in jobs)
    assert {body["model"] for body in script.bodies} == {"tiny"}


def test_refusals_are_waited_out_and_errors_are_outcomes(
    script: Answering, url: str, tmp_path: Path
) -> None:
    busy = JSONResponse({"error": {"message": "busy"}}, 429, {"retry-after": "0"})
    wrong = JSONResponse({"error": {"message": "no such thing"}}, 400)
    script.failures = [busy, wrong]
    out = tmp_path / "out.jsonl"
    with Client(url) as client:
        report = client.batch([job("a"), job("b")], output=out, concurrency=1)
        assert {each.error for each in report.jobs} == {None, "400: no such thing"}
        assert sorted(names(out)) == ["a", "b"]
        assert client.batch([job("a"), job("b")], output=out).failed
        report = client.batch([job("a"), job("b")], output=out, retry_failed=True)
    assert report.failed == []
    assert sorted(names(out)) == ["a", "b"]


def test_a_server_error_is_tried_again_a_few_times(script: Answering, url: str) -> None:
    script.failures = [JSONResponse({"error": {"message": "oops"}}, 500) for _ in range(2)]
    with Client(url) as client:
        assert client.batch([job("a")]).failed == []
        script.failures = [JSONResponse({"error": {"message": "oops"}}, 500) for _ in range(3)]
        [result] = client.batch([job("a")]).jobs
    assert result.error == "500: oops"


def test_what_the_cache_saved_is_told_by_the_servers_own_plan(
    script: Answering, url: str, tmp_path: Path
) -> None:
    """7 prompt tokens of which the plan computes 3 in 0.6 s; 4 were cached."""
    planned, unplanned = answer("x"), answer("x")
    planned.headers["x-mooncake-route"] = '{"prefill_s": 0.6, "matched_tokens": 4}'
    script.failures = [planned, unplanned]
    out = tmp_path / "out.jsonl"
    with Client(url) as client:
        report = client.batch([job("a"), job("b")], output=out, concurrency=1)
        assert sorted(each.seconds_saved or 0 for each in report.jobs) == [0, pytest.approx(0.8)]
        assert report.seconds_saved == pytest.approx(0.8)
        assert client.batch([job("a"), job("b")], output=out).seconds_saved == 0


def test_off_a_terminal_it_says_nothing_until_the_end(url: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "a", "body": dict(job("a").body)}))
    command = ["batch", "run", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(cli, [*command, "--url", url])
    [line] = done.stderr.splitlines()
    assert line.startswith("1 jobs, 0 failed")


@pytest.mark.parametrize("status", [404, 500, 502, 503])
def test_a_proxy_without_its_application_is_waited_for(
    script: Answering, url: str, status: int
) -> None:
    script.failures = [Response("Path '/v1/chat/completions' not found.", status)] * 4
    with Client(url) as client:
        assert client.batch([job("a")]).failed == []


def test_a_server_that_stays_away_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with Client("http://127.0.0.1:9", model="m") as client:
        with pytest.raises(APIConnectionError):
            client.batch([job("a")], output=out, patience_s=0.1)
    assert out.read_text() == ""


def test_two_runs_do_not_share_an_output(url: str, tmp_path: Path) -> None:
    from mooncake_serve.client.batch.output import Output

    out = tmp_path / "out.jsonl"
    with Output(out), Client(url) as client, pytest.raises(BatchError, match="another run"):
        client.batch([job("a")], output=out)
    out.write_text("something else\n")
    with Client(url) as client, pytest.raises(BatchError, match="not the output"):
        client.batch([job("a")], output=out)


def test_bounded_concurrency(script: Answering, url: str) -> None:
    script.pause_s = 0.01
    with Client(url) as client:
        client.batch([job(f"j{n}") for n in range(60)], concurrency=5)
    assert 1 < script.most <= 5


def test_killed_by_sigkill_it_goes_on(script: Answering, url: str, tmp_path: Path) -> None:
    script.pause_s = 0.05
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"custom_id": f"j{n}", "url": "/v1/chat/completions", "body": dict(job(f"j{n}").body)}
        for n in range(60)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code = "from mooncake_serve.cli import main; main()"
    command = [sys.executable, "-c", code, "batch", "run", str(source), "-o", str(out)]
    command += ["--url", url, "--concurrency", "4"]
    for share in (10, 30):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        eventually(lambda share=share: out.exists() and len(out.read_bytes().splitlines()) >= share)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(20)
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert b"60 jobs, 0 failed" in done.stderr
    assert sorted(names(out)) == sorted(f"j{n}" for n in range(60))


KILLED_WHILE_WRITING = """
import resource, signal, sys
from pathlib import Path
from mooncake_serve.client.batch.output import Output
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
Output(Path(sys.argv[1]), retry_failed=True)
"""


def test_killed_while_it_drops_failed_lines_it_loses_none(
    script: Answering, url: str, tmp_path: Path
) -> None:
    script.failures = [JSONResponse({"error": {"message": "no such thing"}}, 400)]
    out = tmp_path / "out.jsonl"
    jobs = [job(f"j{n}") for n in range(20)]
    with Client(url) as client:
        assert len(client.batch(jobs, output=out).failed) == 1
        before = out.read_bytes()
        command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(out)]
        done = subprocess.run(command, timeout=60, check=False)
        assert done.returncode == -signal.SIGXFSZ
        assert out.read_bytes() == before
        assert client.batch(jobs, output=out, retry_failed=True).failed == []
    assert sorted(names(out)) == sorted(each.custom_id for each in jobs)
    assert len(script.asked) == len(jobs) + 1
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "expected an object"),
        ('{"custom_id": "a"}', "expected an object"),
        ('{"custom_id": 1, "body": {}}', "must be a text"),
        ('{"custom_id": "a", "body": {}, "url": "/v1/embeddings"}', "url must be"),
        ('{"custom_id": "a", "body": {"stream": true}}', "stream"),
        ('{"custom_id": "a", "body": {}}\n{"custom_id": "a", "body": {}}', ":2: custom_id"),
    ],
)
def test_wrong_job_files_name_the_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(BatchError, match=why):
        read_jobs(path)


def test_documents_come_from_files_folders_and_globs(tmp_path: Path) -> None:
    for name in ("a.md", "sub/b.md", "sub/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name} {{braces}}")
    found = read_documents([tmp_path / "a.md", tmp_path / "sub"])
    assert [Path(each.name).name for each in found] == ["a.md", "b.md", "c.txt"]
    assert len(read_documents([str(tmp_path / "**" / "*.md")])) == 2
    with pytest.raises(BatchError, match="no such file"):
        read_documents([tmp_path / "nothing"])
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BatchError, match="UTF-8"):
        read_documents([tmp_path / "x.bin"])
    jobs = document_jobs(found, ["Why?", "{document}?"])
    assert len({each.custom_id for each in jobs}) == 6
    contents = [each.body["messages"][0]["content"] for each in jobs]
    assert contents[0] == f"{found[0].text}\n\nWhy?"
    assert contents[1] == f"{found[0].text}\n\n{{document}}?"


@given(st.text(alphabet="ab \n", max_size=3000), st.integers(70, 900))
def test_a_split_document_is_whole(text: str, room: int) -> None:
    parts = split(Document("d", text), lambda part: len(part) <= room)
    assert "".join(part.text for part in parts) == text
    assert all(len(part.text) <= room for part in parts)
    assert len({part.name for part in parts}) == len(parts)


def test_the_report_and_too_long_documents(
    script: Answering, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mooncake_serve.client.types import Tokens

    def tokenize(_: Client, messages: Any) -> Tokens:
        return Tokens(tuple(range(len(messages[0]["content"]))), 500)

    monkeypatch.setattr(Client, "tokenize", tokenize)
    (tmp_path / "long.txt").write_text("word " * 200)
    out, report = tmp_path / "out.jsonl", tmp_path / "report.jsonl"
    command = ["batch", "ask", str(tmp_path / "long.txt"), "-q", "Why?", "-o", str(out)]
    command += ["--url", url, "--report", str(report), "--max-tokens", "10"]
    refused = CliRunner().invoke(cli, command)
    assert "longer than the context" in refused.stderr
    out.unlink()
    assert CliRunner().invoke(cli, [*command, "--too-long", "split"]).exit_code == 0
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert len(lines) == len(names(out)) >= 3
    assert all(line["prompt_tokens"] == 7 and line["error"] is None for line in lines)
    assert "".join(text.removesuffix("\n\nWhy?") for text in sorted_parts(script)) == "word " * 200


def sorted_parts(script: Answering) -> list[str]:
    """Contents of the last run's requests; parts are alike, so any order is the right one."""
    return [text for text in script.asked if len(text) < 500]


def test_status(url: str) -> None:
    shown = CliRunner().invoke(cli, ["status", "--url", url])
    assert shown.exit_code == 0
    assert "tiny" in shown.stdout
    gone = CliRunner().invoke(cli, ["status", "--url", "http://127.0.0.1:9"])
    assert gone.exit_code == 1
    assert "does not answer" in gone.stdout
