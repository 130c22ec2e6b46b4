"""What one process knows of the replicas: who runs where, and which work it has given them.

The `RequestRouter` reports the running replicas; the ingress plans and reserves. Both live in one
process but on different threads, so a lock guards the board. A reservation counts until the first
token (its prefill) and until the end (its place in the batch), whatever way the request ends, so
that a burst of requests does not all go to the replica that was idle a moment ago.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mooncake_serve.engine.protocol import Usage
from mooncake_serve.errors import Overloaded
from mooncake_serve.router.planner import Costs, ReplicaLoad, Score, choose
from mooncake_serve.router.prefix import Prefix

RETRY_AFTER_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request should go. `replica` is Serve's unique id of the replica."""

    replica: str
    score: Score


class Reservation:
    """The work of one planned request on its replica. Every method may be called again."""

    def __init__(self, board: Board, plan: Plan, prefill_tokens: int, alone: bool) -> None:
        self.plan = plan
        self._board = board
        self._prefill_tokens = prefill_tokens
        self._alone = alone
        self._planned_at = time.monotonic()
        self._ttft_s: float | None = None
        self._ended = False

    def first_token(self) -> None:
        """The prefill is done."""
        if self._ttft_s is not None:
            return
        self._ttft_s = time.monotonic() - self._planned_at
        self._board._add(self.plan.replica, prefill_tokens=-self._prefill_tokens)

    def end(self, usage: Usage | None = None) -> None:
        """The request ended. From the `usage` of a good end the board learns what prefill costs."""
        if self._ended:
            return
        self.first_token()
        self._ended = True
        self._board._add(self.plan.replica, active=-1)
        if usage is not None and self._alone and self._ttft_s is not None:
            loaded = usage.cached_store_tokens
            computed = usage.prompt_tokens - usage.cached_tokens
            self._board.costs.observe(computed, loaded, self._ttft_s)


class Board:
    """Replicas, their reserved work and the learnt costs. Thread-safe."""

    def __init__(self, *, max_queued_tokens: int = 2_000_000, seed: int | None = None) -> None:
        self.max_queued_tokens = max_queued_tokens
        self.costs = Costs()
        self._loads: dict[str, ReplicaLoad] = {}
        self._nodes: dict[str, str] = {}
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def set_replicas(self, nodes: Mapping[str, str]) -> None:
        """These replicas run, each on its node; loads of those that stay are kept."""
        with self._lock:
            self._nodes = dict(nodes)
            self._loads = {name: self._loads.get(name, ReplicaLoad()) for name in nodes}

    def drop_replica(self, name: str) -> None:
        """This replica is gone, before anybody reports the new set."""
        with self._lock:
            self._loads.pop(name, None)

    def replicas(self) -> list[str]:
        """Running replicas, in a stable order."""
        with self._lock:
            return sorted(self._loads)

    def loads(self) -> dict[str, ReplicaLoad]:
        """A snapshot of the reserved work."""
        with self._lock:
            return dict(self._loads)

    def reserve(
        self,
        length: int,
        prefixes: Mapping[str, Sequence[Prefix]],
        *,
        only: str | None = None,
        avoid: Collection[str] = (),
    ) -> Reservation | None:
        """Plan a prompt of `length` tokens and reserve its work; None while no replica can take it.

        `prefixes` is by node; `only` restricts the choice to one replica, `avoid` excludes some.
        Raises Overloaded when too many prompt tokens wait already.
        """
        with self._lock:
            loads = {
                name: load
                for name, load in self._loads.items()
                if only in (None, name) and name not in avoid
            }
            if not loads:
                return None
            self._check_room(length)
            by_replica = {name: prefixes.get(self._nodes[name], ()) for name in loads}
            replica, score = choose(length, by_replica, loads, self.costs, self._random.choice)
            alone = loads[replica].active == 0
            prefill_tokens = length - score.matched_tokens
            self._shift(replica, prefill_tokens, 1)
        return Reservation(self, Plan(replica, score), prefill_tokens, alone)

    def _check_room(self, length: int) -> None:
        waiting = sum(load.prefill_tokens for load in self._loads.values())
        if waiting and waiting + length > self.max_queued_tokens:
            wait_s = waiting * self.costs.prefill_s / len(self._loads)
            raise Overloaded(
                f"{waiting} prompt tokens wait already and at most {self.max_queued_tokens} "
                "may; try again later, or raise api.max_queued_tokens",
                retry_after_s=min(max(1.0, wait_s), RETRY_AFTER_MAX_S),
            )

    def _add(self, replica: str, *, prefill_tokens: int = 0, active: int = 0) -> None:
        with self._lock:
            self._shift(replica, prefill_tokens, active)

    def _shift(self, replica: str, prefill_tokens: int, active: int) -> None:
        load = self._loads.get(replica)
        if load is not None:
            self._loads[replica] = replace(
                load,
                prefill_tokens=max(0, load.prefill_tokens + prefill_tokens),
                active=max(0, load.active + active),
            )


_boards: dict[str, Board] = {}
_boards_lock = threading.Lock()


def process_board(app: str) -> Board:
    """The board of one application in this process, made at its first use."""
    with _boards_lock:
        return _boards.setdefault(app, Board())
