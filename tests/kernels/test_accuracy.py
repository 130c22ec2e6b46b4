"""The native forward is as close to float32 as transformers' own bf16, or closer."""

from __future__ import annotations

import copy

import pytest
import torch

from mooncake_serve._store import cpu
from mooncake_serve.engine.protocol import WorkItem
from tests.kernels.tiny import BLOCK_TOKENS, CONFIGS, NativeBackend, tiny_model

LENGTH = 300


def all_logits(backend: NativeBackend, tokens: list[int]) -> torch.Tensor:
    """Logits of every position, float32 [tokens, vocab]."""
    table = list(range(-(-len(tokens) // BLOCK_TOKENS)))
    backend.allocate_pool(len(table))
    rows = [
        backend.forward([WorkItem([token], at, table, True)]) for at, token in enumerate(tokens)
    ]
    return torch.cat(rows)


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).norm() / (exact - exact.mean(-1, keepdim=True)).norm())


@pytest.mark.parametrize("isa", [isa for isa in cpu.ISAS if isa != "portable"])
@pytest.mark.parametrize("name", CONFIGS)
def test_error_against_float32(name: str, isa: str) -> None:
    loaded = tiny_model(name)
    tokens = torch.randint(300, (LENGTH,), generator=torch.Generator().manual_seed(3))
    backend = NativeBackend(loaded, block_tokens=BLOCK_TOKENS, threads=2, isa=isa)
    ours = all_logits(backend, tokens.tolist())
    with torch.inference_mode():
        exact = copy.deepcopy(loaded.model).float()(tokens[None]).logits[0]
        theirs = loaded.model(tokens[None]).logits[0].float()
    assert error(ours, exact) <= error(theirs, exact)
    agree = (ours.argmax(-1) == exact.argmax(-1)).float().mean()
    assert agree >= (theirs.argmax(-1) == exact.argmax(-1)).float().mean() - 0.02
