"""A server over the fake gateway in a process of its own: `python -m tests.api.batch_server`.

Each executed prompt is appended to `<folder>/ran`, so a test sees what ran twice.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvicorn

from mooncake_serve.api import create_app
from mooncake_serve.api.batches import Batches
from mooncake_serve.api.gateway import Hints
from mooncake_serve.api.generate import Generator
from mooncake_serve.api.observe import Observer
from mooncake_serve.api.tenancy import Doorkeeper
from mooncake_serve.config import ApiConfig
from mooncake_serve.engine.protocol import GenerationRequest
from tests.api.fake import CharCodec, FakeAnswer, FakeGateway

PAUSE_S = 0.05


class SlowGateway(FakeGateway):
    """Answers after a pause, and keeps a log."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self._log = log

    async def start(self, request: GenerationRequest, timeout_s: float, hints: Hints) -> FakeAnswer:
        await asyncio.sleep(PAUSE_S)
        with self._log.open("a") as file:
            file.write(CharCodec().decode(list(request.token_ids)).replace("\n", " ") + "\n")
        return await super().start(request, timeout_s, hints)


async def main(port: int, folder: Path) -> None:
    settings = ApiConfig(batch_concurrency=4)
    gateway, observer, keeper = SlowGateway(folder / "ran"), Observer(), Doorkeeper(settings)
    generator = Generator(gateway, observer)
    batches = Batches(folder / "state", generator, keeper, settings)
    app = create_app(
        gateway, settings, observer=observer, keeper=keeper, generator=generator, batches=batches
    )
    running = asyncio.ensure_future(batches.run())
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")
    await uvicorn.Server(config).serve()
    running.cancel()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
