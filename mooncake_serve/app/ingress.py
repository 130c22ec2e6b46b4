"""The ingress deployment: the HTTP application over a handle to the model replicas."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from mooncake_serve import dashboard, logs, tracing
from mooncake_serve.api import admin, create_app
from mooncake_serve.api.batches import Batches
from mooncake_serve.api.generate import Generator
from mooncake_serve.api.observe import Observer
from mooncake_serve.api.observed import ObservedGateway
from mooncake_serve.api.ray_gateway import RayGateway
from mooncake_serve.api.tenancy import Doorkeeper
from mooncake_serve.app.overview import Overview
from mooncake_serve.config import load_app_config
from mooncake_serve.models import load_tokenizer
from mooncake_serve.ray_metrics import RaySink, Reporter
from mooncake_serve.router import follow_index, process_board
from mooncake_serve.secret_file import read_secret
from mooncake_serve.store_actor import attach, check_node


@serve.ingress()
class Ingress:
    """One process that parses, tokenises and plans."""

    def __init__(self, config: dict[str, Any], model: DeploymentHandle) -> None:
        app = load_app_config(config)
        logs.configure(app.observe.logs)
        tracing.configure(app.observe.traces, "mooncake-ingress")
        check_node(app)
        self._api = app.api
        self._board = process_board(serve.get_replica_context().app_name)
        self._board.limit(app.api.max_queued_tokens, app.api.ttft_slo_s)
        follow_index(self._board, attach(app.store))
        name = app.model.served_name
        self._observer, self._keeper = Observer(), Doorkeeper(app.api)
        self._reporter = Reporter(RaySink(), self._observer.samples)
        # A pool of threads for a single text costs more than it saves.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        routed = RayGateway(model, self._board, load_tokenizer(app.model))
        gateway = ObservedGateway(routed, name, self._observer.scrape)
        self._overview = Overview(name, model, self._board, gateway)
        generator = Generator(gateway, self._observer)
        self._batches = None
        if app.api.state_dir is not None:
            folder = Path(app.api.state_dir).expanduser() / serve.get_replica_context().app_name
            self._batches = Batches(folder, generator, self._keeper, app.api)
        # Serve echoes x-request-id itself.
        self._http = create_app(
            gateway,
            app.api,
            observer=self._observer,
            keeper=self._keeper,
            generator=generator,
            batches=self._batches,
            echo_request_id=False,
        )
        path = app.api.admin_token_file
        self._operators_token = read_secret("api.admin_token_file", path) if path else None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve asks for the application once the constructor is done."""
        if self._api.admin_port is not None:
            operators = admin.create_admin_app(
                self._observer, self._keeper, self._replicas, self._operators_token
            )
            dashboard.install(operators, self._overview.collect)
            listening = admin.serve(operators, self._api.admin_host, self._api.admin_port)
            self._tasks.add(asyncio.ensure_future(listening))
        if self._batches is not None:
            self._tasks.add(asyncio.ensure_future(self._batches.run()))
        return self._http

    def __del__(self) -> None:
        reporter = getattr(self, "_reporter", None)
        if reporter is not None:
            reporter.close()

    async def _replicas(self) -> dict[str, Any]:
        return {name: load._asdict() for name, load in self._board.loads().items()}
