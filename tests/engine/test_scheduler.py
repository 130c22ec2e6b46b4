"""The scheduler under random arrivals, loads, cancellations and a pool that is too small.

Every run uses `ChainBackend`, so a request's tokens equal those of the request alone exactly when
no block was lost, mixed up or computed in another cut.
"""

import hashlib
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serve.engine.pool import BlockPool
from mooncake_serve.engine.protocol import GenerationRequest, SamplingParams
from mooncake_serve.engine.scheduler import Completed, Limits, Load, Scheduler
from mooncake_serve.engine.sequence import Phase, Sequence
from tests.engine.chain_backend import ChainBackend, expected_tokens

BLOCK = 4


def keys_of(salt: bytes, tokens: list[int]) -> list[bytes]:
    key, keys = salt, []
    for begin in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        data = key + bytes(tokens[begin : begin + BLOCK])
        key = hashlib.blake2b(data, digest_size=8).digest()
        keys.append(key)
    return keys


@dataclass
class World:
    """The core's part, with a store that is a dictionary and loads that end when told."""

    pool_blocks: int
    max_batch: int = 8
    any_cut: bool = False
    stored: dict[bytes, bytes] | None = None
    random: Random = field(default_factory=lambda: Random(0))

    def __post_init__(self) -> None:
        self.backend = ChainBackend(block_tokens=BLOCK, any_cut=self.any_cut, max_decode_rows=3)
        self.backend.allocate_pool(self.pool_blocks)
        limits = Limits(BLOCK, self.max_batch, 3, self.any_cut, self.any_cut)
        limits.use_store = self.stored is not None
        self.pool = BlockPool(self.pool_blocks)
        self.scheduler = Scheduler(limits, self.pool, keys_of)
        self.loads: list[Load] = []
        self.done: list[Sequence] = []
        self.sequences: list[Sequence] = []

    def submit(self, prompt: list[int], count: int, priority: int = 0) -> Sequence:
        request = GenerationRequest(
            str(len(self.sequences)), tuple(prompt), SamplingParams(max_tokens=count)
        )
        sequence = Sequence(request, (priority, len(self.sequences)), keys_of(b"", prompt), BLOCK)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> bool:
        """One turn; False when nothing could happen."""
        step = self.scheduler.plan()
        self.loads += self.scheduler.take_loads()
        for hit in self.scheduler.take_hits():
            self.store(hit)
            self.pool.release(hit.block)
        self.scheduler.check_integrity()
        if step is None:
            return self.end_a_load()
        logits = self.backend.forward(step.items)
        sampled, completed = self.scheduler.complete(step)
        for block in completed:
            self.store(block)
        for sequence, row in zip(sampled, logits, strict=True):
            sequence.tokens.append(int(row.argmax()))
            if sequence.generated == sequence.request.sampling.max_tokens:
                self.done.append(sequence)
                self.scheduler.finish(sequence)
        if self.loads and self.random.random() < 0.5:
            self.end_a_load()
        return True

    def store(self, block: Completed) -> None:
        if self.stored is not None:
            data = bytes(self.backend.read_block(block.block))
            assert self.stored.setdefault(block.key, data) == data

    def end_a_load(self) -> bool:
        if not self.loads:
            return False
        load = self.loads.pop(self.random.randrange(len(self.loads)))
        assert self.stored is not None
        loaded = 0
        for key, block in zip(load.keys, load.blocks, strict=True):
            if key not in self.stored or self.random.random() < 0.1:
                break
            self.backend.write_block(block, memoryview(self.stored[key]))
            loaded += 1
        self.scheduler.load_done(load, loaded)
        self.scheduler.check_integrity()
        return True

    def run(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.scheduler.active and not self.scheduler.waiting:
                break
            assert self.step(), "nothing can run, and nothing will change"
        assert not self.scheduler.active
        assert not self.scheduler.waiting
        assert self.pool.available == self.pool.blocks, "a finished request holds blocks"

    def check(self, sequence: Sequence) -> None:
        prompt = list(sequence.request.token_ids)
        count = sequence.request.sampling.max_tokens
        want = expected_tokens(prompt, count, block_tokens=BLOCK, any_cut=self.any_cut)
        assert sequence.tokens[len(prompt) :] == want


requests = st.lists(
    st.tuples(
        st.integers(0, 2),  # which document the prompt begins with
        st.integers(0, 14),  # how much of it
        st.lists(st.integers(100, 102), min_size=1, max_size=6),  # its own part
        st.integers(1, 9),  # tokens to generate
        st.integers(0, 12),  # turns before it arrives
        st.one_of(st.none(), st.integers(0, 30)),  # turns until it is cancelled
    ),
    min_size=1,
    max_size=10,
)


@given(requests, st.integers(8, 24), st.booleans(), st.booleans(), st.integers(0, 2**16))
@settings(max_examples=150, deadline=None)
def test_tokens_do_not_depend_on_company(cases, pool_blocks, any_cut, use_store, seed) -> None:
    stored: dict[bytes, bytes] | None = {} if use_store else None
    for _ in range(2 if use_store else 1):
        world = World(pool_blocks, any_cut=any_cut, stored=stored, max_batch=5, random=Random(seed))
        documents = [[each] * 14 for each in range(3)]
        cancelled, cancels = set(), []
        for document, length, own, count, wait, cancel in cases:
            sequence = world.submit(documents[document][:length] + own, count)
            for _ in range(wait):
                world.step()
            if cancel is not None:
                cancels.append((cancel, sequence))
        for turns, sequence in sorted(cancels, key=lambda each: each[0]):
            for _ in range(turns):
                world.step()
            if sequence not in world.done:
                cancelled.add(sequence)
                world.scheduler.finish(sequence)
        world.run()
        for sequence in world.sequences:
            if sequence not in cancelled:
                world.check(sequence)
        follow_ups = [world.submit([*each.tokens, 7], 3) for each in world.done]
        world.run()
        for sequence in follow_ups:
            world.check(sequence)


def test_eight_questions_compute_one_document_once() -> None:
    world = World(pool_blocks=64)
    document = list(range(40))
    for question in range(8):
        world.submit([*document, 200 + question], 3)
    world.run()
    chunks = [cut for forward in world.backend.forwards for cut in forward if cut[1] == BLOCK]
    assert sorted(chunks) == [(begin, BLOCK) for begin in range(0, 40, BLOCK)]
    cached = [each.usage().cached_tokens for each in world.sequences]
    assert cached == [0] + [40] * 7


def test_prefill_and_decode_alternate() -> None:
    world = World(pool_blocks=64)
    world.submit([1], 12)
    world.step()
    world.submit(list(range(41)), 1)
    kinds = []
    while not world.done:
        assert world.step()
        kinds.append("decode" if world.backend.forwards[-1][0][1] == 1 else "prefill")
    assert "prefill prefill" not in " ".join(kinds)
    assert "decode decode" not in " ".join(kinds[:20])


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1])
def test_cuts_are_whole_blocks_then_one_tail(length: int) -> None:
    world = World(pool_blocks=8)
    world.submit(list(range(length)), 2)
    world.run()
    whole = (length - 1) // BLOCK
    cuts = [(index * BLOCK, BLOCK) for index in range(whole)]
    cuts += [(whole * BLOCK, length - whole * BLOCK), (length, 1)]
    assert [cut for forward in world.backend.forwards for cut in forward] == cuts


def test_the_oldest_is_never_preempted_and_the_youngest_loses_nothing() -> None:
    world = World(pool_blocks=7)
    old = world.submit(list(range(6)), 16)
    young = world.submit(list(range(100, 106)), 16)
    finished = []
    while len(finished) < 2:
        assert world.step()
        assert old.phase is not Phase.WAITING
        finished = world.done
    assert finished == [old, young]
    assert world.scheduler.counters.preemptions > 0
    world.check(old)
    world.check(young)


def test_a_cancelled_load_keeps_its_blocks_until_it_ends() -> None:
    world = World(pool_blocks=4, stored={})
    sequence = world.submit(list(range(13)), 1)
    assert world.scheduler.plan() is None
    (load,) = world.scheduler.take_loads()
    world.scheduler.finish(sequence)
    assert world.pool.available == 1
    world.scheduler.load_done(load, 0)
    assert world.pool.available == 4
    world.scheduler.check_integrity()
    assert world.scheduler.plan() is None


def test_urgent_first_then_in_the_order_of_arrival() -> None:
    world = World(64, max_batch=1)
    submitted = [world.submit([1, 2, 3, 4, 5], 2, priority) for priority in (0, 5, 0, -1)]
    while world.step():
        pass
    assert [submitted.index(each) for each in world.done] == [3, 0, 2, 1]
