"""Which replica gets a request.

`board` holds what one process knows of the replicas and plans with the planner of `policy_rs`;
`index` keeps the cluster index in shared memory at its hand; `request_router` makes Ray Serve obey.
"""

from mooncake_serve.router.board import Board, Plan, Reservation, Work, process_board
from mooncake_serve.router.index import follow_index

__all__ = ["Board", "Plan", "Reservation", "Work", "follow_index", "process_board"]
