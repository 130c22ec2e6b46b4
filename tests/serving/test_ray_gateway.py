"""Requests over a handle: what becomes of Ray's errors, retries, and reserved work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

from mooncake_serve._store import ClusterIndex
from mooncake_serve.api import ray_gateway
from mooncake_serve.api.gateway import Hints
from mooncake_serve.api.ray_gateway import RayAnswer, RayGateway
from mooncake_serve.engine.protocol import (
    Event,
    FailEvent,
    FinishEvent,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
    Usage,
)
from mooncake_serve.engine.wire import pack
from mooncake_serve.errors import EngineFailed, InvalidRequest, Overloaded, Unavailable
from mooncake_serve.router import Board, Work
from mooncake_serve.store import block_keys

BLOCK = 16
MODEL = {
    "name": "m",
    "namespace": "ns",
    "block_tokens": BLOCK,
    "token_bytes": 100,
    "max_context": 512,
    "vocab_size": 320,
    "exact": True,
}
TOKEN = TokenEvent(1, "a")
END = FinishEvent("length", Usage(prompt_tokens=40, completion_tokens=1, cached_tokens=0))
GONE = ActorUnavailableError("gone", b"\0" * 16)
RESET = AioRpcError(grpc.StatusCode.CANCELLED, Metadata(), Metadata())

Step = list[Event] | Exception
IDLE = {"a": Work(), "b": Work()}


class Stream:
    """What a streaming handle call returns."""

    def __init__(self, replica: str, steps: list[Step], hang: bool) -> None:
        self._replica = replica
        self._steps = iter(steps)
        self._hang = hang
        self.cancelled = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> bytes:
        step = next(self._steps, None)
        if isinstance(step, Exception):
            raise step
        if step is None:
            if self._hang:
                await asyncio.Event().wait()
            raise StopAsyncIteration
        return pack(self._replica, step)

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """A deployment whose replicas each play a script."""

    def __init__(self, hang: bool = False, **scripts: list[Step]) -> None:
        self._scripts = scripts
        self._hang = hang
        self.streams: list[tuple[str, Stream]] = []
        self.describe_error: Exception | None = None
        self.takes_over: str | None = None
        self.describe = self.generate = self

    def options(self, *, stream: bool, **serialization: str) -> Handle:
        assert stream
        assert set(serialization.values()) == {"pickle"}
        return self

    def remote(self, *args: Any, replica: str = "") -> Any:
        if not args:
            return self._describe()
        stream = Stream(self.takes_over or replica, self._scripts[replica], self._hang)
        self.streams.append((replica, stream))
        return stream

    async def _describe(self) -> dict[str, Any]:
        if self.describe_error:
            raise self.describe_error
        return MODEL

    @property
    def tried(self) -> list[str]:
        return [replica for replica, _ in self.streams]


def request(length: int = 40) -> GenerationRequest:
    return GenerationRequest("r", tuple(range(length)), SamplingParams(max_tokens=1), tenant="t")


@pytest.fixture
def board() -> Board:
    made = Board(seed=3)
    made.set_replicas({"a": "node", "b": "node"})
    return made


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_gateway, "REPLICA_WAIT_S", 0.05)


def gateway(handle: Handle, board: Board) -> RayGateway:
    codec: Any = None
    either: Any = handle
    return RayGateway(either, board, codec)


async def batches(answer: RayAnswer) -> list[list[Event]]:
    return [batch async for batch in answer.events()]


def failure(batch: list[Event]) -> Exception:
    assert isinstance(batch[-1], FailEvent)
    return batch[-1].error


async def test_an_answer_and_its_route(board: Board) -> None:
    index = ClusterIndex("node")
    index.apply(0, block_keys("ns", b"", range(BLOCK), BLOCK)[0], 0)
    board.planner.set_view(index)
    handle = Handle(a=[[TOKEN], [END]], b=[[TOKEN], [END]])
    answer = await gateway(handle, board).start(request(), 10, Hints(pin=1))
    assert board.loads() == {"a": Work(), "b": Work(40 - BLOCK, 1)}
    assert await batches(answer) == [[TOKEN], [END]]
    assert handle.tried == ["b"]
    assert (answer.route["replica"], answer.route["reason"]) == ("b", "pinned")
    assert answer.route["matched_tokens"] == BLOCK
    assert board.loads() == IDLE
    assert not handle.streams[0][1].cancelled


@pytest.mark.parametrize(("length", "blocks"), [(1, 0), (BLOCK, 0), (BLOCK + 1, 1), (40, 2)])
def test_the_tail_is_never_asked_for(length: int, blocks: int) -> None:
    keys = ray_gateway._keys(request(length), MODEL)
    assert keys == block_keys("ns", b"", range(BLOCK * blocks), BLOCK)


@pytest.mark.parametrize("error", [GONE, RESET])
async def test_a_replica_that_dies_before_a_token_is_replaced(
    board: Board, error: Exception
) -> None:
    handle = Handle(a=[error], b=[[TOKEN, END]])
    answer = await gateway(handle, board).start(request(), 10, Hints(pin=0))
    assert await batches(answer) == [[TOKEN, END]]
    assert handle.tried == ["a", "b"]
    assert (answer.route["replica"], answer.route["reason"]) == ("b", "replica_died")
    assert board.loads() == IDLE, "a replica that failed one request is not given up"


async def test_a_replica_that_dies_after_a_token_ends_the_answer(board: Board) -> None:
    handle = Handle(a=[[TOKEN], GONE])
    answer = await gateway(handle, board).start(request(), 10, Hints(pin=0))
    got = await batches(answer)
    assert got[0] == [TOKEN]
    assert isinstance(failure(got[1]), EngineFailed)
    assert handle.tried == ["a"]
    assert board.loads() == IDLE


async def test_when_every_replica_dies_the_request_is_unavailable(board: Board) -> None:
    handle = Handle(a=[GONE], b=[GONE])
    answer = await gateway(handle, board).start(request(), 10, Hints())
    with pytest.raises(Unavailable):
        await batches(answer)
    assert sorted(handle.tried) == ["a", "b"]
    assert board.loads() == IDLE


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (BackPressureError(5, 5), Overloaded),
        (DeploymentUnavailableError("model"), Unavailable),  # type: ignore[arg-type]
    ],
)
async def test_errors_of_serve_become_ours(board: Board, error: Exception, ours: type) -> None:
    handle = Handle(a=[error], b=[error])
    [batch] = await batches(await gateway(handle, board).start(request(), 10, Hints()))
    assert isinstance(failure(batch), ours)
    assert board.loads() == IDLE


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_leaving_cancels_down_to_the_replica(board: Board, how: str) -> None:
    handle = Handle(hang=True, a=[[TOKEN]])
    answer = await gateway(handle, board).start(request(), 10, Hints(pin=0))
    events = answer.events()
    assert await anext(events) == [TOKEN]
    if how == "close":
        await events.aclose()
    else:
        task = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert handle.streams[0][1].cancelled
    assert board.loads() == IDLE


@pytest.mark.parametrize(
    "describe_error", [None, TimeoutError(), GONE, RESET, RayServeException("no")]
)
async def test_without_replicas_it_is_unavailable(describe_error: Exception | None) -> None:
    handle = Handle()
    handle.describe_error = describe_error
    empty = gateway(handle, Board())
    calls: list[Callable[[], Any]] = [empty.card, lambda: empty.start(request(), 10, Hints())]
    for call in calls:
        with pytest.raises(Unavailable) as caught:
            await call()
        assert caught.value.code == "no_replica"


async def test_requests_wait_while_the_last_replica_is_replaced(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = gateway(Handle(), board)
    (await over.start(request(), 10, Hints())).abandon()
    board.drop_replica("a")
    board.set_replicas({})
    assert (await over.card()).name == "m"
    waiting = asyncio.ensure_future(over.start(request(), 10, Hints()))
    await asyncio.sleep(3 * ray_gateway.REPLICA_WAIT_S)
    assert not waiting.done()
    board.set_replicas({"c": "node"})
    assert (await waiting).route["replica"] == "c"
    board.set_replicas({})
    monkeypatch.setattr(ray_gateway, "REPLACE_S", 0.0)
    with pytest.raises(Unavailable):
        await over.card()


async def test_a_pin_outside_the_replicas_is_refused(board: Board) -> None:
    with pytest.raises(InvalidRequest, match="2 run"):
        await gateway(Handle(), board).start(request(), 10, Hints(pin=2))
    assert board.loads() == IDLE


async def test_choices_of_one_prompt_share_a_replica(board: Board) -> None:
    over = gateway(Handle(), board)
    first = await over.start(request(), 10, Hints())
    for _ in range(4):
        answer = await over.start(request(), 10, Hints(beside=first.route["replica"]))
        assert answer.route["replica"] == first.route["replica"]
        assert answer.route["reason"] == "beside"
    assert (await over.start(request(), 10, Hints(beside="gone"))).route["replica"] in IDLE


async def test_a_replica_that_serve_chose_instead_is_named(board: Board) -> None:
    """The router sends a request elsewhere when the planned replica is gone or full."""
    handle = Handle(a=[[TOKEN], [END]], b=[[TOKEN], [END]])
    over = gateway(handle, board)
    answer = await over.start(request(), 10, Hints())
    planned = answer.route["replica"]
    assert answer.route["reason"] == "least_time"
    taken = next(name for name in IDLE if name != planned)
    handle.takes_over = taken
    assert await batches(answer) == [[TOKEN], [END]]
    assert (answer.route["replica"], answer.route["reason"]) == (taken, "elsewhere")


async def test_a_session_stays_while_replicas_are_equal(board: Board) -> None:
    over = gateway(Handle(), board)
    seen = set()
    for _ in range(8):
        answer = await over.start(request(), 10, Hints(session="s"))
        seen.add(answer.route["replica"])
        answer.abandon()
    assert len(seen) == 1
    assert board.loads() == IDLE


async def test_a_busy_replica_loses_its_session(board: Board) -> None:
    over = gateway(Handle(), board)
    first = await over.start(request(400), 10, Hints(session="s"))
    second = await over.start(request(400), 10, Hints(session="s"))
    assert first.route["replica"] != second.route["replica"]
