"""Engines, stores and requests for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mooncake_serve.engine.core import EngineCore, EngineSettings
from mooncake_serve.engine.protocol import (
    Backend,
    Event,
    FailEvent,
    FinishEvent,
    GenerationRequest,
    SamplingParams,
    TokenEvent,
)
from mooncake_serve.engine.torch_backend import TorchBackend
from mooncake_serve.models import LoadedModel

WAIT_S = 240.0
"""Bound of every wait; a test that reaches it has hung."""


@dataclass
class DictReading:
    """Blocks of a `DictStore`, read plane by plane."""

    blocks: list[bytes]
    buffers: Sequence[memoryview]
    store: DictStore

    def __len__(self) -> int:
        return len(self.blocks)

    def read_planes(self, first: int, end: int) -> int:
        left = self.store.before_planes(first, len(self.blocks))
        size = len(self.blocks[0]) // self.store.planes
        part = slice(first * size, end * size)
        for block, buffer in zip(self.blocks[:left], self.buffers, strict=False):
            buffer[part] = block[part]
        del self.blocks[left:]
        self.store.reads += left if end == self.store.planes else 0
        return left


class DictStore:
    """A store without a server: what `NodeStore` promises, in one dictionary."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.reads = 0
        self.planes = 1
        self.before_planes: Callable[[int, int], int] = lambda first, blocks: blocks
        """Called before planes are read; how many blocks are to be left."""

    def match(self, keys: Sequence[bytes], tenant: str = "") -> int:
        return next((n for n, key in enumerate(keys) if key not in self.blocks), len(keys))

    def read_into(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        tenant: str = "",
        hint: object = None,
        threads: int = 1,
    ) -> int:
        count = self.match(keys)
        for key, buffer in zip(keys[:count], buffers, strict=False):
            buffer[:] = self.blocks[key]
        self.reads += count
        return count

    @contextmanager
    def open(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        tenant: str = "",
        hint: object = None,
        threads: int = 1,
    ):
        yield DictReading([self.blocks[key] for key in keys[: self.match(keys)]], buffers, self)

    def put(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None],
        buffers: Sequence[memoryview],
        shape: object,
        tenant: str = "",
        hint: object = None,
    ) -> list[str]:
        answers = []
        self.planes = getattr(shape, "planes", 1)
        for key, buffer in zip(keys, buffers, strict=True):
            answers.append("present" if key in self.blocks else "stored")
            self.blocks.setdefault(key, bytes(buffer))
        return answers


@dataclass
class Result:
    """What one request gave."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    events: list[TokenEvent] = field(default_factory=list)
    end: FinishEvent | FailEvent | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def receive(self, event: Event) -> None:
        assert self.end is None, "an event after the last one"
        if isinstance(event, TokenEvent):
            self.events.append(event)
            self.tokens.append(event.token_id)
            self.text += event.text
            return
        if isinstance(event, FinishEvent):
            self.text += event.text
        self.end = event
        self.ended.set()

    def finish(self) -> FinishEvent:
        assert self.ended.wait(WAIT_S), "the request did not end"
        assert isinstance(self.end, FinishEvent), self.end
        return self.end

    def fail(self) -> Exception:
        assert self.ended.wait(WAIT_S), "the request did not end"
        assert isinstance(self.end, FailEvent), self.end
        return self.end.error


_numbers = iter(range(1 << 30))


def request(prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> GenerationRequest:
    tenant = {name: options.pop(name) for name in ("tenant", "tenant_salt") if name in options}
    about = {"deadline_s", "priority", "reuse"}
    tenant |= {name: options.pop(name) for name in about & options.keys()}
    sampling = SamplingParams(max_tokens=max_tokens, **options)
    return GenerationRequest(f"r{next(_numbers)}", tuple(prompt), sampling, **tenant)


def start(engine: EngineCore, wanted: GenerationRequest) -> Result:
    result = Result()
    engine.submit(wanted, result.receive)
    return result


def generate(engine: EngineCore, prompts: Sequence[Sequence[int]], max_tokens: int = 8):
    """Tokens of greedy answers to prompts submitted at once."""
    results = [start(engine, request(each, max_tokens, ignore_eos=True)) for each in prompts]
    for result in results:
        result.finish()
    return [result.tokens for result in results]


def spell(ids: Sequence[int]) -> str:
    """A stand-in for a tokenizer: one letter per id."""
    return "".join(chr(ord("a") + each % 26) for each in ids)


@contextmanager
def model_engine(
    loaded: LoadedModel,
    store: Any = None,
    *,
    block_tokens: int = 32,
    pool_blocks: int = 512,
    threads: int = 1,
    max_batch: int = 32,
    backend: Any = "torch",
    grammars: Any = None,
):
    """An engine; "plain torch" keeps attention off the native kernels."""

    def make() -> Backend:
        options: dict[str, Any] = {"block_tokens": block_tokens, "threads": threads}
        made: Backend
        if backend == "native":
            from mooncake_serve.engine.native import NativeBackend

            made = NativeBackend(loaded, **options)
        else:
            attention: Any = "auto" if backend == "torch" else "torch"
            made = TorchBackend(loaded, **options, attention=attention)
        settings.pool_bytes = pool_blocks * made.layout.block_bytes
        return made

    settings = _Settings("test", threads, 1, max_batch)
    engine = EngineCore(make, spell, settings, store, grammars)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.close()


@dataclass
class _Settings:
    """EngineSettings whose pool is sized once the backend knows its block."""

    name: str
    threads: int
    pool_bytes: int
    max_batch: int = 32
    max_context: int | None = None
    relaxed: bool = False


@contextmanager
def chain_engine(backend: Any, store: Any = None, *, pool_blocks: int = 64, max_batch: int = 8):
    settings = EngineSettings("chain", 1, pool_blocks * backend.layout.block_bytes, max_batch)
    engine = EngineCore(lambda: backend, spell, settings, store)
    try:
        yield engine
    finally:
        engine.close()


_TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "initializer_range": 0.25,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

FAMILIES = {
    "llama": ("LlamaConfig", {"head_dim": 16}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": None, "num_key_value_heads": 4}),
}
"""Model family to configuration class and what differs from `_TINY`."""


def tiny_config(family: str, **changes: Any) -> Any:
    import transformers

    name, fields = FAMILIES[family]
    return getattr(transformers, name)(**{**_TINY, **fields, **changes})


def tiny_model(
    family: str, device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> LoadedModel:
    """A random model; the same weights in every process."""
    from transformers import AutoModelForCausalLM

    config = tiny_config(family, **changes)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return LoadedModel(
        model=model.to(device).eval().requires_grad_(False),
        folder=Path(),
        fingerprint=f"tiny-{family}",
        eos_token_ids=(),
        max_context=config.max_position_embeddings,
    )


def byte_tokenizer() -> Any:
    """One token per byte, and an end: 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: number for number, char in enumerate(alphabet)}
    vocabulary["<end>"] = len(vocabulary)
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def random_prompt(length: int, seed: int, vocab: int = 320) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (length,), generator=generator).tolist()
