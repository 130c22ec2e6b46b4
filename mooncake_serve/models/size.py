"""How much memory a model's weights take, read from the headers of its files."""

from __future__ import annotations

import math
from pathlib import Path

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def weight_bytes(folder: Path, dtype: str) -> int:
    """Bytes of a model folder's weights as `dtype`; 0 while they have not been fetched."""
    from safetensors import safe_open

    values = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as tensors:
            shapes = (tensors.get_slice(name).get_shape() for name in tensors.keys())  # noqa: SIM118
            values += sum(math.prod(shape) for shape in shapes)
    return values * DTYPE_BYTES[dtype]
