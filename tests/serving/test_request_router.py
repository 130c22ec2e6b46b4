"""Serve's hook obeys the plan, and never raises: that would leave a request hanging for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mooncake_serve.router import process_board
from mooncake_serve.router.request_router import PlannedRouter


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))


def pending(**kwargs: Any) -> Any:
    return SimpleNamespace(kwargs=kwargs, routing_context=SimpleNamespace(should_backoff=False))


class Queues:
    """Stands for Serve's cache of queue lengths."""

    def __init__(self, **lengths: int) -> None:
        self._lengths = lengths

    def get(self, replica_id: Any) -> int | None:
        return self._lengths.get(replica_id.unique_id)


class BrokenQueues:
    def get(self, replica_id: Any) -> int | None:
        raise RuntimeError("no queue lengths")


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> PlannedRouter:
    made = object.__new__(PlannedRouter)
    monkeypatch.setattr(
        PlannedRouter, "replica_queue_len_cache", Queues(a=3, b=1, c=2), raising=False
    )
    return made


def names(ranks: list[list[Any]]) -> list[list[str]]:
    return [[one.replica_id.unique_id for one in rank] for rank in ranks]


ABC = [replica("a"), replica("b"), replica("c")]


async def test_the_planned_replica_is_alone_in_the_first_rank(router: PlannedRouter) -> None:
    request = pending(replica="a")
    assert names(await router.choose_replicas(ABC, request)) == [["a"], ["b"], ["c"]]
    assert request.routing_context.should_backoff


@pytest.mark.parametrize("request_", [pending(replica="gone"), pending(), None])
async def test_without_a_usable_plan_the_shortest_queue_is_first(
    router: PlannedRouter, request_: Any
) -> None:
    assert names(await router.choose_replicas(ABC, request_)) == [["b"], ["c"], ["a"]]


async def test_no_candidates(router: PlannedRouter) -> None:
    assert await router.choose_replicas([], pending(replica="a")) == []


async def test_an_error_of_its_own_leaves_the_choice_to_serve(
    router: PlannedRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlannedRouter, "replica_queue_len_cache", BrokenQueues())
    assert names(await router.choose_replicas(ABC, pending(replica="a"))) == [["a", "b", "c"]]


async def test_a_request_without_its_fields_does_not_raise(router: PlannedRouter) -> None:
    ranks = await router.choose_replicas(ABC, SimpleNamespace())  # type: ignore[arg-type]
    assert names(ranks) == [["a", "b", "c"]]


def test_one_board_per_application() -> None:
    assert process_board("x") is process_board("x")
    assert process_board("x") is not process_board("y")
