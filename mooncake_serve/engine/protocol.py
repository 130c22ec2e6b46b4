"""The seam between serving and computing: what a request is, what an engine and a backend do.

Two protocols. `Engine` is what a replica talks to: submit, cancel, stats, close. `Backend` is
what an engine computes with: one model's forward pass over a pool of KV blocks it owns. The
scheduler, the pool's bookkeeping, the sampler and the store client are the same for every
backend; only the backend knows tensors, devices and kernels.

A pool block holds `block_tokens` tokens of KV for all layers, in exactly the bytes that the store
keeps, so that a load is one copy per block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

if TYPE_CHECKING:
    import torch

    from mooncake_serve._store import Hint

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Defaults are greedy; a seed makes sampling repeatable."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt and answer, multiplies negative ones."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Report the chosen token's log-probability and this many alternatives; None reports none."""
    grammar: str | None = None
    """What the answer must be, in the text form of `engine/grammar.py`."""

    @property
    def penalizes(self) -> bool:
        """Whether tokens already seen become less likely."""
        repeated = self.repetition_penalty != 1
        return bool(self.presence_penalty or self.frequency_penalty or repeated)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to complete."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    tenant: str = ""
    tenant_salt: bytes = b""
    """32 bytes rooted in the tenant's secret, or empty for the shared tenant; part of each key."""
    priority: int = 0
    """Lower goes first; equals go in the order they came."""
    reuse: bool = True
    """False keeps the prompt's blocks out of the store: nobody will ask for them again."""
    hint: Hint | None = None
    """What is known about the next use of the prompt's blocks."""
    traceparent: str = ""
    """The span it belongs to, by W3C; empty while tracing is off."""
    deadline_s: float | None = None
    """`time.monotonic()` after which the engine gives up; None waits for ever."""
    log_id: str = ""
    """The id of the HTTP request it is part of, if it is; other requests may have the same."""

    @property
    def logged(self) -> dict[str, str]:
        """`extra` of log lines about it."""
        return {"request_id": self.log_id or self.request_id}


class TokenLogprob(Struct, frozen=True, array_like=True):
    """A token and its natural log-probability."""

    token_id: int
    logprob: float


class TokenEvent(Struct, frozen=True, array_like=True, tag="token"):
    """One generated token. `text` may be empty while a character or stop string is incomplete."""

    token_id: int
    text: str
    logprob: TokenLogprob | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class Usage(Struct, frozen=True, array_like=True):
    """What a request used. `cached_tokens` counts prompt tokens whose KV was not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_pool_tokens: int = 0
    cached_store_tokens: int = 0


class FinishEvent(Struct, frozen=True, array_like=True, tag="finish"):
    """The request ended normally. `text` is what was still held back."""

    reason: FinishReason
    usage: Usage
    text: str = ""


class FailEvent(Struct, frozen=True, array_like=True, tag="fail"):
    """The request ended in an error; nothing follows."""

    error: Exception


Event = TokenEvent | FinishEvent | FailEvent
OnEvent = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """A KV block's bytes: `[layer][K|V][token][kv_head][head_dim]` unless `order` differs."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    """"bfloat16", "float16" or "float32"."""
    order: str = "lktHd"
    """Identifies the order of axes inside a block; part of the namespace."""

    @property
    def planes(self) -> int:
        """Independent sub-blocks: one per (layer, K|V)."""
        return 2 * self.layers

    @property
    def channels(self) -> int:
        """Elements of one token in one plane."""
        return self.kv_heads * self.head_dim

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.planes * self.block_tokens * self.channels * self.element_bytes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What serving needs to know of a loaded model."""

    name: str
    namespace: str
    """Root of the block keys: model fingerprint, layout, numerics id (`engine/namespace.py`)."""
    layout: KVLayout
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    exact: bool
    """A warm answer is bit-identical to a cold one on this backend and device."""
    device: str
    backend: str


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine's work."""

    running: int
    waiting: int
    outstanding_prefill_tokens: int
    pool_blocks: int
    pool_free_blocks: int
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    cached_pool_tokens: int
    cached_store_tokens: int
    published_blocks: int
    prefill_token_s: float = 0.0
    """Measured cost of prefill (`engine/prefill_curve.py`); 0 before the first."""
    prefill_attention_s: float = 0.0


class Engine(Protocol):
    """A running model. Thread-safe; events arrive on the engine's own thread."""

    info: ModelInfo

    @property
    def healthy(self) -> bool:
        """False once the engine's thread has ended; the replica must be replaced."""
        ...

    def submit(self, request: GenerationRequest, on_event: OnEvent) -> None:
        """Queue a request. `on_event` gets its tokens, then one FinishEvent or FailEvent.

        Raises ContextTooLong or InvalidRequest before anything is queued.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request at the next step; unknown ids are ignored."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot; never waits for a step."""
        ...

    def pool_changes(self, *, everything: bool = False) -> tuple[list[bytes], list[bytes]]:
        """Keys that came into the pool and that left it since the last call, or all that are in."""
        ...

    def close(self) -> None:
        """Stop the thread, fail what is queued, return the pool's memory."""
        ...


class WorkItem(NamedTuple):
    """Tokens of one sequence to run through the model."""

    tokens: Sequence[int]
    start: int
    """Absolute position of the first token; KV of all earlier positions is in `table`."""
    table: Sequence[int]
    """Pool blocks of the sequence, by position // block_tokens; covers start + len(tokens)."""
    logits: bool
    """Return logits of the last token."""


class Backend(Protocol):
    """One model's forward pass over the KV pool it owns. Called from one thread."""

    name: str
    layout: KVLayout
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    numerics_id: str
    """Everything that can change a bit of KV: versions, ISA, threads, kernels."""
    fingerprint: str
    """Digest of config and weights."""
    exact: bool
    any_cut: bool
    """True: the same bits for any chunking and batch, so any mix of work may share a forward, and
    blocks written by decode may be published. False: the scheduler keeps to canonical compute."""
    max_decode_rows: int

    def allocate_pool(self, blocks: int) -> None:
        """Reserve and touch memory for `blocks` KV blocks, zeroed. Called once."""
        ...

    def forward(self, batch: Sequence[WorkItem]) -> torch.Tensor:
        """Run the batch, write its KV into the pool; logits float32 [items with logits, vocab].

        With `any_cut` False a batch is one prefill item, or up to `max_decode_rows` items of one
        token each.
        """
        ...

    def view_block(self, block: int) -> memoryview | None:
        """The block's bytes for reading and writing, or None when the pool is not host memory."""
        ...

    def read_block(self, block: int) -> memoryview:
        """The block's bytes in host memory (a pinned copy where the pool is on a device)."""
        ...

    def write_block(self, block: int, data: memoryview) -> None:
        """Set the block's bytes; `data` may be reused as soon as this returns."""
        ...

    def make_staging(self) -> memoryview:
        """A buffer of one block in host memory, from which `write_block` copies at the device's
        rate: pinned where the pool is on a device."""
        ...

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool."""
        ...

    def close(self) -> None:
        """Release weights and pool."""
        ...


class LayerGate(Protocol):
    """Says how many layers of a load have arrived. Thread-safe."""

    def open(self, layers: int) -> None:
        """The first `layers` layers may be read."""
        ...

    def fail(self) -> None:
        """The other layers will not arrive; nothing once all have."""
        ...


@runtime_checkable
class LayeredBackend(Backend, Protocol):
    """A backend whose forward can begin while the KV before it arrives."""

    def make_gate(self) -> LayerGate:
        """A closed gate for one load."""
        ...

    def forward_behind(self, batch: Sequence[WorkItem], gate: LayerGate) -> torch.Tensor | None:
        """`forward` whose attention waits for each layer in turn; None when the gate failed.

        The same bits as `forward` after the load. A forward that was in vain wrote nothing but the
        KV of its own tokens.
        """
        ...
