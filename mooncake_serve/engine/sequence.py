"""One request's progress through the engine: its tokens, its blocks, and what comes next.

A sequence is a list of tokens of which the first `computed` have KV in the pool. Canonical
compute fixes how the rest is cut into forwards, from its position alone: whole blocks up to the
last one the prompt fills and does not end in, then one tail, then single tokens. A sequence that
was preempted starts over at 0 and runs the very same forwards, with the tokens it has generated
given instead of sampled, so its KV comes out bit for bit as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from mooncake_serve.engine.protocol import GenerationRequest, Usage


class Phase(Enum):
    """Where a sequence is. Blocks are held in LOADING, PREFILL and DECODE only."""

    WAITING = "waiting"
    LOADING = "loading"
    """The loader writes into its blocks: it can be neither run nor preempted."""
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in the scheduler."""

    request: GenerationRequest
    order: tuple[int, int]
    """(priority, arrival); the lowest is the oldest and never yields to another."""
    keys: list[bytes]
    """Keys of the prompt's canonical blocks, extended by decode where that may be published."""
    block_tokens: int
    tokens: list[int] = field(init=False)
    """Prompt and generated tokens."""
    phase: Phase = Phase.WAITING
    table: list[int] = field(default_factory=list)
    """Pool blocks by position // block_tokens; may reach beyond `computed`."""
    computed: int = 0
    counted_blocks: int = 0
    """Prompt blocks whose origin is in the cached counts; a replay counts nothing twice."""
    cached_pool_blocks: int = 0
    cached_store_blocks: int = 0
    last_step: int = 0
    ended: bool = False
    """Cancelled, expired or failed while its blocks are being loaded."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.token_ids)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.token_ids)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def canonical_blocks(self) -> int:
        """Prompt blocks computed, matched and published whole."""
        return canonical_blocks(self.prompt_tokens, self.block_tokens)

    @property
    def next_block(self) -> int:
        """Index of the block that the next token goes to."""
        return self.computed // self.block_tokens

    @property
    def next_end(self) -> int:
        """Position up to which the next forward computes."""
        return self.end_after(self.computed)

    def end_after(self, computed: int) -> int:
        """Position up to which the forward computes that begins at `computed`."""
        if computed // self.block_tokens < self.canonical_blocks:
            return computed + self.block_tokens
        return max(self.prompt_tokens, computed + 1)

    @property
    def blocks_needed(self) -> int:
        """Blocks that hold all its present tokens and the next one."""
        return len(self.tokens) // self.block_tokens + 1

    def count_cached(self, index: int, *, store: bool) -> None:
        """Block `index` was found, not computed."""
        if index >= self.counted_blocks:
            self.counted_blocks = index + 1
            if store:
                self.cached_store_blocks += 1
            else:
                self.cached_pool_blocks += 1

    def count_computed(self, index: int) -> None:
        """Block `index` was computed here, so finding it later is no saving."""
        self.counted_blocks = max(self.counted_blocks, index + 1)

    def usage(self) -> Usage:
        """What the request used so far."""
        pool = self.cached_pool_blocks * self.block_tokens
        store = self.cached_store_blocks * self.block_tokens
        return Usage(self.prompt_tokens, self.generated, pool + store, pool, store)


def canonical_blocks(prompt_tokens: int, block_tokens: int) -> int:
    """Whole blocks before the tail; the tail keeps at least one token."""
    return max(0, prompt_tokens - 1) // block_tokens
