"""Where requests go, and what reservations count."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_serve.engine.protocol import Usage
from mooncake_serve.errors import Overloaded
from mooncake_serve.router import Board, Costs, Prefix, ReplicaLoad, Reservation, choose
from mooncake_serve.router.planner import OBSERVED_TOKENS_MIN, score

NODE = "node-1"


def board(*names: str, limit: int = 10_000) -> Board:
    made = Board(max_queued_tokens=limit, seed=1)
    made.set_replicas(dict.fromkeys(names, NODE))
    return made


def reserve(to: Board, length: int, matched: int = 0, only: str | None = None) -> Reservation:
    reservation = to.reserve(length, {NODE: [Prefix(matched)]}, only=only)
    assert reservation is not None
    return reservation


def test_a_burst_spreads() -> None:
    to = board("a", "b", "c")
    chosen = Counter(reserve(to, 100).plan.replica for _ in range(30))
    assert chosen == {"a": 10, "b": 10, "c": 10}


def test_ties_are_random() -> None:
    first = {board_of(seed).plan.replica for seed in range(20)}
    assert first == {"a", "b"}


def board_of(seed: int) -> Reservation:
    to = Board(seed=seed)
    to.set_replicas({"a": NODE, "b": NODE})
    return reserve(to, 10)


def test_the_shorter_queue_wins() -> None:
    to = board("a", "b")
    long = reserve(to, 1000)
    assert {reserve(to, 10).plan.replica for _ in range(5)} == {"a", "b"} - {long.plan.replica}


def test_fewer_answers_under_way_win_between_equal_queues() -> None:
    to = board("a", "b")
    decoding = reserve(to, 1000)
    decoding.first_token()
    other = reserve(to, 10).plan.replica
    assert other != decoding.plan.replica


def test_the_node_that_holds_the_prefix_wins_between_equal_queues() -> None:
    to = Board(seed=1)
    to.set_replicas({"a": NODE, "b": "node-2"})
    for _ in range(5):
        reservation = to.reserve(1000, {"node-2": [Prefix(256), Prefix(768)]})
        assert reservation is not None
        assert reservation.plan.replica == "b"
        assert reservation.plan.score.matched_tokens == 768
        reservation.end()


def test_a_queue_outweighs_a_match() -> None:
    loads = {"a": ReplicaLoad(5000, 1), "b": ReplicaLoad()}
    replica, _ = choose(1000, {"a": [Prefix(900)]}, loads, Costs(), min)
    assert replica == "b"


def test_a_prefix_that_loads_slower_than_it_computes_is_not_used() -> None:
    slow = Costs(prefill_s=1e-6, load_s={"dram": 1e-3})
    assert score(1000, [Prefix(900)], ReplicaLoad(), slow).matched_tokens == 0


def test_only_what_must_be_computed_is_reserved() -> None:
    to = board("a")
    reservation = reserve(to, 1000, matched=768)
    assert to.loads() == {"a": ReplicaLoad(232, 1)}
    reservation.first_token()
    assert to.loads() == {"a": ReplicaLoad(0, 1)}
    reservation.end()
    assert to.loads() == {"a": ReplicaLoad(0, 0)}


@given(st.lists(st.tuples(st.integers(1, 3000), st.sampled_from(["first", "end", "both"]))))
def test_nothing_stays_reserved(requests: list[tuple[int, str]]) -> None:
    to = board("a", "b", limit=10**9)
    running = [(reserve(to, length), how) for length, how in requests]
    for reservation, how in running:
        if how != "end":
            reservation.first_token()
        reservation.end()
        reservation.end()
    assert set(to.loads().values()) == {ReplicaLoad()}


def test_the_limit_refuses_with_a_time() -> None:
    to = board("a", "b", limit=1000)
    held = reserve(to, 900)
    with pytest.raises(Overloaded) as caught:
        to.reserve(200, {})
    assert 1 <= caught.value.retry_after_s <= 60
    assert "api.max_queued_tokens" in str(caught.value)
    held.first_token()
    assert to.reserve(200, {}) is not None


def test_one_long_prompt_is_taken_when_nothing_waits() -> None:
    reserve(board("a", limit=100), 5000)


def test_no_replicas() -> None:
    assert board().reserve(10, {}) is None
    assert board("a").reserve(10, {}, only="gone") is None
    assert board("a").reserve(10, {}, avoid={"a"}) is None


def test_a_replica_to_avoid_is_not_chosen() -> None:
    to = board("a", "b")
    for _ in range(5):
        reservation = to.reserve(100, {}, avoid={"a"})
        assert reservation is not None
        assert reservation.plan.replica == "b"


def test_a_pin_is_obeyed_whatever_the_load() -> None:
    to = board("a", "b")
    assert {reserve(to, 500, only="a").plan.replica for _ in range(5)} == {"a"}


def test_replicas_come_and_go() -> None:
    to = board("a", "b")
    kept = reserve(to, 100, only="a")
    gone = reserve(to, 100, only="b")
    to.set_replicas({"a": NODE, "c": NODE})
    gone.end()
    assert to.loads() == {"a": ReplicaLoad(100, 1), "c": ReplicaLoad()}
    to.drop_replica("a")
    kept.end()
    assert to.replicas() == ["c"]


def test_prefill_cost_is_learnt() -> None:
    costs = Costs()
    for _ in range(60):
        costs.observe(1000, 0, 0.25)
    assert costs.prefill_s == pytest.approx(0.25e-3, rel=0.01)
    costs.observe(OBSERVED_TOKENS_MIN - 1, 5, 100.0)
    assert costs.prefill_s == pytest.approx(0.25e-3, rel=0.01)


def test_only_a_request_that_waited_for_nobody_teaches() -> None:
    to = board("a")
    usage = Usage(prompt_tokens=1000, completion_tokens=1, cached_tokens=0)
    first, second = reserve(to, 1000), reserve(to, 1000)
    guess = to.costs.prefill_s
    second.first_token()
    second.end(usage)
    assert to.costs.prefill_s == guess
    first.first_token()
    first.end(usage)
    assert to.costs.prefill_s < guess


@given(
    length=st.integers(1, 100_000),
    matched=st.integers(0, 100_000),
    load=st.builds(ReplicaLoad, st.integers(0, 1_000_000), st.integers(0, 100)),
)
def test_score_is_a_sum_of_what_is_done(length: int, matched: int, load: ReplicaLoad) -> None:
    matched = min(matched, length)
    got = score(length, [Prefix(matched)], load, Costs())
    assert got.ttft_s == got.queue_s + got.load_s + got.prefill_s
    assert got.ttft_s <= score(length, [], load, Costs()).ttft_s
    assert got.matched_tokens in (0, matched)
    assert min(got[:3]) >= 0
