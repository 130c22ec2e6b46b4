"""Plans and outcomes: what the router's journal and metrics say of requests."""

from __future__ import annotations

import logging
import random

import httpx
import pytest

from mooncake_serve.api import create_app
from mooncake_serve.api.gateway import Hints
from mooncake_serve.api.observed import ObservedGateway
from mooncake_serve.config import ApiConfig
from mooncake_serve.engine.protocol import GenerationRequest, SamplingParams, TokenEvent
from mooncake_serve.logs import REQUEST
from mooncake_serve.prometheus import PrometheusSink
from mooncake_serve.router.hot import KEYS, HotKeys
from mooncake_serve.router.journal import BUCKET_S, BUCKETS, DECISIONS, Decision, Journal
from tests.api.fake import MODEL, FakeAnswer, FakeGateway

SECRET = "the-secret-of-this-prompt"


def decision(number: int) -> Decision:
    return Decision(f"r{number}", float(number), 100, "a", "least_time", 0.0, 0.1, 0.6, 40)


async def test_a_request_is_in_the_books(gateway: FakeGateway) -> None:
    sink = PrometheusSink()
    books = ObservedGateway(gateway, MODEL, sink)
    transport = httpx.ASGITransport(create_app(books, ApiConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        body = {"model": MODEL, "prompt": "once upon a time, " * 5, "max_tokens": 3}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert gateway.requests[0].log_id == answer.headers["x-request-id"]
    (one,) = books.journal.decisions()
    assert (one["replica"], one["reason"]) == ("r0", "least_time")
    assert one["prompt_tokens"] == len(body["prompt"])
    assert one["cached_tokens"] == 4
    assert one["ttft_s"] > 0
    assert books.journal.hot.top(5) == [{"key": "0" * 16, "requests": 1, "cached_tokens": 64}]
    scraped = sink.render().decode()
    assert "mooncake_router_predicted_cached_tokens_total 64.0" in scraped
    assert "mooncake_router_actual_cached_tokens_total 4.0" in scraped
    assert "mooncake_router_decision_seconds_count 1.0" in scraped
    saved = 4 * 2.0 / (len(body["prompt"]) - 64) - 0.05
    assert books.journal.saved_prefill_s == pytest.approx(saved)


@pytest.mark.parametrize("reason", ["replica_died", "elsewhere"])
async def test_another_replica_than_the_planned_one(gateway: FakeGateway, reason: str) -> None:
    """The journal tells what answered in the end, by the figures of that plan; counted once."""
    sink = PrometheusSink()
    books = ObservedGateway(gateway, MODEL, sink)
    request = GenerationRequest("r", tuple(range(100)), SamplingParams(max_tokens=3))
    answer = await books.start(request, 10.0, Hints())
    assert books.journal.decisions()[0]["replica"] == "r0"
    gateway.answers[0].route |= {"replica": "r7", "reason": reason, "matched_tokens": 16}
    assert len([events async for events in answer.events()]) == 4
    (one,) = books.journal.decisions()
    assert (one["replica"], one["reason"], one["matched_tokens"]) == ("r7", reason, 16)
    scraped = sink.render().decode()
    assert f'mooncake_router_rerouted_total{{reason="{reason}"}} 1.0' in scraped
    assert "mooncake_router_predicted_cached_tokens_total 16.0" in scraped


async def test_prompts_and_answers_are_never_logged(
    gateway: FakeGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="mooncake_serve")
    transport = httpx.ASGITransport(create_app(gateway, ApiConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for body in (
            {"model": MODEL, "prompt": SECRET, "max_tokens": 3},
            {"model": MODEL, "prompt": SECRET, "max_tokens": 3, "stream": True},
            {"model": MODEL, "prompt": SECRET, "max_tokens": -1},
            {"model": SECRET, "prompt": SECRET},
        ):
            await http.post("/v1/completions", json=body, headers={"x-request-id": "named"})
        gateway.fail_after = 1
        gateway.error = RuntimeError("boom")
        await http.post("/v1/completions", json={"model": MODEL, "prompt": SECRET})
    lines = [f"{one.getMessage()} {one.__dict__.get('fields')}" for one in caplog.records]
    assert sum("answered" in line for line in lines) == 5
    assert not [line for line in lines if SECRET in line or "abc" in line]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_runs_under_its_requests_id(
    gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    seen: list[str] = []
    token = FakeAnswer._token

    def note(answer: FakeAnswer, index: int) -> TokenEvent:
        seen.append(REQUEST.get())
        return token(answer, index)

    monkeypatch.setattr(FakeAnswer, "_token", note)
    transport = httpx.ASGITransport(create_app(gateway, ApiConfig()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "n": 3, "stream": stream}
        await http.post("/v1/completions", json=body, headers={"x-request-id": "named"})
    assert seen == ["named"] * 6


def test_history_is_bounded_and_in_order() -> None:
    journal = Journal()
    for number in range(2 * BUCKETS):
        one = decision(number)
        journal.planned(one, None)
        journal.answered(one, 0.1 * (1 + number % 3), 40, number * BUCKET_S)
    history = journal.history()
    assert len(history) == BUCKETS
    assert [bucket["at"] for bucket in history] == sorted(bucket["at"] for bucket in history)
    assert history[-1]["prompt_tokens"] == 100
    assert history[-1]["cached_tokens"] == 40
    assert history[-1]["ttft_p50_s"] == history[-1]["ttft_p95_s"]
    shown = journal.decisions()
    assert len(shown) == DECISIONS
    assert shown[0]["request_id"] == f"r{2 * BUCKETS - 1}"


def test_the_rarest_key_makes_room() -> None:
    """Against the definition: the fewest requests, of equals the one that came first."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    hot, counts = HotKeys(), dict[bytes, int]()
    for _ in range(20 * KEYS):
        key = int(rng.paretovariate(0.3)).to_bytes(256, "big")[-32:]
        hot.count(key, 0)
        floor = 0
        if key not in counts and len(counts) == KEYS:
            floor = counts.pop(min(counts, key=counts.__getitem__))
        counts[key] = counts.get(key, floor) + 1
    assert {key: one.requests for key, one in hot._counts.items()} == counts
    assert len(hot._rarest) == KEYS


def test_hot_keys_are_bounded_and_keep_what_is_frequent() -> None:
    hot = HotKeys()
    for number in range(5 * KEYS):
        hot.count(number.to_bytes(32, "big"), 0)
        hot.count(b"\xff" * 32, number)
    top = hot.top(3)
    assert top[0] == {
        "key": "f" * 16,
        "requests": 5 * KEYS,
        "cached_tokens": 5 * KEYS - 1,
    }
    assert len(hot.top(10 * KEYS)) == KEYS
