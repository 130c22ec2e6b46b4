"""The native forward is as close to float32 as transformers' own bf16, or closer."""

from __future__ import annotations

import pytest
import torch

from mooncake_serve._store import cpu
from mooncake_serve.bench.accuracy import FAMILIES, Comparison, compare, random_model, texts
from mooncake_serve.config import ModelConfig
from mooncake_serve.models import load_model, load_tokenizer
from tests.kernels.tiny import CONFIGS, tiny_model

ISAS = [isa for isa in cpu.ISAS if isa != "portable"]


def assert_no_worse(row: Comparison, agreement_margin: float) -> None:
    """Error by error; agreement within what few positions can tell; perplexity within 2 %."""
    assert row.native.error <= row.bf16.error, row
    assert row.native.agree >= row.bf16.agree - agreement_margin, row
    assert abs(row.native.perplexity / row.fp32_perplexity - 1) < 0.02, row


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_shape_and_instruction_set(name: str, isa: str) -> None:
    tokens = torch.randint(300, (300,), generator=torch.Generator().manual_seed(3))
    assert_no_worse(compare(tiny_model(name), tokens.tolist(), 2, isa), 0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_deeper_models_of_each_family(family: str) -> None:
    tokens = torch.randint(2000, (200,), generator=torch.Generator().manual_seed(4))
    assert_no_worse(compare(random_model(family), tokens.tolist(), 2), 0.02)


@pytest.mark.slow
def test_the_embedded_model_on_three_texts() -> None:
    loaded, tokenizer = load_model(ModelConfig(), "cpu"), load_tokenizer(ModelConfig())
    rows = {
        name: compare(loaded, tokenizer.encode(text)[:512], 2) for name, text in texts().items()
    }
    for name, row in rows.items():
        assert abs(row.native.perplexity / row.fp32_perplexity - 1) < 0.02, (name, row)
        assert row.native.agree >= row.bf16.agree - 0.01, (name, row)
    errors = [(row.native.error, row.bf16.error) for row in rows.values()]
    assert sum(ours for ours, _ in errors) <= sum(theirs for _, theirs in errors), rows
