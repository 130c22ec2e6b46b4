"""The load generator: workloads repeat by seed and share what they should; counts add up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from mooncake_serve.bench import serve, workloads
from mooncake_serve.bench.http import Connection
from mooncake_serve.bench.load import closed_loop, open_loop
from mooncake_serve.client import AsyncClient
from mooncake_serve.errors import ConfigError
from tests.client.server import Script, chunk, events, running

USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}


class Streaming(Script):
    """Streams three tokens to everybody; fails those whose text says so, refuses the first few."""

    busy = 0

    async def handle(self, request: Any) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.busy and body["max_tokens"] > 1:  # Not the warm-up.
            self.busy -= 1
            return Response(json.dumps({"error": {"message": "busy"}}), 429)
        if "fail" in json.dumps(body):
            return Response(json.dumps({"error": {"message": "no"}}), 400)
        usage = {"model": "tiny", "choices": [], "usage": USAGE}
        return events(chunk("a"), chunk("b"), chunk("c", "length"), usage, "[DONE]")


@pytest.fixture
def script() -> Streaming:
    return Streaming()


@pytest.fixture
def url(script: Streaming) -> Iterator[str]:
    with running(script) as address:
        yield address


def test_shared_documents_are_shared() -> None:
    sessions = workloads.shared_doc(3, 4, 50, 8, seed=5)
    assert sessions == workloads.shared_doc(3, 4, 50, 8, seed=5)
    documents = Counter(each.turns[0].text.split("\n\n")[0] for each in sessions)
    assert sorted(documents.values()) == [4, 4, 4]
    assert len({each.turns[0].text for each in sessions}) == 12


def test_a_trace_keeps_what_is_shared(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 40, "hash_ids": [1, 2, 3]},
        {"timestamp": 500, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 4]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = workloads.trace(path, 10, 4096, 0.25)
    one, other = first.turns[0].token_ids, second.turns[0].token_ids
    assert (len(one), len(other)) == (300, 275)
    assert one[:256] == other[:256]
    assert one[256:270] != other[256:270]
    assert (first.turns[0].max_tokens, second.arrival_s) == (10, 0.5)
    assert len(workloads.trace(path, 1, 128, 1.0)[0].turns[0].token_ids) == 96
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match=":1: not a request"):
        workloads.trace(path, 1, 128, 1.0)


async def test_closed_and_open_loops_count_alike(script: Streaming, url: str) -> None:
    sessions = workloads.multi_turn(3, 2, 4, 3, seed=1)
    bad = workloads.Session((workloads.Turn("fail"), workloads.Turn("never sent")))
    async with AsyncClient(url, model="tiny") as client:
        closed = await closed_loop(client, [*sessions, bad], 2)
        timed = workloads.poisson([*sessions, bad], 1000, seed=1)
        opened = await open_loop(client, timed)
    for measured in (closed, opened):
        report = measured.report()
        assert (report["requests"], report["failed"]) == (7, 1)
        assert (report["prompt_tokens"], report["output_tokens"]) == (60, 18)
        assert report["cached_share"] == 0.4
        assert len(measured.itl_s) == 12
        assert report["ttft_s"]["p50"] <= report["e2e_s"]["p99"]
    longest = max(script.bodies, key=lambda body: len(body["messages"]))
    roles = [message["role"] for message in longest["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert longest["messages"][1]["content"] == "abc"


def test_the_command_prints_one_object(
    script: Streaming, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    from mooncake_serve.client.types import Tokens

    async def tokenize(*_: object, **__: object) -> Tokens:
        return Tokens((1,), 4096)

    monkeypatch.setattr(AsyncClient, "tokenize", tokenize)
    # The warm-up is not streamed; the script answers everybody with a stream.
    monkeypatch.setattr(serve, "WARM_UP_TOKENS", 1)

    async def chat(self: AsyncClient, messages: Any, **options: Any) -> Any:
        options["stream"] = True
        return await original(self, messages, **options)

    original: Any = AsyncClient.chat
    monkeypatch.setattr(AsyncClient, "chat", chat)
    assert serve.main(["--url", url, "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    keys = {"workload", "mode", "requests", "failed", "ttft_s", "itl_s", "e2e_s"}
    assert keys | {"output_tok_s", "cached_share", "machine", "version", "runs"} <= set(report)
    assert (report["requests"], report["failed"], report["mode"]) == (16, 0, "closed")
    asked = len(script.bodies)
    script.busy = 3
    assert serve.main(["--url", url, "--quick", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["failed"]) == (16, 3)
    assert len(script.bodies) == 2 * asked


class Completing(Script):
    """A streamed text completion; refuses what says "fail"."""

    async def handle(self, request: Any) -> Response:
        if "fail" in (await request.json())["prompt"]:
            return Response("no", 400)
        texts = ({"choices": [{"index": 0, "text": text}]} for text in "abc")
        return events(*texts, "[DONE]")


async def test_streams_are_parsed_as_they_arrive() -> None:
    with running(Completing()) as url:
        async with Connection(url) as connection:
            sent = connection.encode("/v1/completions", b'{"prompt": "x"}')
            for _ in range(2):
                chunks = await connection.stream(sent)
                assert [chunk.choices[0].text for chunk in chunks] == ["a", "b", "c"]
            assert (await connection.ask(sent)).count(b"data: ") == 4
            with pytest.raises(RuntimeError, match="400: b'no'"):
                await connection.ask(connection.encode("/v1/completions", b'{"prompt": "fail"}'))
