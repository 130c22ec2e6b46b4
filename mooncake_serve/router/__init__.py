"""Which replica gets a request.

`prefix` says what each node can supply, `planner` decides (pure), `board` holds what one process
knows of the replicas, `request_router` makes Ray Serve obey.
"""

from mooncake_serve.router.board import Board, Plan, Reservation, process_board
from mooncake_serve.router.planner import Costs, ReplicaLoad, Score, choose
from mooncake_serve.router.prefix import NodeIndex, Prefix, PrefixIndex

__all__ = [
    "Board",
    "Costs",
    "NodeIndex",
    "Plan",
    "Prefix",
    "PrefixIndex",
    "ReplicaLoad",
    "Reservation",
    "Score",
    "choose",
    "process_board",
]
