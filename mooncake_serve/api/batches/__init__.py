"""`/v1/files` and `/v1/batches`: OpenAI's batch interface, durable in one directory.

    <api.state_dir>/<application>/batches.sqlite     files, batches, lines and their answers
    <api.state_dir>/<application>/files/<file id>    the bytes of files

A line's answer and the fact that it was answered are one transaction, so a server that is killed
goes on where it was: no answered line is lost, and none is answered twice in the output.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from fastapi import FastAPI

from mooncake_serve.api.batches.ledger import Ledger
from mooncake_serve.api.batches.routes import add_routes
from mooncake_serve.api.batches.runner import Runner
from mooncake_serve.api.generate import Generator
from mooncake_serve.api.tenancy import Doorkeeper
from mooncake_serve.config import ApiConfig
from mooncake_serve.errors import ConfigError


class Batches:
    """The directory of one application, and what runs its batches."""

    def __init__(
        self, folder: Path, generator: Generator, keeper: Doorkeeper, settings: ApiConfig
    ) -> None:
        """Raises ConfigError when the directory cannot be used."""
        try:
            self._ledger = Ledger(folder)
        except (OSError, sqlite3.Error) as err:
            raise ConfigError("api.state_dir", f"{folder} cannot be used: {err}") from err
        self._runner = Runner(self._ledger, generator, keeper, settings)
        self._settings = settings

    def add_routes(self, app: FastAPI) -> None:
        """Add `/v1/files` and `/v1/batches`."""
        add_routes(app, self._ledger, self._runner, self._settings)

    async def run(self) -> None:
        """Run batches until cancelled."""
        await self._runner.run()


__all__ = ["Batches"]
