"""What fits: the pool against the memory given, the context against the pool, a request against
the context. Everything is refused before it is queued, because a request that can never fit
would wait for ever. Fails with ConfigError, InvalidRequest or ContextTooLong.
"""

from __future__ import annotations

import logging

from mooncake_serve.engine.protocol import Backend, GenerationRequest, KVLayout, ModelInfo
from mooncake_serve.errors import ConfigError, ContextTooLong, InvalidRequest

log = logging.getLogger(__name__)

MIN_POOL_BLOCKS = 2


def pool_blocks(layout: KVLayout, pool_bytes: int) -> int:
    """How many blocks `engine.pool` holds."""
    blocks = pool_bytes // layout.block_bytes
    if blocks < MIN_POOL_BLOCKS:
        need = MIN_POOL_BLOCKS * layout.block_bytes / (1 << 20)
        raise ConfigError(
            "engine.pool",
            f"{pool_bytes} bytes hold {blocks} KV blocks of {layout.block_bytes} bytes; "
            f"give at least {need:.0f}MiB, or lower engine.block_tokens",
        )
    return blocks


def context_limit(backend: Backend, configured: int | None, blocks: int) -> int:
    """Longest prompt plus answer: what model, configuration and pool all allow."""
    block_tokens = backend.layout.block_tokens
    wanted = configured or backend.max_context
    if wanted > backend.max_context:
        raise ConfigError(
            "engine.max_context", f"{wanted} is more than the model's own {backend.max_context}"
        )
    if wanted > blocks * block_tokens:
        need = -(-wanted // block_tokens) * backend.layout.block_bytes / (1 << 20)
        if configured is not None:
            raise ConfigError(
                "engine.pool",
                f"one request of engine.max_context={wanted} tokens needs {need:.0f}MiB",
            )
        log.warning(
            "engine.pool holds %d tokens, the model takes %d; longer requests are refused "
            "(set engine.pool to %.0fMiB or more to take them)",
            blocks * block_tokens,
            wanted,
            need,
        )
    return min(wanted, blocks * block_tokens)


def check_request(request: GenerationRequest, info: ModelInfo) -> None:
    """Raise InvalidRequest or ContextTooLong unless the engine can run this request."""
    prompt, sampling = len(request.token_ids), request.sampling
    if prompt == 0:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if sampling.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    if prompt + sampling.max_tokens > info.max_context:
        raise ContextTooLong(
            f"the prompt has {prompt} tokens and max_tokens is {sampling.max_tokens}; together "
            f"they exceed the context of {info.max_context} tokens",
            param="max_tokens" if prompt < info.max_context else "prompt",
            code="context_length_exceeded",
        )
    if min(request.token_ids) < 0 or max(request.token_ids) >= info.vocab_size:
        raise InvalidRequest(
            f"token ids must be between 0 and {info.vocab_size - 1}", param="prompt"
        )
    if any(not 0 <= token < info.vocab_size for token, _ in sampling.logit_bias):
        raise InvalidRequest(
            f"logit_bias: token ids must be between 0 and {info.vocab_size - 1}",
            param="logit_bias",
        )
