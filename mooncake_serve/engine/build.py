"""From the application's configuration to a running engine."""

from __future__ import annotations

import torch

from mooncake_serve.config import AppConfig
from mooncake_serve.engine.core import EngineCore, EngineSettings
from mooncake_serve.engine.grammar import Grammars
from mooncake_serve.engine.protocol import Backend
from mooncake_serve.engine.torch_backend import TorchBackend
from mooncake_serve.engine.transfer import BlockStore
from mooncake_serve.models import LoadedModel, load_model, load_tokenizer

BLOCK_TOKENS = 256
"""Half a block is computed again in each prompt's tail. In blocks of 512 that alone costs more than
loading the rest, though torch, where a block is one forward, prefills faster in them."""
NATIVE_ISAS = ("amx", "avx512_bf16")
"""Where the native backend was measured to beat torch; elsewhere it has to be asked for."""


def build_engine(config: AppConfig, store: BlockStore | None) -> EngineCore:
    """Load the model and start the engine; seconds once the model is cached.

    Raises ConfigError, ModelNotFound or UnsupportedModel.
    """
    tokenizer = load_tokenizer(config.model)
    settings = EngineSettings(
        name=config.model.served_name,
        threads=config.engine.threads,
        pool_bytes=config.engine.pool,
        max_batch=config.engine.max_batch,
        max_context=config.engine.max_context,
        relaxed=config.engine.exactness == "relaxed",
    )
    grammars = Grammars(tokenizer.fast)
    return EngineCore(lambda: _make_backend(config), tokenizer.decode, settings, store, grammars)


def choose_device(configured: str) -> str:
    """`auto` takes the first CUDA device if there is one."""
    if configured != "auto":
        return configured
    return "cuda" if torch.cuda.is_available() else "cpu"


def _make_backend(config: AppConfig) -> Backend:
    engine = config.engine
    loaded = load_model(config.model, choose_device(engine.device))
    native = engine.backend == "auto" and _native_is_faster(loaded, engine.isa)
    if engine.backend == "native" or native:
        from mooncake_serve.engine.native import NativeBackend

        block_tokens = engine.block_tokens or BLOCK_TOKENS
        return NativeBackend(
            loaded, block_tokens=block_tokens, threads=engine.threads, isa=engine.isa
        )
    block_tokens = engine.block_tokens or BLOCK_TOKENS
    return TorchBackend(loaded, block_tokens=block_tokens, threads=engine.threads)


def _native_is_faster(loaded: LoadedModel, isa: str | None) -> bool:
    """Whether the native backend can run this model here, on the instructions it is made for."""
    if loaded.model.device.type != "cpu":
        return False
    from mooncake_serve._store import cpu
    from mooncake_serve.engine.native import supports

    return (isa or cpu.ISA) in NATIVE_ISAS and supports(
        loaded.model.config, loaded.model.dtype
    ) is None
