"""What the operators' page shows: every node's store, every replica, and the router's journal.

Collected on demand. A store or replica that does not answer within `ASK_S` is shown as such; asking
never disturbs what it asks about for longer than one call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from mooncake_serve.api.observed import ObservedGateway
from mooncake_serve.metrics import store_samples
from mooncake_serve.metrics.store import BYTES, CAPACITY, LOGICAL, SAVED
from mooncake_serve.router import Board
from mooncake_serve.store_actor import NAMESPACE, actor_name

ASK_S = 2.0
HOTTEST = 12
TROUBLE = (TimeoutError, RayError, RayServeException, ValueError)


class Overview:
    """Asks the cluster."""

    def __init__(self, model: str, handle: DeploymentHandle, board: Board, books: ObservedGateway):
        self._model = model
        # Typed as Any: Ray's stubs do not know the deployment's methods.
        self._stats: Any = handle.stats
        self._board = board
        self._journal = books.journal

    async def collect(self) -> dict[str, Any]:
        """The page's data, as JSON values."""
        alive = await asyncio.to_thread(ray.nodes)
        nodes = sorted((one["NodeID"], one["NodeManagerAddress"]) for one in alive if one["Alive"])
        asked_nodes = asyncio.gather(*(self._node(*node) for node in nodes))
        asked_replicas = asyncio.gather(*(self._replica(one) for one in self._board.replicas()))
        return {
            "at": time.time(),
            "model": self._model,
            "nodes": [node for node in await asked_nodes if node is not None],
            "replicas": await asked_replicas,
            "history": self._journal.history(),
            "decisions": self._journal.decisions(),
            "hottest": self._journal.hot.top(HOTTEST),
            "saved_prefill_s": self._journal.saved_prefill_s,
        }

    async def _node(self, node: str, address: str) -> dict[str, Any] | None:
        """A node's store; None for a node without one."""
        try:
            actor: Any = await asyncio.to_thread(ray.get_actor, actor_name(node), NAMESPACE)
        except ValueError:
            return None
        try:
            async with asyncio.timeout(ASK_S):
                stats = await actor.stats.remote()
        except TROUBLE:
            return {"node": node, "address": address, "tiers": None}
        return {
            "node": node,
            "address": address,
            "tiers": tiers(stats),
            "sessions": stats["sessions"],
            "evictions": stats["evicted_for_room"],
            "uptime_s": stats["uptime_s"],
        }

    async def _replica(self, replica: str) -> dict[str, Any]:
        shown: dict[str, Any] = {"replica": replica, "node": "", "engine": None}
        try:
            async with asyncio.timeout(ASK_S):
                stats = await self._stats.remote(replica=replica)
        except TROUBLE:
            return shown
        # The router may send elsewhere when the replica has just gone.
        if stats["replica"] == replica:
            shown |= {"node": stats["node"], "engine": stats["engine"]}
        return shown


def tiers(stats: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A store's tiers: capacity, bytes by state, before encoding, and what is spared by what."""
    found: dict[str, dict[str, Any]] = {}
    for metric, labels, value in store_samples(stats):
        if metric not in (CAPACITY, BYTES, LOGICAL, SAVED):
            continue
        tier = found.setdefault(
            labels[0],
            {"tier": labels[0], "capacity": 0, "states": {}, "logical": 0, "saved": {}},
        )
        if metric is BYTES:
            tier["states"][labels[1]] = value
        elif metric is SAVED:
            tier["saved"][labels[1]] = value
        else:
            tier["capacity" if metric is CAPACITY else "logical"] = value
    return [tier for tier in found.values() if tier["capacity"]]
