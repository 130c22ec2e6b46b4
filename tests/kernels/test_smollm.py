"""The embedded model on the native backend: accuracy on text, and exactness over long contexts."""

from __future__ import annotations

import argparse
import inspect

import pytest
import torch

from mooncake_serve.config import ModelConfig
from mooncake_serve.engine.native import NativeBackend
from mooncake_serve.engine.protocol import WorkItem
from mooncake_serve.models import LoadedModel, load_model, load_tokenizer

pytestmark = pytest.mark.slow

BLOCK_TOKENS = 256
LENGTH = 512


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    """A long text, half prose and half code."""
    return load_tokenizer(ModelConfig()).encode(inspect.getsource(argparse))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(ModelConfig(), "cpu")


def backend(loaded: LoadedModel, threads: int = 2) -> NativeBackend:
    made = NativeBackend(loaded, block_tokens=BLOCK_TOKENS, threads=threads)
    made.allocate_pool(32)
    return made


def surprise(logits: torch.Tensor, tokens: list[int]) -> float:
    """Mean negative log-likelihood of each next token."""
    targets = torch.tensor(tokens[1:])
    return float(torch.nn.functional.cross_entropy(logits[:-1], targets))


def test_no_less_accurate_than_bf16(loaded: LoadedModel, tokens: list[int]) -> None:
    native = backend(loaded)
    errors: dict[str, list[float]] = {"ours": [], "theirs": []}
    agreed = {"ours": 0, "theirs": 0}
    exact_model = load_model(ModelConfig(), "cpu").model.float()
    for start in (0, 3000, 6000):
        text = tokens[start : start + LENGTH]
        rows = [native.forward([WorkItem([t], at, [0, 1], True)]) for at, t in enumerate(text)]
        with torch.inference_mode():
            exact = exact_model(torch.tensor([text])).logits[0]
            theirs = loaded.model(torch.tensor([text])).logits[0].float()
        for name, logits in (("ours", torch.cat(rows)), ("theirs", theirs)):
            errors[name].append(float((logits - exact).norm() / exact.norm()))
            agreed[name] += int((logits.argmax(-1) == exact.argmax(-1)).sum())
            assert abs(surprise(logits, text) - surprise(exact, text)) < 0.02, name
    assert sum(errors["ours"]) <= sum(errors["theirs"])
    assert agreed["ours"] >= agreed["theirs"] - 3 * LENGTH // 100


def test_7000_tokens_in_any_chunks(loaded: LoadedModel, tokens: list[int]) -> None:
    text, table = tokens[:7000], list(range(28))
    results = []
    for threads, chunk in ((1, 700), (2, 1024), (2, 331)):
        native = backend(loaded, threads)
        for at in range(0, len(text), chunk):
            logits = native.forward([WorkItem(text[at : at + chunk], at, table, True)])
        results.append((logits, [bytes(native.read_block(block)) for block in table]))
    for logits, blocks in results[1:]:
        assert torch.equal(logits, results[0][0])
        assert blocks == results[0][1]
