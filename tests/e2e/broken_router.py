"""A router of ours in which everything that can raise does. Workers import it by this name."""

from __future__ import annotations

from typing import Any

from mooncake_serve.router.request_router import PlannedRouter


class BrokenRouter(PlannedRouter):
    """Fails to rank replicas."""

    def _ranks(self, candidates: Any, pending_request: Any) -> Any:
        raise RuntimeError("this router is broken")
