"""The extension and the Python implementation of the zstd container are each other's oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_serve import codec
from mooncake_serve.codec import Shape, portable
from tests.codec.blocks import DTYPES, model_like, noise

shapes = st.builds(
    Shape, st.sampled_from(DTYPES), st.integers(1, 3), st.integers(1, 80), st.integers(1, 100)
)


@given(st.binary(max_size=5000))
def test_checksums_agree(data: bytes):
    assert portable.checksum(data) == codec.checksum(data)


@given(shapes, st.integers(0, 1 << 32), st.booleans())
def test_each_reads_what_the_other_wrote(shape: Shape, seed: int, random: bool):
    block = noise(shape, seed) if random else model_like(shape, seed)
    assert codec.decode(portable.write(block, shape)) == block
    for name in ("none", "zstd"):
        assert portable.read(codec.encode(block, name, shape)) == (shape, block)


@given(shapes, st.integers(0, 1 << 32))
def test_tables_agree(shape: Shape, seed: int):
    container = codec.encode(model_like(shape, seed), "dense", shape)
    assert portable.inspect(container) == codec.inspect(container)


def test_the_other_codecs_are_refused_by_name():
    shape = Shape("bfloat16", 1, 256, 192)
    container = codec.encode(model_like(shape, 1), "dense", shape)
    with pytest.raises(ValueError, match="not dense; use the extension"):
        portable.read(container)


def test_damage_is_refused():
    shape = Shape("bfloat16", 2, 64, 48)
    block = model_like(shape, 2)
    container = portable.write(block, shape)
    rng = np.random.default_rng(3)
    for at in rng.integers(len(container), size=200):
        damaged = bytearray(container)
        damaged[at] ^= 1 << int(rng.integers(8))
        try:
            assert portable.read(damaged) == (shape, block)
        except ValueError:
            continue
    for length in range(0, len(container), 97):
        with pytest.raises(ValueError, match=r"container|zstd"):
            portable.read(container[:length])


def test_a_frame_that_swells_is_not_followed():
    shape = Shape("bfloat16", 1, 64, 64)
    container = bytearray(portable.write(model_like(shape, 4), shape))
    bomb = portable.zstandard.ZstdCompressor().compress(bytes(64 << 20))
    _, (plane,) = portable.inspect(container)
    stored = shape.tokens * shape.channels
    del container[plane.offset + stored :]
    container += bomb
    portable.ENTRY.pack_into(
        container, portable.FIXED.size, plane.offset, stored + len(bomb), 3, plane.checksum
    )
    container[portable.SELF_SUM] = bytes(8)
    head = portable.checksum(container[:128])
    container[portable.SELF_SUM] = head.to_bytes(8, "little")
    with pytest.raises(ValueError, match="wrong length"):
        portable.read(container)
    with pytest.raises(ValueError, match="zstd frame"):
        codec.decode(container)
