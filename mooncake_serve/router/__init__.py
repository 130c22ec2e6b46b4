"""Which replica gets a request.

`planner` decides (pure), `board` holds what one process knows of the replicas, `request_router`
makes Ray Serve obey.
"""

from mooncake_serve.router.board import Board, Plan, Reservation, process_board
from mooncake_serve.router.planner import Costs, ReplicaLoad, Score, choose

__all__ = [
    "Board",
    "Costs",
    "Plan",
    "ReplicaLoad",
    "Reservation",
    "Score",
    "choose",
    "process_board",
]
