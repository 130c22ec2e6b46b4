"""The gateway over Ray Serve: plan on the board, send through a handle, retry if a replica dies.

A request whose replica died before its first token goes to another one; after the first token it
fails cleanly, because sampled tokens cannot be taken back. Ray's own errors become ours here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import Any

from grpc.aio import AioRpcError
from ray.exceptions import RayActorError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    RayServeException,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

from mooncake_serve.api.gateway import Codec, Hints, ModelCard, Reason
from mooncake_serve.api.sessions import Sessions
from mooncake_serve.engine.protocol import (
    Event,
    FailEvent,
    FinishEvent,
    GenerationRequest,
    TokenEvent,
)
from mooncake_serve.engine.wire import unpack
from mooncake_serve.errors import EngineFailed, InvalidRequest, Overloaded, Unavailable
from mooncake_serve.router import Board, Reservation
from mooncake_serve.store import block_keys

log = logging.getLogger(__name__)

ATTEMPTS_MAX = 3
QUICK_TOKENS = 4096
"""Their keys are hashed sooner than a thread takes over."""
REPLICA_WAIT_S = 5.0
REPLICA_POLL_S = 0.05
REPLACE_S = 30.0
"""How long Serve may take to replace the last replica: until then requests wait for it."""
NO_REPLICA = "no model replica is running; try again soon (`serve status` says why)"

REPLICA_GONE = (RayActorError, ReplicaUnavailableError, AioRpcError)
"""What Ray raises for a replica that went away, by actor call or by gRPC."""


class RayGateway:
    """Runs requests on the deployment behind `handle`."""

    def __init__(
        self,
        handle: DeploymentHandle,
        board: Board,
        codec: Codec,
    ) -> None:
        self._describe = handle.describe
        # Messages are bytes already, which "pickle" takes as they are; the default, cloudpickle,
        # makes a pickler for each. Typed as Any: Ray's stubs do not know that stream=True makes an
        # async generator.
        self._generate: Any = handle.options(
            stream=True, request_serialization="pickle", response_serialization="pickle"
        ).generate
        self._board = board
        self._codec = codec
        self._model: dict[str, Any] | None = None
        self._created = int(time.time())
        self._sessions = Sessions()

    async def card(self) -> ModelCard:
        """The model. Raises Unavailable while no replica runs."""
        model = await self._known_model()
        if not self._board.replicas() and not self._is_replacing():
            raise Unavailable(NO_REPLICA, code="no_replica")
        return ModelCard(
            name=model["name"],
            max_context=model["max_context"],
            vocab_size=model["vocab_size"],
            exact=model["exact"],
            created=self._created,
        )

    async def codec(self) -> Codec:
        """The model's tokenizer."""
        return self._codec

    async def start(self, request: GenerationRequest, timeout_s: float, hints: Hints) -> RayAnswer:
        """Plan a request. It is sent when its events are asked for."""
        model = await self._known_model()
        if len(request.token_ids) <= QUICK_TOKENS:
            keys = _keys(request, model)
        else:
            keys = await asyncio.to_thread(_keys, request, model)
        pinned, beside = self._pinned(hints.pin), self._running(hints.beside)
        reason: Reason = "pinned" if pinned else "beside" if beside else "least_time"
        last = self._sessions.last(request.tenant, hints.session)
        reservation = await self.reserve(request, keys, only=pinned or beside, prefer=last)
        self._sessions.answered(request.tenant, hints.session, reservation.plan.replica)
        return RayAnswer(self, request, timeout_s, keys, reservation, reason)

    def send(self, request: GenerationRequest, timeout_s: float, replica: str) -> Any:
        """The handle's stream of messages."""
        return self._generate.remote(request, timeout_s, replica=replica)

    async def reserve(
        self,
        request: GenerationRequest,
        keys: Sequence[bytes],
        *,
        only: str | None = None,
        prefer: str | None = None,
        avoid: Collection[str] = (),
    ) -> Reservation:
        """Plan and reserve, waiting a little for a replica to appear."""
        deadline = time.monotonic() + REPLICA_WAIT_S
        length = len(request.token_ids)
        while True:
            reservation = self._board.reserve(length, keys, only=only, prefer=prefer, avoid=avoid)
            if reservation is not None:
                return reservation
            if time.monotonic() > deadline and not self._is_replacing():
                raise Unavailable(NO_REPLICA, code="no_replica")
            await asyncio.sleep(REPLICA_POLL_S)

    def _is_replacing(self) -> bool:
        return not self._board.replicas() and self._board.emptied_s() < REPLACE_S

    async def _known_model(self) -> dict[str, Any]:
        model = self._model
        if model is None:
            try:
                async with asyncio.timeout(REPLICA_WAIT_S):
                    described: Any = await self._describe.remote()
            except (TimeoutError, RayServeException, *REPLICA_GONE) as err:
                raise Unavailable(NO_REPLICA, code="no_replica") from err
            self._model = model = dict(described)
            self._board.set_model(model["block_tokens"], model["token_bytes"])
        return model

    def _running(self, replica: str | None) -> str | None:
        return replica if replica is not None and replica in self._board.replicas() else None

    def _pinned(self, index: int | None) -> str | None:
        if index is None:
            return None
        replicas = self._board.replicas()
        if index >= len(replicas):
            raise InvalidRequest(
                f"x-mooncake-replica: no replica {index}, {len(replicas)} run", code="invalid_value"
            )
        return replicas[index]


def _keys(request: GenerationRequest, model: dict[str, Any]) -> list[bytes]:
    """Keys of the blocks that may be cached; never the tail (see the engine)."""
    block_tokens = model["block_tokens"]
    full_blocks = (len(request.token_ids) - 1) // block_tokens
    tokens = array("I", request.token_ids[: full_blocks * block_tokens])
    return block_keys(model["namespace"], request.tenant_salt, tokens, block_tokens)


class RayAnswer:
    """One planned request; `events` sends it."""

    def __init__(
        self,
        gateway: RayGateway,
        request: GenerationRequest,
        timeout_s: float,
        keys: Sequence[bytes],
        reservation: Reservation,
        reason: Reason,
    ) -> None:
        self._gateway = gateway
        self._request = request
        self._deadline = time.monotonic() + timeout_s
        self._keys = keys
        self._reservation = reservation
        self._reason: Reason = reason
        self._answered_by: str | None = None

    @property
    def route(self) -> dict[str, Any]:
        """Who answers and why. The replica is the planned one until one has begun to answer; the
        figures are always the plan's."""
        plan = self._reservation.plan
        replica = self._answered_by or plan.replica
        return {
            "replica": replica,
            "reason": self._reason if replica == plan.replica else "elsewhere",
            "queue_s": round(plan.queue_s, 6),
            "load_s": round(plan.load_s, 6),
            "prefill_s": round(plan.prefill_s, 6),
            "matched_tokens": plan.matched_tokens,
            "matched_by_tier": dict(plan.tokens),
        }

    @property
    def prefix(self) -> bytes | None:
        """Key of the prompt's first whole block, if it has one."""
        return self._keys[0] if self._keys else None

    def abandon(self) -> None:
        """Give up a request whose events were never asked for."""
        self._reservation.end()

    async def events(self) -> AsyncGenerator[list[Event]]:
        """Batches of events. Closing the iterator cancels the request."""
        failed: set[str] = set()
        while True:
            replica = self._reservation.plan.replica
            try:
                async with aclosing(self._attempt(replica)) as batches:
                    async for events in batches:
                        yield events
                return
            except REPLICA_GONE as err:
                log.warning("replica %s went away: %s", replica, type(err).__name__)
                failed.add(replica)
                if self._answered_by is not None or len(failed) == ATTEMPTS_MAX:
                    message = "the replica died while answering; send the request again"
                    yield [FailEvent(EngineFailed(message, code="replica_died"))]
                    return
            except BackPressureError:
                yield [FailEvent(Overloaded("every replica's queue is full; try again later"))]
                return
            except DeploymentUnavailableError as err:
                yield [FailEvent(Unavailable(str(err.message), code="no_replica"))]
                return
            finally:
                self._reservation.end()
            self._reservation = await self._gateway.reserve(self._request, self._keys, avoid=failed)
            self._reason = "replica_died"

    async def _attempt(self, replica: str) -> AsyncGenerator[list[Event]]:
        remaining = max(0.0, self._deadline - time.monotonic())
        stream = self._gateway.send(self._request, remaining, replica)
        ended = False
        try:
            async for data in stream:
                message = unpack(data)
                if self._answered_by is None:
                    self._answered_by = message.replica
                    self._reservation.first_token()
                last = message.events[-1]
                ended = not isinstance(last, TokenEvent)
                if isinstance(last, FinishEvent):
                    self._reservation.end(last.usage)
                yield message.events
        finally:
            if not ended:
                stream.cancel()
