"""Where requests go, and what reservations count."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_serve.engine.protocol import Usage
from mooncake_serve.errors import Overloaded
from mooncake_serve.router import Board, Reservation, Work
from mooncake_serve.store import BlockShape, PeerSettings, StoreClient, StoreServer

NODE, OTHER = "node-1", "node-2"
BLOCK = 256
SHAPE = BlockShape("bfloat16", 2, 8, 16)
SHAPE_BYTES = 2 * 8 * 16 * 2


def board(*names: str, limit: int = 10_000, nodes: Mapping[str, str] | None = None) -> Board:
    made = Board(seed=1)
    made.limit(limit, None)
    made.set_model(BLOCK, 1000)
    made.set_replicas(nodes or dict.fromkeys(names, NODE))
    return made


def reserve(to: Board, length: int, keys: Sequence[bytes] = (), **among: Any) -> Reservation:
    reservation = to.reserve(length, keys, **among)
    assert reservation is not None
    return reservation


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreClient]:
    """A store on NODE that holds a chain of three blocks."""
    socket = tmp_path / "private" / "store.sock"
    peer = PeerSettings(node=NODE)
    with (
        StoreServer(socket=socket, dram_bytes=16 << 20, peer=peer),
        StoreClient.connect(socket, timeout_s=20.0) as client,
    ):
        keys = chain(3)
        blocks = [np.full(SHAPE_BYTES, 7, np.uint8).data for _ in keys]
        assert client.put(keys, [None, *keys[:-1]], blocks, SHAPE) == ["stored"] * 3
        view = client.cluster()
        patience = time.monotonic() + 20
        while view.entries < 3:
            assert time.monotonic() < patience
            time.sleep(0.01)
        yield client


def chain(count: int) -> list[bytes]:
    return [bytes([fill]) * 32 for fill in range(1, count + 1)]


def test_a_burst_spreads() -> None:
    to = board("a", "b", "c")
    chosen = Counter(reserve(to, 100).plan.replica for _ in range(30))
    assert chosen == {"a": 10, "b": 10, "c": 10}


def test_ties_are_random_unless_one_is_preferred() -> None:
    def first(seed: int, **among: Any) -> str:
        to = Board(seed=seed)
        to.set_replicas({"a": NODE, "b": NODE})
        return reserve(to, 10, **among).plan.replica

    assert {first(seed) for seed in range(20)} == {"a", "b"}
    assert {first(seed, prefer="b") for seed in range(20)} == {"b"}


def test_the_shorter_queue_wins() -> None:
    to = board("a", "b")
    long = reserve(to, 1000)
    assert {reserve(to, 10).plan.replica for _ in range(5)} == {"a", "b"} - {long.plan.replica}


def test_the_node_that_holds_the_prefix_wins(store: StoreClient) -> None:
    to = board(nodes={"a": NODE, "b": OTHER})
    to.planner.set_view(store, timeout_s=20.0)
    for _ in range(5):
        reservation = reserve(to, 1000, chain(3))
        plan = reservation.plan
        assert (plan.replica, plan.matched_tokens) == ("a", 768)
        assert plan.tokens == {"device": 0, "dram": 768, "nvme": 0, "peer": 0}
        assert plan.ttft_s == plan.queue_s + plan.load_s + plan.prefill_s
        reservation.end()


def test_a_queue_outweighs_a_match_and_blocks_come_from_the_other_node(store: StoreClient) -> None:
    to = board(limit=100_000, nodes={"a": NODE, "b": OTHER})
    to.planner.set_view(store, timeout_s=20.0)
    reserve(to, 50_000, only="a")
    plan = reserve(to, 1000, chain(3)).plan
    assert (plan.replica, plan.tokens["peer"]) == ("b", 768)


def test_what_a_replica_says_counts(store: StoreClient) -> None:
    to = board("a", "b")
    to.planner.set_view(store, timeout_s=20.0)
    store.report("a", prefill_tokens=5000, prefill=(0.0, 2e-3, 0.0))
    store.ping()  # Answered in order: the report has arrived.
    plan = reserve(to, 100).plan
    assert plan.replica == "b"
    assert plan.prefill_s == pytest.approx(0.2), "at the measured cost"


def test_only_what_must_be_computed_is_reserved(store: StoreClient) -> None:
    to = board("a")
    to.planner.set_view(store, timeout_s=20.0)
    reservation = reserve(to, 1000, chain(3))
    assert to.loads() == {"a": Work(232, 1)}
    reservation.first_token()
    assert to.loads() == {"a": Work(0, 1)}
    reservation.end()
    assert to.loads() == {"a": Work(0, 0)}


@given(st.lists(st.tuples(st.integers(1, 3000), st.sampled_from(["first", "end", "both"]))))
def test_nothing_stays_reserved(requests: list[tuple[int, str]]) -> None:
    to = board("a", "b", limit=10**9)
    running = [(reserve(to, length), how) for length, how in requests]
    for reservation, how in running:
        if how != "end":
            reservation.first_token()
        reservation.end()
        reservation.end()
    assert set(to.loads().values()) == {Work()}
    assert to.planner.queued_tokens(time.monotonic()) == 0


def test_the_limit_refuses_with_a_time() -> None:
    to = board("a", "b", limit=1000)
    held = reserve(to, 900)
    with pytest.raises(Overloaded) as caught:
        to.reserve(200, [])
    assert 1 <= caught.value.retry_after_s <= 60
    assert "api.max_queued_tokens" in str(caught.value)
    held.first_token()
    assert to.reserve(200, []) is not None


def test_the_objective_refuses_what_would_come_too_late() -> None:
    to = board("a")
    to.limit(10**9, 5.0)
    to.set_model(BLOCK, 1000)
    reserve(to, 4000)
    with pytest.raises(Overloaded, match=r"api\.ttft_slo_s") as caught:
        to.reserve(4000, [])
    assert 5 <= caught.value.retry_after_s <= 60
    assert to.loads() == {"a": Work(4000, 1)}


def test_one_long_prompt_is_taken_when_nothing_waits() -> None:
    reserve(board("a", limit=100), 5000)


def test_no_replicas() -> None:
    assert board().reserve(10, []) is None
    assert board("a").reserve(10, [], only="gone") is None
    assert board("a").reserve(10, [], avoid={"a"}) is None


def test_a_replica_to_avoid_is_not_chosen() -> None:
    to = board("a", "b")
    for _ in range(5):
        reservation = to.reserve(100, [], avoid={"a"})
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
    assert to.loads() == {"a": Work(100, 1), "c": Work()}
    to.drop_replica("a")
    kept.end()
    assert to.replicas() == ["c"]


def test_predictions_are_held_against_what_was_found(store: StoreClient) -> None:
    to = board("a")
    to.planner.set_view(store, timeout_s=20.0)
    for cached in (768, 512):
        usage = Usage(prompt_tokens=1000, completion_tokens=1, cached_tokens=cached)
        reserve(to, 1000, chain(3)).end(usage)
    assert (to.predicted_right, to.predicted_wrong) == (1, 1)
