"""A token's KV and logits have the same bits however the work was cut.

The reference computes each sequence alone, token by token, on one thread. Everything else must
agree with it bit for bit: chunks of any size, batches in any order, any number of threads, and any
mix of loaded and computed blocks.
"""

from __future__ import annotations

import random

import pytest
import torch

from mooncake_serve._store import cpu
from mooncake_serve.engine.native import NativeBackend
from tests.kernels.tiny import (
    BLOCK_TOKENS,
    CONFIGS,
    Sequence,
    advance,
    kv_bytes,
    native,
    sequences,
)

FAST = [isa for isa in cpu.ISAS if isa != "portable"]
"""The portable unit is slow; `test_units_without_bf16_arithmetic_agree` ties it to the others."""

CUTS = (1, 2, 15, 16, 17, 31, 32, 33, 37, 64, 100, 255, 256, 257)
LENGTHS = [1, 31, 37, 255, 256, 257, 300, 523]

Bits = tuple[list[bytes], dict[int, torch.Tensor]]


def reference(backend: NativeBackend, lengths: list[int], seed: int) -> list[Bits]:
    """KV and logits of every position, computed alone and token by token."""
    seqs = sequences(lengths, seed)
    backend.allocate_pool(sum(len(seq.table) for seq in seqs))
    for seq in seqs:
        while seq.left:
            advance(backend, [(seq, 1)])
    return [(kv_bytes(backend, seq), seq.logits) for seq in seqs]


def random_schedule(backend: NativeBackend, seqs: list[Sequence], rng: random.Random) -> None:
    """Random members, order and chunk sizes in every forward, until all is computed."""
    while waiting := [seq for seq in seqs if seq.left]:
        members = rng.sample(waiting, rng.randint(1, len(waiting)))
        advance(backend, [(seq, min(seq.left, rng.choice(CUTS))) for seq in members])


def assert_same(backend: NativeBackend, seqs: list[Sequence], expected: list[Bits]) -> None:
    for index, (seq, (blocks, logits)) in enumerate(zip(seqs, expected, strict=True)):
        assert kv_bytes(backend, seq) == blocks, f"KV of sequence {index}"
        for position, row in seq.logits.items():
            assert torch.equal(row, logits[position]), f"logits of {index} at {position}"


@pytest.mark.parametrize("isa", FAST)
def test_any_cut_and_batch(isa: str) -> None:
    expected = reference(native(isa=isa), LENGTHS, seed=1)
    for threads in (1, 2, 3, 4):
        backend = native(isa=isa, threads=threads)
        seqs = sequences(LENGTHS, seed=threads)
        backend.allocate_pool(sum(len(seq.table) for seq in seqs))
        random_schedule(backend, seqs, random.Random(threads))
        assert_same(backend, seqs, expected)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "llama-tied"])
def test_every_kind_of_model(name: str) -> None:
    expected = reference(native(name), [40, 290], seed=1)
    backend = native(name, threads=2)
    for seed in range(3):
        seqs = sequences([40, 290], seed)
        backend.allocate_pool(sum(len(seq.table) for seq in seqs))
        random_schedule(backend, seqs, random.Random(seed))
        assert_same(backend, seqs, expected)


@pytest.mark.parametrize("isa", FAST)
def test_batches_of_1_to_40_in_any_order(isa: str) -> None:
    lengths = [33 + index % 7 for index in range(40)]
    expected = reference(native(isa=isa), lengths, seed=1)
    backend = native(isa=isa, threads=2)
    for batch in (1, 2, 15, 16, 17, 33, 40):
        rng = random.Random(batch)
        seqs = sequences(lengths, seed=batch)
        backend.allocate_pool(sum(len(seq.table) for seq in seqs))
        chosen = rng.sample(range(40), batch)
        members = [seqs[index] for index in chosen]
        advance(backend, [(seq, 30) for seq in members])
        while any(seq.left for seq in members):
            advance(backend, [(seq, 1) for seq in members if seq.left])
        assert_same(backend, members, [expected[index] for index in chosen])


@pytest.mark.parametrize("isa", FAST)
def test_loaded_and_computed_blocks_mix(isa: str) -> None:
    """Any leading blocks come from the reference's bytes, the rest is computed."""
    length = 400
    ((blocks, logits),) = reference(native(isa=isa), [length], seed=1)
    backend = native(isa=isa, threads=2)
    for loaded in (1, 3, 7, 8, 11):
        (seq,) = sequences([length], seed=loaded)
        backend.allocate_pool(len(seq.table))
        for block, data in zip(seq.table[:loaded], blocks, strict=False):
            backend.write_block(block, memoryview(data))
        seq.length = loaded * BLOCK_TOKENS
        random_schedule(backend, [seq], random.Random(loaded))
        assert_same(backend, [seq], [(blocks, logits)])


def test_a_preempted_sequence_resumes_with_the_same_bits() -> None:
    """Its blocks are saved in the middle of one, reused by others, and restored elsewhere."""
    ((blocks, logits),) = reference(native(), [300], seed=1)
    backend = native(threads=2)
    (seq,) = sequences([300], seed=1)
    (other,) = sequences([300], seed=2)
    other.tokens.reverse()
    backend.allocate_pool(2 * len(seq.table))
    advance(backend, [(seq, 211)])
    saved = kv_bytes(backend, seq)
    advance(backend, [(other, 300)])
    seq.table = list(range(len(seq.table), 2 * len(seq.table)))
    for block, data in zip(seq.table, saved, strict=True):
        backend.write_block(block, memoryview(data))
    random_schedule(backend, [seq], random.Random(3))
    # The block that was cut short kept stale bytes past its end; they are overwritten by now.
    assert [kv[:1] for kv in kv_bytes(backend, seq)] == [kv[:1] for kv in blocks]
    assert torch.equal(seq.logits[299], logits[299])


@pytest.mark.parametrize("isa", FAST)
def test_stale_bytes_of_a_reused_block_never_show(isa: str) -> None:
    """Even infinities and NaNs of whoever had the block before."""
    expected = reference(native(isa=isa), [270], seed=1)
    backend = native(isa=isa)
    (seq,) = sequences([270], seed=1)
    backend.allocate_pool(len(seq.table))
    size = backend.layout.block_bytes
    for block, poison in enumerate((b"\xff\xff", b"\x80\x7f", b"\x80\xff") * 3):
        backend.write_block(block, memoryview(poison * (size // 2)))
    random_schedule(backend, [seq], random.Random(5))
    for position, row in seq.logits.items():
        assert torch.equal(row, expected[0][1][position])


def test_units_without_bf16_arithmetic_agree() -> None:
    """AVX-512, AVX2 and the portable oracle: the same operations in the same order."""
    plain = [isa for isa in cpu.ISAS if isa in ("portable", "avx2", "avx512")]
    for name in ("llama-dim80", "qwen3-dim128"):
        results = [reference(native(name, isa=isa), [70, 261], seed=1) for isa in plain]
        for other in results[1:]:
            for (blocks, logits), (other_blocks, other_logits) in zip(
                results[0], other, strict=True
            ):
                assert blocks == other_blocks
                assert all(torch.equal(logits[at], other_logits[at]) for at in logits)


def test_numerics_id_tells_kernels_apart() -> None:
    ids = {native(isa=isa).numerics_id for isa in cpu.ISAS}
    assert len(ids) == len(cpu.ISAS)
    assert native(threads=1).numerics_id == native(threads=3).numerics_id
    assert native("llama-linear").numerics_id != native("llama-tied").numerics_id
    assert all(cpu.FINGERPRINT in numerics_id for numerics_id in ids)
