"""Blocks to code."""

from __future__ import annotations

import numpy as np

from mooncake_serve.codec import DTYPE_BYTES, Shape

DTYPES = tuple(DTYPE_BYTES)


def model_like(shape: Shape, seed: int) -> bytes:
    """Values with a scale per channel, as the top bytes of float32 of the dtype's size."""
    rng = np.random.default_rng(seed)
    scale = rng.uniform(0.1, 4.0, shape.channels)
    values = rng.normal(size=(shape.planes, shape.tokens, shape.channels)) * scale
    if shape.dtype == "float16":
        return values.astype("<f2").tobytes()
    words = values.astype("<f4").view(np.uint8).reshape(-1, 4)
    return words[:, 4 - DTYPE_BYTES[shape.dtype] :].tobytes()


def noise(shape: Shape, seed: int) -> bytes:
    """Random bytes."""
    return np.random.default_rng(seed).bytes(shape.nbytes)
