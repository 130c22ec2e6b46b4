"""Decode rows of `TorchBackend`: a row's bits are its own, whoever shares the forward."""

from __future__ import annotations

import random

import pytest
import torch

from mooncake_serve.engine.probe import least_exact_rows
from mooncake_serve.engine.protocol import WorkItem
from mooncake_serve.engine.torch_backend import MAX_DECODE_ROWS, TorchBackend
from tests.engine.support import tiny_model

BLOCK_TOKENS = 32
TRIALS = 150


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_a_row_has_the_same_bits_alone_and_in_company(attention: str) -> None:
    """Hundreds of steps over random KV, because one sum in thousands shows a change of order."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    torch.manual_seed(seed)
    backend = TorchBackend(
        tiny_model("llama"), block_tokens=BLOCK_TOKENS, threads=1, attention=attention
    )
    assert backend.exact
    backend.allocate_pool(64)
    blocks = [torch.frombuffer(backend.view_block(i), dtype=torch.bfloat16) for i in range(64)]
    for _ in range(TRIALS):
        for block in blocks:
            block.normal_()
        items = [_step(chance, backend.vocab_size, first=16 * row) for row in range(4)]
        alone = backend.forward(items[:1])
        company = items[1 : chance.randint(2, 4)]
        assert torch.equal(backend.forward([items[0], *company])[0], alone[0])
        assert torch.equal(backend.forward([*company, items[0]])[-1], alone[0])


def test_the_probe_sees_a_change_of_order() -> None:
    """A linear layer that adds up its halves apart for single rows must not pass for exact."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 64, bias=False)).bfloat16()

    def split(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[0] > 1:
            return (x.float() @ weight.float().T).to(x.dtype)
        halves = zip(x.float().chunk(2, -1), weight.float().chunk(2, -1), strict=True)
        return sum(part @ of.T for part, of in halves).to(x.dtype)  # type: ignore[union-attr]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mooncake_serve.engine.probe.apply_linear", split)
        assert least_exact_rows(model, MAX_DECODE_ROWS) != 1


def _step(chance: random.Random, vocab: int, *, first: int) -> WorkItem:
    """One token at a random place of a sequence in blocks of its own."""
    start = chance.randrange(16 * BLOCK_TOKENS)
    table = range(first, first + start // BLOCK_TOKENS + 1)
    return WorkItem([chance.randrange(vocab)], start, list(table), True)
