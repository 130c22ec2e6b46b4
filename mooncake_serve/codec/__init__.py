"""Lossless coding of KV blocks: containers made and read by the Rust extension.

A container holds a block plane by plane (one per layer and K or V), each under a checksum of its
raw bytes, so what `decode_into` returns is what was encoded or an error. Codecs:

- `none`: the block as it is;
- `fast`: decodes at memory speed, about 30 % smaller for bfloat16;
- `dense`: best ratio, about 35 % smaller for bfloat16;
- `zstd`: portable; `mooncake_serve.codec.portable` reads and writes it without the extension.

A plane that would gain less than 3 % stays raw. Damaged containers and unknown names raise
ValueError, other buffers than contiguous ones BufferError.
"""

from __future__ import annotations

from typing import Any, Protocol

from typing_extensions import Buffer

from mooncake_serve.codec.shape import DTYPE_BYTES, PlaneEntry, Shape

__all__ = [
    "DTYPE_BYTES",
    "PlaneEntry",
    "Shape",
    "checksum",
    "decode",
    "decode_into",
    "encode",
    "inspect",
]


class _ShapeLike(Protocol):
    """`Shape`, or the store's `BlockShape`."""

    @property
    def dtype(self) -> str: ...
    @property
    def planes(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def channels(self) -> int: ...


def _codec() -> Any:
    """The extension's submodule; imported late, so that `portable` works without it."""
    from mooncake_serve import _store

    return _store.codec


def encode(block: Buffer, codec: str, shape: _ShapeLike) -> bytearray:
    """The container of `block`: `planes` by `tokens` by `channels` elements, contiguous."""
    plain = (shape.dtype, shape.planes, shape.tokens, shape.channels)
    return _codec().encode(block, codec, plain)


def decode_into(container: Buffer, out: Buffer) -> Shape:
    """Decode into a writable buffer of the block's size, verified; on error it holds garbage."""
    return Shape(*_codec().decode_into(container, out))


def decode(container: Buffer) -> bytearray:
    """The raw bytes of the block."""
    shape, _ = inspect(container)
    out = bytearray(shape.nbytes)
    decode_into(container, out)
    return out


def inspect(container: Buffer) -> tuple[Shape, list[PlaneEntry]]:
    """Shape and plane table of a container, without decoding it."""
    shape, planes = _codec().inspect(container)
    return Shape(*shape), [PlaneEntry(*plane) for plane in planes]


def checksum(data: Buffer) -> int:
    """The 64-bit checksum that containers hold of each raw plane."""
    return _codec().checksum(data)
