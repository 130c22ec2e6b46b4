"""The extension's codecs through Python: every bit back, damage refused."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_serve import codec
from mooncake_serve._store import BlockShape
from mooncake_serve.codec import Shape
from tests.codec.blocks import DTYPES, model_like, noise

CODECS = ("none", "fast", "dense", "zstd")


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "channels"), [(1, 1), (3, 70), (64, 96), (17, 65)])
def test_every_codec_gives_back_every_bit(name: str, dtype: str, tokens: int, channels: int):
    shape = Shape(dtype, 3, tokens, channels)
    for block in (model_like(shape, 1), noise(shape, 2), bytes(shape.nbytes)):
        container = codec.encode(block, name, shape)
        assert codec.decode(container) == block
        assert codec.inspect(container)[0] == shape


def test_codecs_gain_on_values_and_never_cost_on_noise():
    shape = Shape("bfloat16", 8, 256, 192)
    sizes = {name: len(codec.encode(model_like(shape, 3), name, shape)) for name in CODECS}
    assert sizes["dense"] < sizes["zstd"] < sizes["fast"] < 0.75 * sizes["none"]
    raw = codec.encode(noise(shape, 4), "none", shape)
    assert all(len(codec.encode(noise(shape, 4), name, shape)) == len(raw) for name in CODECS)


def test_numpy_arrays_are_coded_in_place():
    shape = Shape("float32", 2, 16, 24)
    values = np.random.default_rng(5).normal(size=shape[1:]).astype(np.float32)
    out = np.empty_like(values)
    assert codec.decode_into(codec.encode(values, "fast", shape), out) == shape
    assert np.array_equal(out, values)


def test_the_stores_shape_is_a_shape():
    shape = BlockShape("bfloat16", 2, 16, 24)
    block = noise(Shape("bfloat16", 2, 16, 24), 6)
    assert codec.decode(codec.encode(block, "dense", shape)) == block


def test_planes_carry_the_checksum_of_their_raw_bytes():
    shape = Shape("bfloat16", 4, 64, 64)
    block = model_like(shape, 7)
    _, planes = codec.inspect(codec.encode(block, "dense", shape))
    size = shape.plane_nbytes
    sums = [codec.checksum(block[i * size : (i + 1) * size]) for i in range(shape.planes)]
    assert [plane.checksum for plane in planes] == sums
    assert {plane.codec for plane in planes} == {"dense"}


@pytest.mark.parametrize("name", CODECS)
def test_a_flipped_bit_is_never_another_block(name: str):
    shape = Shape("bfloat16", 2, 32, 48)
    block = model_like(shape, 8)
    container = codec.encode(block, name, shape)
    rng = np.random.default_rng(9)
    for at in rng.integers(len(container), size=300):
        damaged = bytearray(container)
        damaged[at] ^= 1 << int(rng.integers(8))
        try:
            assert codec.decode(damaged) == block
        except ValueError:
            continue


def test_wrong_arguments_say_what_is_right():
    shape = Shape("bfloat16", 1, 4, 4)
    block = bytes(shape.nbytes)
    with pytest.raises(ValueError, match="codec is one of"):
        codec.encode(block, "gzip", shape)
    with pytest.raises(ValueError, match="dtype is one of"):
        codec.encode(block, "fast", Shape("int4", 1, 4, 4))
    with pytest.raises(ValueError, match="31 bytes, the block needs 32"):
        codec.encode(block[:-1], "fast", shape)
    with pytest.raises(ValueError, match="at most 65536 planes"):
        codec.encode(b"", "fast", Shape("bfloat16", 0, 4, 4))
    container = codec.encode(block, "fast", shape)
    with pytest.raises(BufferError, match="writable"):
        codec.decode_into(container, bytes(shape.nbytes))
    with pytest.raises(BufferError, match="contiguous"):
        codec.decode_into(container, np.zeros(2 * shape.nbytes, np.uint8)[::2])
