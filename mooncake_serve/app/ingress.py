"""The ingress deployment: the HTTP application over a handle to the model replicas."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from mooncake_serve.api import create_app
from mooncake_serve.api.ray_gateway import RayGateway
from mooncake_serve.config import load_app_config
from mooncake_serve.models import load_tokenizer
from mooncake_serve.router import follow_index, process_board
from mooncake_serve.store_actor import attach


@serve.ingress()
class Ingress:
    """One process that parses, tokenises and plans."""

    def __init__(self, config: dict[str, Any], model: DeploymentHandle) -> None:
        app = load_app_config(config)
        board = process_board(serve.get_replica_context().app_name)
        board.limit(app.api.max_queued_tokens, app.api.ttft_slo_s)
        follow_index(board, attach(app.store))
        gateway = RayGateway(model, board, load_tokenizer(app.model))
        # Serve echoes x-request-id itself.
        self._http = create_app(gateway, app.api, echo_request_id=False)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the application once the constructor is done."""
        return self._http
