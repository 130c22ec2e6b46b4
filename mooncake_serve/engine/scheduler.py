"""The continuous-batching state machine: what runs next, and whose blocks make room for it.

Pure: no tensors, no clock, no threads, no store. The core asks `plan` for a step, runs it, and
reports `complete`; loads are handed out by `take_loads` and reported by `load_done`.

Invariants:
- Forwards are cut canonically (see `sequence.py`), whatever else is going on.
- Prefill and decode alternate, so neither starves the other; prefill is first come, first served.
- A block that one sequence computes or loads is claimed; others that need it wait for it.
- The oldest sequence never waits for a younger one's blocks: a younger one is preempted. What a
  request has generated is kept, and its forwards are replayed when it gets its turn again. Age is
  priority first, arrival second.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_serve.engine.pool import BlockPool
from mooncake_serve.engine.protocol import WorkItem
from mooncake_serve.engine.sequence import Phase, Sequence

if TYPE_CHECKING:
    from mooncake_serve._store import Hint

KeysOf = Callable[[bytes, list[int]], list[bytes]]
"""(tenant salt, tokens) to the keys of all their full blocks."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: a prefill item, or decode rows (both, where the backend allows any cut)."""

    sequences: list[Sequence]
    items: list[WorkItem]


@dataclass(slots=True, eq=False)
class Load:
    """Blocks to read from the store, if it has them; they follow what `sequence` has computed."""

    sequence: Sequence
    keys: list[bytes]
    blocks: list[int]
    settled: bool = False
    """A forward behind it has told that all arrived."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A block that the store should have: it just got its key, or was found in the pool again."""

    block: int
    key: bytes
    parent: bytes | None
    tenant: str
    hint: Hint | None = None
    again: bool = False
    """It was offered before; the store has it unless it forgot, refused or was away."""
    traceparent: str = ""


@dataclass(slots=True)
class Limits:
    """What the backend and the configuration allow."""

    block_tokens: int
    max_batch: int
    max_decode_rows: int
    any_cut: bool = False
    """Prefill and decode may share a forward."""
    keep_decoded: bool = False
    """Blocks that a tail or decode filled get keys too."""
    use_store: bool = False


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_pool_tokens: int = 0
    cached_store_tokens: int = 0


@dataclass(slots=True)
class Scheduler:
    """Owns all sequences and the pool's bookkeeping."""

    limits: Limits
    pool: BlockPool
    keys_of: KeysOf
    drop_pins: Callable[[], bool] = lambda: False
    """Give up blocks that only wait to be published; True when there were any."""
    waiting: list[Sequence] = field(default_factory=list)
    active: list[Sequence] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    _claims: dict[bytes, Sequence] = field(default_factory=dict)
    _loads: list[Load] = field(default_factory=list)
    _hits: list[Completed] = field(default_factory=list)
    _steps: int = 0
    _prefill_turn: bool = True

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        bisect.insort(self.waiting, sequence, key=_age)

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, whatever it is doing; its blocks go as soon as nobody writes to them."""
        if sequence.phase is Phase.DONE or sequence.ended:
            return
        self._count(sequence)
        if sequence.phase is Phase.LOADING:
            sequence.ended = True
            return
        self._drop(sequence)

    def take_loads(self) -> list[Load]:
        """Loads to start now."""
        loads, self._loads = self._loads, []
        return loads

    def take_hits(self) -> list[Completed]:
        """Blocks that sequences have found in the pool since the last call, prefixes first.

        Each holds a reference that the caller must release: by then its sequence may be gone.
        """
        hits, self._hits = self._hits, []
        return hits

    def load_done(self, load: Load, loaded: int) -> None:
        """The first `loaded` blocks of a load hold their bytes; the rest was not in the store."""
        sequence = load.sequence
        sequence.phase = Phase.PREFILL
        if sequence.ended:
            sequence.ended = False
            self._drop(sequence)
            return
        for _ in range(loaded):
            sequence.count_cached(sequence.next_block, store=True)
            self._publish(sequence, sequence.next_block)
            sequence.computed += self.limits.block_tokens

    def plan_behind(self, load: Load) -> Step | None:
        """The forward that follows a load, to be run while the load's last layers arrive.

        None when others could run meanwhile, because it may wait for the load, or when there is no
        room. Changes nothing but the table; `load_done` and `complete` follow if all arrived.
        """
        sequence = load.sequence
        idle = all(each is sequence or each.phase is Phase.LOADING for each in self.active)
        if sequence.ended or self.waiting or not idle:
            return None
        start = sequence.computed + len(load.keys) * self.limits.block_tokens
        if start // self.limits.block_tokens == len(sequence.table):
            block = self.pool.allocate()
            if block is None:
                return None
            sequence.table.append(block)
        end = sequence.end_after(start)
        tokens = sequence.tokens[start:end]
        item = WorkItem(tokens, start, sequence.table, end == len(sequence.tokens))
        return Step([sequence], [item])

    def plan(self) -> Step | None:
        """The next forward, or None when everything waits for a load, a release or a request."""
        self._admit()
        if self.limits.any_cut:
            rows = self._decode_rows()
            chunk = self._prefill_chunk()
            # The chunk's growth may have preempted a row.
            rows = [row for row in rows if row.phase is Phase.DECODE]
            return self._step(rows + chunk)
        picks = (self._prefill_chunk, self._decode_rows)
        for pick in picks if self._prefill_turn else reversed(picks):
            chosen = pick()
            if chosen:
                self._prefill_turn = chosen[0].phase is Phase.DECODE
                return self._step(chosen)
        return None

    def complete(self, step: Step) -> tuple[list[Sequence], list[Completed]]:
        """Account for a step that ran. Returns the sequences whose logits came back, in order,
        and the blocks that are complete now."""
        sampled: list[Sequence] = []
        completed: list[Completed] = []
        for sequence, item in zip(step.sequences, step.items, strict=True):
            sequence.computed = item.start + len(item.tokens)
            if sequence.computed % self.limits.block_tokens == 0:
                filled = self._filled(sequence, sequence.next_block - 1)
                completed += filled if sequence.request.reuse else []
            if sequence.computed >= sequence.prompt_tokens:
                sequence.phase = Phase.DECODE
            if item.logits:
                sampled.append(sequence)
        return sampled, completed

    def outstanding_prefill_tokens(self) -> int:
        """Prompt tokens that are still to be computed or found."""
        sequences = [*self.waiting, *self.active]
        return sum(max(0, each.prompt_tokens - each.computed) for each in sequences)

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.pool.check_integrity()
        assert self.waiting == sorted(self.waiting, key=_age)
        assert len(self.active) <= self.limits.max_batch
        assert all(not each.table and each.computed == 0 for each in self.waiting)
        for each in self.active:
            assert each.phase in {Phase.LOADING, Phase.PREFILL, Phase.DECODE}
            assert each.computed <= len(each.table) * self.limits.block_tokens
            assert each.computed <= len(each.tokens)
        assert all(owner in self.active for owner in self._claims.values())

    def _admit(self) -> None:
        while self.waiting and len(self.active) < self.limits.max_batch:
            sequence = self.waiting[0]
            matched = self.pool.match(sequence.keys[: sequence.canonical_blocks])
            cached = self.pool.match_unused(sequence.keys[:matched])
            short = sequence.blocks_needed - matched > self.pool.available - cached
            if short and not self._drop_pin():
                return
            if not short:
                del self.waiting[0]
                sequence.phase = Phase.PREFILL
                bisect.insort(self.active, sequence, key=_age)

    def _prefill_chunk(self) -> list[Sequence]:
        for sequence in list(self.active):
            if sequence.phase is Phase.PREFILL and self._ready(sequence):
                return [sequence]
        return []

    def _ready(self, sequence: Sequence) -> bool:
        """Take what others computed; then whether the sequence's next chunk can run."""
        while sequence.next_block < sequence.canonical_blocks:
            index = sequence.next_block
            key = sequence.keys[index]
            block = self.pool.acquire(key)
            if block is None:
                owner = self._claims.get(key)
                if owner is None and not self._claim_run(sequence):
                    return False
                return self._claims.get(key) is sequence and sequence.phase is Phase.PREFILL
            if index < len(sequence.table):
                self.pool.release(sequence.table[index])
                sequence.table[index] = block
            else:
                sequence.table.append(block)
            self._unclaim(sequence, key)
            sequence.count_cached(index, store=False)
            sequence.computed += self.limits.block_tokens
            if self.limits.use_store and sequence.request.reuse:
                self.pool.retain(block)
                self._hits.append(self._completed(sequence, index, block, again=True))
        return self._grow(sequence)

    def _claim_run(self, sequence: Sequence) -> bool:
        """Claim the next blocks that nobody has or makes, with room for them; load them if there
        is a store. False when there is no room for even one."""
        first = sequence.next_block
        run: list[bytes] = []
        for index in range(first, sequence.canonical_blocks):
            key = sequence.keys[index]
            if key in self._claims or self.pool.has(key):
                break
            if index >= len(sequence.table) and not self._extend(sequence):
                break
            run.append(key)
        if not run:
            return False
        self._claims.update(dict.fromkeys(run, sequence))
        if self.limits.use_store:
            sequence.phase = Phase.LOADING
            blocks = sequence.table[first : first + len(run)]
            self._loads.append(Load(sequence, run, blocks))
        return True

    def _decode_rows(self) -> list[Sequence]:
        ready = [each for each in self.active if each.phase is Phase.DECODE]
        if len(ready) > self.limits.max_decode_rows:
            ready = sorted(ready, key=lambda each: (each.last_step, each.order))
            ready = sorted(ready[: self.limits.max_decode_rows], key=_age)
        # Oldest first: a row that grows may preempt younger ones, which come later.
        return [each for each in ready if each.phase is Phase.DECODE and self._grow(each)]

    def _grow(self, sequence: Sequence) -> bool:
        """Make sure that the next chunk's block is in the table."""
        return sequence.next_block < len(sequence.table) or self._extend(sequence)

    def _extend(self, sequence: Sequence) -> bool:
        """Append a block to the table, preempting younger sequences if it must be."""
        while True:
            block = self.pool.allocate()
            if block is not None:
                sequence.table.append(block)
                return True
            if not self._drop_pin() and not self._preempt_after(sequence):
                return False

    def _drop_pin(self) -> bool:
        """Release a block that is held only for the store; True when there was one."""
        if self._hits:
            self.pool.release(self._hits.pop().block)
            return True
        return self.drop_pins()

    def _preempt_after(self, sequence: Sequence) -> bool:
        """Preempt the youngest sequence that is younger than this one and holds blocks."""
        for victim in reversed(self.active):
            if victim.order <= sequence.order:
                return False
            if victim.phase is not Phase.LOADING and victim.table:
                self._drop(victim)
                victim.phase = Phase.WAITING
                self.add(victim)
                self.counters.preemptions += 1
                return True
        return False

    def _drop(self, sequence: Sequence) -> None:
        """Take a sequence off; its blocks go deepest first, so that prefixes outlive them."""
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        else:
            self.active.remove(sequence)
        for key in sequence.keys:
            self._unclaim(sequence, key)
        for block in reversed(sequence.table):
            self.pool.release(block)
        sequence.table = []
        sequence.computed = 0
        sequence.phase = Phase.DONE

    def _step(self, sequences: list[Sequence]) -> Step | None:
        if not sequences:
            return None
        self._steps += 1
        items: list[WorkItem] = []
        for sequence in sequences:
            sequence.last_step = self._steps
            start, end = sequence.computed, sequence.next_end
            tokens = sequence.tokens[start:end]
            items.append(WorkItem(tokens, start, sequence.table, end == len(sequence.tokens)))
        return Step(sequences, items)

    def _filled(self, sequence: Sequence, index: int) -> list[Completed]:
        """Block `index` was filled by a forward; give it its key if it may be shared."""
        if index >= sequence.canonical_blocks:
            if not self.limits.keep_decoded:
                return []
            tokens = sequence.tokens[: (index + 1) * self.limits.block_tokens]
            sequence.keys = self.keys_of(sequence.request.tenant_salt, tokens)
        sequence.count_computed(index)
        return [self._publish(sequence, index)]

    def _publish(self, sequence: Sequence, index: int) -> Completed:
        key = sequence.keys[index]
        parent = sequence.keys[index - 1] if index else None
        block = self.pool.publish(key, parent, sequence.table[index])
        sequence.table[index] = block
        self._unclaim(sequence, key)
        return self._completed(sequence, index, block)

    def _completed(
        self, sequence: Sequence, index: int, block: int, *, again: bool = False
    ) -> Completed:
        parent = sequence.keys[index - 1] if index else None
        request = sequence.request
        key, about = sequence.keys[index], (request.tenant, request.hint)
        return Completed(block, key, parent, *about, again, request.traceparent)

    def _unclaim(self, sequence: Sequence, key: bytes) -> None:
        if self._claims.get(key) is sequence:
            del self._claims[key]

    def _count(self, sequence: Sequence) -> None:
        usage = sequence.usage()
        self.counters.prompt_tokens += usage.prompt_tokens
        self.counters.generated_tokens += usage.completion_tokens
        self.counters.cached_pool_tokens += usage.cached_pool_tokens
        self.counters.cached_store_tokens += usage.cached_store_tokens


def _age(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
