"""What one process knows of the replicas: who runs where, and which work it has given them.

The `RequestRouter` reports the running replicas; the ingress plans and reserves. Both live in one
process but on different threads. The decision is made by `RoutePlanner`, the code that the
simulator runs, over the cluster index in shared memory; the board keeps it supplied and turns its
answers into reservations. A reservation counts until the first token (its prefill) and until the
end (its place in the batch), whatever way the request ends, so that a burst of requests does not
all go to the replica that was idle a moment ago.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mooncake_serve._store import Route, RoutePlanner
from mooncake_serve.engine.protocol import Usage
from mooncake_serve.errors import Overloaded

RETRY_AFTER_MAX_S = 60.0
TIERS = ("device", "dram", "nvme", "peer")


class Work(NamedTuple):
    """What this process has given a replica: tokens still to prefill, and requests under way."""

    prefill_tokens: int = 0
    active: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request should go, and why. Times are predictions, in seconds."""

    replica: str
    """Serve's unique id of the replica."""
    queue_s: float
    load_s: float
    prefill_s: float
    tokens: Mapping[str, int]
    """Prompt tokens that are loaded instead of computed, by tier."""

    @property
    def matched_tokens(self) -> int:
        """Tokens from all tiers."""
        return sum(self.tokens.values())

    @property
    def ttft_s(self) -> float:
        """Expected time to first token."""
        return self.queue_s + self.load_s + self.prefill_s


class Reservation:
    """The work of one planned request on its replica. Every method may be called again."""

    def __init__(self, board: Board, request: int, plan: Plan) -> None:
        self.plan = plan
        self._board = board
        self._request = request
        self._ended = False

    def first_token(self) -> None:
        """The prefill is done."""
        self._board.planner.first_token(self._request)

    def end(self, usage: Usage | None = None) -> None:
        """The request ended; the `usage` of a good end is held against the prediction."""
        if self._ended:
            return
        self._ended = True
        self._board.planner.end(self._request)
        if usage is not None:
            self._board.compare(self.plan, usage)


class Board:
    """Replicas and the work reserved on them. Thread-safe."""

    def __init__(self, *, seed: int | None = None) -> None:
        self.max_queued_tokens = 2_000_000
        self.block_tokens = 256
        self.planner = self._make_planner(None, seed)
        self.predicted_right = 0
        """Ended requests whose cached tokens were as planned, and others."""
        self.predicted_wrong = 0
        self._seed = seed
        self._nodes: dict[str, str] = {}
        self._emptied_at = float("-inf")
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @staticmethod
    def _make_planner(slo_s: float | None, seed: int | None) -> RoutePlanner:
        return RoutePlanner(slo_s=slo_s, seed=random.getrandbits(64) if seed is None else seed)

    def limit(self, max_queued_tokens: int, ttft_slo_s: float | None) -> None:
        """Refuse requests beyond these; call it before the first request."""
        with self._lock:
            self.max_queued_tokens = max_queued_tokens
            self.planner = self._make_planner(ttft_slo_s, self._seed)
            self.planner.set_replicas(self._nodes, time.monotonic())

    def set_model(self, block_tokens: int, token_bytes: int) -> None:
        """What a block is, and how many bytes of KV a token has."""
        self.block_tokens = block_tokens
        self.planner.set_model(block_tokens, token_bytes)

    def set_replicas(self, nodes: Mapping[str, str]) -> None:
        """These replicas run, each on its node; loads of those that stay are kept."""
        with self._lock:
            had, self._nodes = self._nodes, dict(nodes)
            self.planner.set_replicas(self._nodes, time.monotonic())
            self._note_empty(had)

    def drop_replica(self, name: str) -> None:
        """This replica is gone, before anybody reports the new set."""
        with self._lock:
            had = dict(self._nodes)
            self._nodes.pop(name, None)
            self.planner.drop_replica(name, time.monotonic())
            self._note_empty(had)

    def emptied_s(self) -> float:
        """Seconds since the last replica went; infinite while none ever ran."""
        return time.monotonic() - self._emptied_at

    def replicas(self) -> list[str]:
        """Running replicas, in a stable order."""
        return self.planner.replicas()

    def loads(self) -> dict[str, Work]:
        """A snapshot of the work given from here."""
        return {name: Work(*work) for name, work in self.planner.outstanding().items()}

    def reserve(
        self,
        length: int,
        keys: Sequence[bytes],
        *,
        only: str | None = None,
        prefer: str | None = None,
        avoid: Collection[str] = (),
    ) -> Reservation | None:
        """Plan a prompt of `length` tokens and reserve its work; None while no replica can take it.

        `keys` are those of its full blocks. `only` restricts the choice to one replica, `avoid`
        excludes some, `prefer` wins ties. Raises Overloaded when too many prompt tokens wait
        already, or when no replica would answer in time.
        """
        now = time.monotonic()
        self._check_room(length, now)
        request = next(self._numbers)
        route, best_s = self.planner.plan(
            request, length, keys, now, only=only, prefer=prefer, avoid=list(avoid)
        )
        if route is not None:
            return Reservation(self, request, self._plan(route))
        if best_s == float("inf"):
            return None
        raise Overloaded(
            f"the first token would take {best_s:.1f} s on every replica; try again later, or "
            "raise api.ttft_slo_s",
            retry_after_s=min(max(1.0, best_s), RETRY_AFTER_MAX_S),
        )

    def compare(self, plan: Plan, usage: Usage) -> None:
        """Count whether a plan found what it expected."""
        with self._lock:
            if plan.matched_tokens == usage.cached_tokens:
                self.predicted_right += 1
            else:
                self.predicted_wrong += 1

    def _note_empty(self, had: Mapping[str, str]) -> None:
        if had and not self._nodes:
            self._emptied_at = time.monotonic()

    def _plan(self, route: Route) -> Plan:
        by_tier: dict[str, int] = {
            tier: blocks * self.block_tokens
            for tier, blocks in zip(TIERS, route.blocks, strict=True)
        }
        return Plan(route.replica, route.queue_s, route.load_s, route.prefill_s, by_tier)

    def _check_room(self, length: int, now: float) -> None:
        waiting = self.planner.queued_tokens(now)
        if waiting and waiting + length > self.max_queued_tokens:
            (_, token_s, _), _, _ = self.planner.costs()
            wait_s = waiting * token_s / max(1, len(self.replicas()))
            raise Overloaded(
                f"{waiting} prompt tokens wait already and at most {self.max_queued_tokens} "
                "may; try again later, or raise api.max_queued_tokens",
                retry_after_s=min(max(1.0, wait_s), RETRY_AFTER_MAX_S),
            )


_boards: dict[str, Board] = {}
_boards_lock = threading.Lock()


def process_board(app: str) -> Board:
    """The board of one application in this process, made at its first use."""
    with _boards_lock:
        return _boards.setdefault(app, Board())
