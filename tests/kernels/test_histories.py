"""Random histories of a batch: whatever happens to a sequence, its KV and logits keep their bits.

Each history mixes all that may happen: chunks of any size, batches of 1 to 40 in any order, 1 to 4
threads, leading blocks that were loaded, a preemption that starts over, and one that is saved in
the middle of a block and restored elsewhere. The reference computes each sequence alone, token by
token, on one thread. Every instruction set that the machine has is asked to do it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from mooncake_serve._store import cpu
from mooncake_serve.engine.native import NativeBackend
from tests.kernels.test_exactness import CUTS, Bits, reference
from tests.kernels.tiny import BLOCK_TOKENS, Sequence, advance, kv_bytes, native, sequences

ISAS = [isa for isa in cpu.ISAS if isa != "portable"]


@dataclass
class History:
    """One backend's way through many sequences."""

    backend: NativeBackend
    seqs: list[Sequence]
    expected: list[Bits]
    rng: random.Random
    free: list[int]

    def run(self) -> None:
        while waiting := [index for index, seq in enumerate(self.seqs) if seq.left]:
            if self.rng.random() < 0.15:
                self.preempt(self.rng.choice(waiting))
                continue
            members = self.rng.sample(waiting, self.rng.randint(1, len(waiting)))
            work = [
                (self.seqs[index], min(self.seqs[index].left, self.rng.choice(CUTS)))
                for index in members
            ]
            advance(self.backend, work)

    def load(self, index: int) -> None:
        """Leading blocks come as another replica published them."""
        seq = self.seqs[index]
        count = self.rng.randint(0, (len(seq.tokens) - 1) // BLOCK_TOKENS)
        for block, data in zip(seq.table[:count], self.expected[index][0], strict=False):
            self.backend.write_block(block, memoryview(data))
        seq.length = count * BLOCK_TOKENS

    def preempt(self, index: int) -> None:
        """Its blocks go to others; it starts over, or its bytes are restored elsewhere."""
        seq = self.seqs[index]
        saved, old = kv_bytes(self.backend, seq), seq.table
        self.free += old
        self.rng.shuffle(self.free)
        seq.table = [self.free.pop() for _ in old]
        noise = self.rng.randbytes(64) * (self.backend.layout.block_bytes // 64)
        for block in {*old, *seq.table}:
            self.backend.write_block(block, memoryview(noise))
        if self.rng.random() < 0.5:
            seq.length = 0
            return
        for block, data in zip(seq.table, saved, strict=True):
            self.backend.write_block(block, memoryview(data))

    def check(self) -> None:
        for index, (seq, (blocks, logits)) in enumerate(zip(self.seqs, self.expected, strict=True)):
            whole, rest = divmod(len(seq.tokens), BLOCK_TOKENS)
            have = kv_bytes(self.backend, seq)
            assert have[:whole] == blocks[:whole], f"KV of sequence {index}"
            assert rows_of(self.backend, have[whole:], rest) == rows_of(
                self.backend, blocks[whole:], rest
            ), f"KV of the last block of sequence {index}"
            for position, row in seq.logits.items():
                assert row.equal(logits[position]), f"logits of {index} at {position}"


def rows_of(backend: NativeBackend, blocks: list[bytes], rows: int) -> list[bytes]:
    """The first rows of each plane; what lies behind them may be anything."""
    plane = backend.layout.block_bytes // backend.layout.planes
    row = plane // BLOCK_TOKENS
    return [block[at : at + rows * row] for block in blocks for at in range(0, len(block), plane)]


def run_history(isa: str, count: int, longest: int, seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, longest) for _ in range(count)]
    print(f"seed {seed}, {isa}, lengths {lengths}")
    expected = reference(native(isa=isa), lengths, seed=1)
    backend = native(isa=isa, threads=rng.randint(1, 4))
    seqs = sequences(lengths, seed)
    blocks = sum(len(seq.table) for seq in seqs)
    spare = list(range(blocks, blocks + 24))
    backend.allocate_pool(blocks + len(spare))
    history = History(backend, seqs, expected, rng, spare)
    for index in rng.sample(range(count), count // 2):
        history.load(index)
    history.run()
    history.check()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", [1, 2])
def test_short_histories(isa: str, seed: int) -> None:
    run_history(isa, count=8, longest=300, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", range(10, 16))
def test_long_histories(isa: str, seed: int) -> None:
    run_history(isa, count=40, longest=600, seed=seed)
