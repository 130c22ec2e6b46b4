"""P2 as scenarios: a warm answer is bit-identical to a cold one, whatever the company.

Each takes a loaded model, so that the CPU tests and the CUDA tests are the same.
"""

from __future__ import annotations

from typing import Any

from mooncake_serve.models import LoadedModel
from tests.engine.support import (
    DictStore,
    generate,
    model_engine,
    random_prompt,
    request,
    start,
)


def prompts_at_block_borders(block_tokens: int, vocab: int, blocks: int = 3) -> list[list[int]]:
    lengths = [blocks * block_tokens + extra for extra in (-1, 0, 1)] + [block_tokens // 2]
    return [random_prompt(length, seed, vocab) for seed, length in enumerate(lengths)]


def check_store_and_company(
    loaded: LoadedModel,
    *,
    block_tokens: int,
    company: int,
    max_tokens: int = 6,
    threads: int = 1,
    backend: str = "torch",
    company_tokens: int = 40,
) -> None:
    """Off, on and cold, on and warm, another engine, alone, and among `company` others."""
    vocab = loaded.model.config.vocab_size
    prompts = prompts_at_block_borders(block_tokens, vocab)
    options: dict[str, Any] = {"block_tokens": block_tokens, "threads": threads}
    options["backend"] = backend
    with model_engine(loaded, **options) as engine:
        # They share no prefix, so each is alone and cold.
        alone = [tokens for each in prompts for tokens in generate(engine, [each], max_tokens)]
    cold, shared = DictStore(), DictStore()
    with model_engine(loaded, cold, **options) as engine:
        for prompt, want in zip(prompts, alone, strict=True):
            assert generate(engine, [prompt], max_tokens) == [want], "on and cold"
        assert engine.flush()
        for prompt, want in zip(prompts, alone, strict=True):
            assert generate(engine, [prompt], max_tokens) == [want], "warm in the same engine"
    others = [
        random_prompt(company_tokens + number % 7, 100 + number, vocab) for number in range(company)
    ]
    with model_engine(loaded, shared, **options) as engine:
        crowd = generate(engine, [*others, *prompts], max_tokens)
        assert crowd[company:] == alone, "cold among others"
        assert engine.flush()
    same = cold.blocks.keys() & shared.blocks.keys()
    least = sum((len(prompt) - 1) // block_tokens for prompt in prompts)
    assert len(same) >= least
    assert all(cold.blocks[key] == shared.blocks[key] for key in same), "blocks differ"
    with model_engine(loaded, shared, **options) as engine:
        crowd = generate(engine, [*others[: company // 2], *prompts], max_tokens)
        assert crowd[company // 2 :] == alone, "warm among others"
        assert engine.stats().cached_store_tokens >= least * block_tokens


def check_second_turn(
    loaded: LoadedModel, *, block_tokens: int, threads: int = 1, backend: str = "torch"
) -> None:
    """A prompt that continues a generated answer, with the answer's KV in pool and store."""
    vocab = loaded.model.config.vocab_size
    first = random_prompt(block_tokens + block_tokens // 2, 5, vocab)
    options: dict[str, Any] = {"block_tokens": block_tokens, "threads": threads}
    options["backend"] = backend
    store = DictStore()
    with model_engine(loaded, store, **options) as engine:
        (answer,) = generate(engine, [first], 2 * block_tokens)
        second = [*first, *answer, *random_prompt(9, 6, vocab)]
        (warm,) = generate(engine, [second], 8)
        assert engine.flush()
    with model_engine(loaded, **options) as engine:
        (cold,) = generate(engine, [second], 8)
    with model_engine(loaded, store, **options) as engine:
        (other,) = generate(engine, [second], 8)
        assert engine.stats().cached_store_tokens == (len(second) - 1) // block_tokens * (
            block_tokens
        )
    assert warm == cold == other


def check_preemption(
    loaded: LoadedModel,
    *,
    block_tokens: int,
    requests: int = 5,
    threads: int = 1,
    backend: str = "torch",
) -> None:
    """A pool so small that requests are preempted in mid-decode; one is cancelled meanwhile."""
    vocab = loaded.model.config.vocab_size
    prompts = [random_prompt(block_tokens + 3 * n, 30 + n, vocab) for n in range(requests)]
    max_tokens = 2 * block_tokens
    options: dict[str, Any] = {"block_tokens": block_tokens, "threads": threads}
    options["backend"] = backend
    with model_engine(loaded, **options) as engine:
        want = generate(engine, prompts, max_tokens)
        assert engine.stats().preemptions == 0
    with model_engine(loaded, DictStore(), pool_blocks=7, **options) as engine:
        doomed = start(engine, request(random_prompt(30, 99, vocab), max_tokens))
        results = [start(engine, request(each, max_tokens, ignore_eos=True)) for each in prompts]
        engine.cancel(next(iter(engine._jobs), ""))
        for result in results:
            result.finish()
        assert doomed.finish().reason in {"cancelled", "length"}
        assert [result.tokens for result in results] == want
        stats = engine.stats()
        assert stats.preemptions > 0
        assert engine.flush()
