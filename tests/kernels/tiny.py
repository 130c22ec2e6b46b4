"""Tiny random models of each family, and sequences to run through the native backend.

Shapes are small, odd where they may be odd (a vocabulary that fills no panel), and long enough in
context to cross a block of 256 keys.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from mooncake_serve.engine.native import NativeBackend
from mooncake_serve.engine.protocol import WorkItem
from mooncake_serve.models import LoadedModel

BLOCK_TOKENS = 32
MAX_CONTEXT = 640
VOCAB = 300

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_ROPE = {"rope_theta": 10000.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 160}

CONFIGS = {
    "llama-tied": LlamaConfig(**_BASE, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**_BASE, tie_word_embeddings=False),
    "llama-biases": LlamaConfig(**_BASE, attention_bias=True),
    "llama-mha": LlamaConfig(**_BASE | {"num_key_value_heads": 6}),
    "llama-one-kv-head": LlamaConfig(
        **_BASE | {"num_attention_heads": 24, "num_key_value_heads": 1}
    ),
    "llama-dim80": LlamaConfig(**_BASE | {"head_dim": 80}),
    "llama-dim96": LlamaConfig(**_BASE | {"head_dim": 96}),
    "llama-linear": LlamaConfig(
        **_BASE, rope_parameters=_ROPE | {"rope_type": "linear", "factor": 2.0}
    ),
    "llama-llama3": LlamaConfig(**_BASE, rope_parameters=_ROPE | _LLAMA3),
    "qwen2": Qwen2Config(**_BASE),
    "qwen2-yarn": Qwen2Config(**_BASE, rope_parameters=_ROPE | _YARN),
    "qwen3-dim128": Qwen3Config(**_BASE | {"head_dim": 128}),
    "mistral": MistralConfig(**_BASE, sliding_window=None),
}


def tiny_model(name: str) -> LoadedModel:
    """A random bf16 model; the same weights every time."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            # Biases and norms start as zeros and ones; make every one of them matter.
            if key.endswith("bias"):
                value.copy_(torch.randn(value.shape) * 0.2)
            elif "norm" in key:
                value.copy_(1 + torch.randn(value.shape) * 0.2)
            elif "lm_head" in key or "embed" in key:
                value.copy_(torch.randn(value.shape) * 0.3)
            else:
                value.copy_(torch.randn(value.shape) * value.shape[-1] ** -0.5)
    return LoadedModel(
        model=model,
        folder=Path("/nonexistent"),
        fingerprint=f"tiny-{name}",
        eos_token_ids=(2,),
        max_context=MAX_CONTEXT,
    )


def native(name: str = "llama-tied", *, threads: int = 1, isa: str | None = None) -> NativeBackend:
    """The native backend of a tiny model."""
    return NativeBackend(tiny_model(name), block_tokens=BLOCK_TOKENS, threads=threads, isa=isa)


@dataclass
class Sequence:
    """A sequence of tokens, its blocks, and the logits of the positions that were asked for."""

    tokens: list[int]
    table: list[int]
    length: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def left(self) -> int:
        """Tokens not yet computed."""
        return len(self.tokens) - self.length


def sequences(lengths: list[int], seed: int) -> list[Sequence]:
    """Random sequences; the first blocks of the pool, in shuffled order, are theirs."""
    rng = random.Random(seed)
    counts = [-(-length // BLOCK_TOKENS) for length in lengths]
    blocks = list(range(sum(counts)))
    rng.shuffle(blocks)
    tokens = random.Random(99)
    return [
        Sequence(
            [tokens.randrange(VOCAB) for _ in range(length)], [blocks.pop() for _ in range(count)]
        )
        for length, count in zip(lengths, counts, strict=True)
    ]


def advance(backend: NativeBackend, work: list[tuple[Sequence, int]]) -> None:
    """One forward: so many new tokens of each sequence, logits of each chunk's last."""
    items = [
        WorkItem(seq.tokens[seq.length : seq.length + count], seq.length, seq.table, True)
        for seq, count in work
    ]
    logits = backend.forward(items)
    for row, (seq, count) in zip(logits, work, strict=True):
        seq.length += count
        seq.logits[seq.length - 1] = row


def kv_bytes(backend: NativeBackend, seq: Sequence) -> list[bytes]:
    """The sequence's blocks; positions past its end are as they were."""
    return [bytes(backend.read_block(block)) for block in seq.table]
