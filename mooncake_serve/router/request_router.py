"""Ray Serve's hook: send each request where its plan says.

The plan is made in the ingress and travels as the keyword argument `replica` of the handle call.
If that replica is gone or full, the others follow, shortest queue first. `choose_replicas` never
raises: in Ray 2.60 an exception there leaves the request waiting for ever.

Ray pickles this module by value into every process that routes; shared state therefore lives in
`board`, which is imported by name.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mooncake_serve.router.board import process_board

log = logging.getLogger(__name__)

REPLICA_ARGUMENT = "replica"


class PlannedRouter(RequestRouter):
    """Obeys the plan that came with the request."""

    def initialize_state(self, **kwargs: Any) -> None:
        """No settings: the plan carries all there is to know."""
        if kwargs:
            raise ValueError(f"PlannedRouter takes no settings, got {sorted(kwargs)}")

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's new set of replicas, which the planner must know too."""
        super().update_replicas(replicas)
        nodes = {replica.replica_id.unique_id: replica.node_id for replica in replicas}
        process_board(self.app_name).set_replicas(nodes)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call found the replica dead, before the controller did."""
        super().on_replica_actor_died(replica_id)
        process_board(self.app_name).drop_replica(replica_id.unique_id)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Singleton ranks: the planned replica first, then the others by queue length."""
        try:
            if pending_request is not None:
                # Without this, a router whose replicas are all full would spin, not wait.
                pending_request.routing_context.should_backoff = True
            return self._ranks(candidate_replicas, pending_request)
        except Exception:
            log.exception("routing without the plan: it could not be read")
            return [list(candidate_replicas)]

    def _ranks(
        self, candidates: list[RunningReplica], pending_request: PendingRequest | None
    ) -> list[list[RunningReplica]]:
        planned = pending_request.kwargs.get(REPLICA_ARGUMENT) if pending_request else None
        ranked = sorted(candidates, key=lambda replica: self._rank(replica, planned))
        return [[replica] for replica in ranked]

    def _rank(self, replica: RunningReplica, planned: str | None) -> tuple[bool, int]:
        queue = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return replica.replica_id.unique_id != planned, queue
