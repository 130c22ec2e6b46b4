"""`bench accuracy`: how far the native forward is from float32, beside transformers' own bf16.

For each model and text, the logits of every position, teacher-forced: relative error, how often
the likeliest token is float32's, and perplexity. The embedded model reads prose, code and tables
of Python's own library; random models of each family read random tokens. The same weights, rounded
to bf16, are behind all three.
"""

from __future__ import annotations

import argparse
import copy
import html.entities
import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

from mooncake_serve.bench.report import emit, machine, progress, version
from mooncake_serve.config import ModelConfig
from mooncake_serve.engine.native import NativeBackend
from mooncake_serve.engine.protocol import WorkItem
from mooncake_serve.models import LoadedModel, load_model, load_tokenizer

BLOCK_TOKENS = 32
TOKENS = 512

_SHAPE: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2 * TOKENS,
    "initializer_range": 0.08,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen2Config": {"tie_word_embeddings": True},
    "Qwen3Config": {"head_dim": 128},
    "MistralConfig": {"sliding_window": None, "num_key_value_heads": 4},
}
"""Configuration class to what differs from `_SHAPE`."""


def texts() -> dict[str, str]:
    """Prose, code and tables, by name; more of each than is read."""
    return {
        "prose": "\n".join(topics[name] for name in ("naming", "execmodel", "imports", "objects")),
        "code": inspect.getsource(argparse),
        "tables": inspect.getsource(html.entities),
    }


@dataclass(frozen=True)
class Closeness:
    """Logits of one text against float32's."""

    error: float
    """Norm of the difference, relative to float32's spread."""
    agree: float
    """Share of positions whose likeliest token is float32's."""
    perplexity: float


@dataclass(frozen=True)
class Comparison:
    """One text by one model."""

    tokens: int
    native: Closeness
    bf16: Closeness
    fp32_perplexity: float


def compare(loaded: LoadedModel, tokens: Sequence[int], threads: int, isa: str | None = None):
    """Run a text through the native backend and transformers' bf16 and float32."""
    ids = torch.tensor([list(tokens)])
    with torch.inference_mode():
        exact = copy.deepcopy(loaded.model).float()(ids).logits[0]
        theirs = loaded.model(ids).logits[0].float()
    backend = NativeBackend(loaded, block_tokens=BLOCK_TOKENS, threads=threads, isa=isa)
    ours = native_logits(backend, tokens)
    backend.close()
    targets = ids[0]
    return Comparison(
        len(tokens),
        _closeness(ours, exact, targets),
        _closeness(theirs, exact, targets),
        _perplexity(exact, targets),
    )


def native_logits(backend: NativeBackend, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of every position, float32 `[tokens, vocab]`; any cut gives the same bits."""
    table = range(-(-len(tokens) // backend.layout.block_tokens))
    backend.allocate_pool(len(table))
    return torch.cat(
        [backend.forward([WorkItem([token], at, table, True)]) for at, token in enumerate(tokens)]
    )


def _closeness(logits: torch.Tensor, exact: torch.Tensor, tokens: torch.Tensor) -> Closeness:
    spread = (exact - exact.mean(-1, keepdim=True)).norm()
    return Closeness(
        error=float((logits - exact).norm() / spread),
        agree=float((logits.argmax(-1) == exact.argmax(-1)).float().mean()),
        perplexity=_perplexity(logits, tokens),
    )


def _perplexity(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1], tokens[1:]).exp())


def random_model(name: str) -> LoadedModel:
    """A random bf16 model of one family; the same weights every time."""
    import transformers

    config = getattr(transformers, name)(**_SHAPE | FAMILIES[name])
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        folder=Path(),
        fingerprint=name,
        eos_token_ids=(),
        max_context=config.max_position_embeddings,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `mooncake-serve bench accuracy`."""
    parser = argparse.ArgumentParser(prog="mooncake-serve bench accuracy", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object (the default)")
    parser.add_argument("--quick", action="store_true", help="shorter texts")
    parser.add_argument("--model", default=ModelConfig().id)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", default=None, help="keep to one instruction set")
    options = parser.parse_args(argv)
    length = TOKENS // 4 if options.quick else TOKENS
    rows = []
    for model, text, loaded, tokens in _cases(options.model, length):
        progress(f"{model}: {text}")
        row = compare(loaded, tokens, options.threads, options.isa)
        rows.append({"model": model, "text": text, **asdict(row)})
    emit(
        {
            "machine": machine(),
            "version": version(),
            "runs": len(rows),
            "isa": options.isa or "best",
            "texts": rows,
            "mean": {
                name: {
                    figure: sum(row[name][figure] for row in rows) / len(rows)
                    for figure in ("error", "agree")
                }
                for name in ("native", "bf16")
            },
        }
    )
    return 0


def _cases(model: str, length: int) -> Iterator[tuple[str, str, LoadedModel, list[int]]]:
    loaded = load_model(ModelConfig(id=model), "cpu")
    tokenizer = load_tokenizer(ModelConfig(id=model))
    for name, text in texts().items():
        yield model, name, loaded, tokenizer.encode(text)[:length]
    for family in FAMILIES:
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(_SHAPE["vocab_size"], (length,), generator=generator)
        yield (
            f"random {family.removesuffix('Config')}",
            "random",
            random_model(family),
            (tokens.tolist()),
        )


if __name__ == "__main__":
    raise SystemExit(main())
