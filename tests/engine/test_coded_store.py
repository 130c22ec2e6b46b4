"""P2 through a store that codes: what was decoded gives the same answers as what was computed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_serve.config import ModelConfig
from mooncake_serve.models import LoadedModel, load_model
from mooncake_serve.store import NodeStore, StoreServer
from tests.engine.exactness import prompts_at_block_borders
from tests.engine.support import generate, model_engine, tiny_model
from tests.waiting import eventually

BLOCK = 32


@pytest.fixture(params=["fast", "dense"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreServer]:
    """Under dense, blocks are coded again as soon as they are put."""
    with StoreServer(
        socket=tmp_path / "private" / "store.sock",
        dram_bytes=256 << 20,
        codec=request.param,
        transcode_share=1.0,
        transcode_idle_s=0.0,
    ) as server:
        yield server


def check(server: StoreServer, loaded: LoadedModel, backend: str) -> None:
    prompts = prompts_at_block_borders(BLOCK, loaded.model.config.vocab_size)
    blocks = sum((len(prompt) - 1) // BLOCK for prompt in prompts)
    options = {"block_tokens": BLOCK, "backend": backend}
    with model_engine(loaded, **options) as engine:
        want = [tokens for each in prompts for tokens in generate(engine, [each], 6)]
    store = NodeStore(str(server.socket))
    assert store.wait_until_healthy(30)
    with model_engine(loaded, store, **options) as engine:
        cold = [tokens for each in prompts for tokens in generate(engine, [each], 6)]
        assert engine.flush()
    stats = server.stats()
    assert stats["blocks"] >= blocks
    assert stats["codec_saved_bytes"] > 0.2 * stats["logical_bytes"]
    if stats["codec"] == "dense":
        eventually(lambda: {row["codec"] for row in server.stats()["usage"]} == {"dense"})
    with model_engine(loaded, store, **options) as engine:
        warm = generate(engine, prompts, 6)
        assert engine.stats().cached_store_tokens >= blocks * BLOCK
    store.close()
    assert want == cold == warm


def test_a_tiny_model(server: StoreServer) -> None:
    check(server, tiny_model("llama"), "torch")


def test_the_default_model_on_the_native_backend(server: StoreServer) -> None:
    check(server, load_model(ModelConfig(), "cpu"), "native")
