"""What a container says about its block."""

from __future__ import annotations

from typing import NamedTuple

DTYPE_BYTES = {
    "opaque": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Bytes of an element; the order is that of the numbers in a container."""


class Shape(NamedTuple):
    """`planes` by `tokens` by `channels` elements of `dtype`, planes contiguous."""

    dtype: str
    planes: int
    tokens: int
    channels: int

    @property
    def plane_nbytes(self) -> int:
        """Bytes of one raw plane."""
        return self.tokens * self.channels * DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of the raw block."""
        return self.planes * self.plane_nbytes


class PlaneEntry(NamedTuple):
    """Where a plane lies in its container, how it is coded, and the checksum of its raw bytes."""

    codec: str
    offset: int
    nbytes: int
    checksum: int
