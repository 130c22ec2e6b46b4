"""Ray Serve's own router as the control of `bench cluster`: power of two choices, no plan.

It only tells the board which replicas run, which the ingress asks before it sends anything.
"""

from __future__ import annotations

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import RunningReplica

from mooncake_serve.router import process_board


class DefaultRouter(PowerOfTwoChoicesRequestRouter):
    """See the module."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's new set of replicas."""
        super().update_replicas(replicas)
        nodes = {replica.replica_id.unique_id: replica.node_id for replica in replicas}
        process_board(self.app_name).set_replicas(nodes)
