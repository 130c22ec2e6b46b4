"""Containers of the `none` and `zstd` codecs in Python: numpy and zstandard, no extension.

This is the interchange form: it moves blocks between clusters or into an archive, and a machine
without the extension can read them. Either implementation is the other's oracle in the tests.

Each element of a plane is rotated left by one bit, which moves the sign to the bottom, and the
plane is cut into byte planes, low bytes first; the last holds the exponents and becomes a zstd
frame, the others are stored before it. Everything read is checked against the input's own length
and, in the end, its checksum; damage raises ValueError.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
import zstandard
from numpy.typing import NDArray
from typing_extensions import Buffer

from mooncake_serve.codec.shape import DTYPE_BYTES, PlaneEntry, Shape

MAGIC: Final = b"MKVB"
VERSION: Final = 1
DTYPES: Final = tuple(DTYPE_BYTES)
CODECS: Final = ("none", "fast", "dense", "zstd")
NONE, ZSTD = 0, 3
LEVEL: Final = 1

FIXED: Final = struct.Struct("<4sHBxIII12xQ24x")
"""Magic, version, dtype, planes, tokens, channels, checksum of header and table."""
ENTRY: Final = struct.Struct("<QIB3xQ")
"""Offset, bytes, codec, checksum of the raw plane."""
SELF_SUM: Final = slice(32, 40)
ALIGN: Final = 64
PLANES_MAX: Final = 1 << 16
RAW_MAX: Final = (1 << 32) - 1

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def write(block: Buffer, shape: Shape) -> bytes:
    """The container of `block` under the zstd codec; planes that gain under 3 % stay raw."""
    raw = np.frombuffer(memoryview(block), np.uint8)
    _check_shape(shape)
    if raw.nbytes != shape.nbytes:
        raise ValueError(f"the buffer has {raw.nbytes} bytes, the block needs {shape.nbytes}")
    out = bytearray(_header_nbytes(shape.planes))
    table = []
    for plane in raw.reshape(shape.planes, -1):
        coded = _code(plane, shape)
        keep = coded is not None and _pays(len(coded), plane.nbytes)
        if keep:
            out += bytes(-len(out) % ALIGN)
        payload = coded if coded is not None and keep else plane.tobytes()
        table.append((len(out), len(payload), ZSTD if keep else NONE, checksum(plane.data)))
        out += payload
    head = len(table)
    out[: FIXED.size] = FIXED.pack(MAGIC, VERSION, DTYPES.index(shape.dtype), *shape[1:], 0)
    for index in range(head):
        ENTRY.pack_into(out, FIXED.size + index * ENTRY.size, *table[index])
    out[SELF_SUM] = checksum(out[: _header_nbytes(shape.planes)]).to_bytes(8, "little")
    return bytes(out)


def read(container: Buffer) -> tuple[Shape, bytes]:
    """Shape and verified bytes of a block under `none` or `zstd`."""
    view = memoryview(container).cast("B")
    shape, planes = inspect(view)
    out = bytearray()
    for index, plane in enumerate(planes):
        coded = view[plane.offset : plane.offset + plane.nbytes]
        raw = _decode(coded, plane.codec, shape)
        if checksum(raw) != plane.checksum:
            raise ValueError(f"plane {index} does not match its checksum")
        out += raw
    return shape, bytes(out)


def inspect(container: Buffer) -> tuple[Shape, list[PlaneEntry]]:
    """Shape and plane table of any container."""
    view = memoryview(container).cast("B")
    if len(view) < FIXED.size:
        raise ValueError("not a block container: too short")
    magic, version, dtype, planes, tokens, channels, header_sum = FIXED.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise ValueError(f"not a block container of version {VERSION}")
    if dtype >= len(DTYPES):
        raise ValueError("damaged container header: dtype")
    shape = Shape(DTYPES[dtype], planes, tokens, channels)
    _check_shape(shape)
    head = bytearray(view[: _header_nbytes(planes)])
    if len(head) < _header_nbytes(planes):
        raise ValueError("damaged container header: truncated")
    head[SELF_SUM] = bytes(8)
    if checksum(head) != header_sum:
        raise ValueError("damaged container header: checksum")
    table = []
    end = len(head)
    for index in range(planes):
        offset, nbytes, codec, plane_sum = ENTRY.unpack_from(view, FIXED.size + index * ENTRY.size)
        if codec >= len(CODECS):
            raise ValueError(f"unknown codec {codec}")
        if offset < end or offset + nbytes > len(view):
            raise ValueError("damaged container header: plane outside the container")
        end = offset + nbytes
        table.append(PlaneEntry(CODECS[codec], offset, nbytes, plane_sum))
    return shape, table


def _header_nbytes(planes: int) -> int:
    return -(-(FIXED.size + planes * ENTRY.size) // ALIGN) * ALIGN


def _check_shape(shape: Shape) -> None:
    if not (0 < shape.nbytes <= RAW_MAX and shape.planes <= PLANES_MAX):
        raise ValueError("a block must have 1 byte to 4 GiB in at most 65536 planes")


def _pays(coded: int, raw: int) -> bool:
    return coded + ALIGN + raw * 3 // 100 <= raw


def _code(plane: NDArray[np.uint8], shape: Shape) -> bytes | None:
    if shape.dtype == "opaque":
        return None
    size = DTYPE_BYTES[shape.dtype]
    words = plane.view(_WORDS[size])
    turned = (words << 1) | (words >> (8 * size - 1))
    planes = turned.view(np.uint8).reshape(-1, size).T
    frame = zstandard.ZstdCompressor(level=LEVEL).compress(planes[-1].tobytes())
    return planes[:-1].tobytes() + frame


def _decode(coded: memoryview, codec: str, shape: Shape) -> bytes:
    if codec == "none":
        if len(coded) != shape.plane_nbytes:
            raise ValueError("damaged container header: raw plane of another length")
        return bytes(coded)
    if codec != "zstd" or shape.dtype == "opaque":
        raise ValueError(
            f"this reader knows the codecs none and zstd, not {codec}; use the extension"
        )
    size, count = DTYPE_BYTES[shape.dtype], shape.tokens * shape.channels
    stored = (size - 1) * count
    try:
        # Bounded whatever the frame says about its own size.
        stream = zstandard.ZstdDecompressor().stream_reader(coded[stored:])
        top = stream.read(count + 1)
    except zstandard.ZstdError as err:
        raise ValueError(f"damaged zstd frame: {err}") from err
    if len(coded) < stored or len(top) != count:
        raise ValueError("damaged zstd plane: wrong length")
    planes = np.frombuffer(bytes(coded[:stored]) + top, np.uint8).reshape(size, count)
    turned = np.ascontiguousarray(planes.T).view(_WORDS[size]).reshape(-1)
    words = (turned >> 1) | (turned << (8 * size - 1))
    return words.tobytes()


_LANES, _STRIPE, _ROWS = 8, 64, 16
_MASK = (1 << 64) - 1


def _key_schedule() -> NDArray[np.uint64]:
    """Splitmix64 from the format's seed."""
    keys, state = [], 0x6D6F_6F6E_6361_6B65
    for _ in range((_ROWS + 1) * _LANES):
        state = (state + 0x9E37_79B9_7F4A_7C15) & _MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
        keys.append(z ^ (z >> 31))
    return np.array(keys, np.uint64).reshape(_ROWS + 1, _LANES)


_KEYS = _key_schedule()


def checksum(data: Buffer) -> int:
    """The 64-bit checksum containers hold of each raw plane: stripes of 64 bytes over 8 lanes."""
    raw = np.frombuffer(memoryview(data), np.uint8)
    padded = np.zeros(-(-raw.nbytes // _STRIPE) * _STRIPE, np.uint8)
    padded[: raw.nbytes] = raw
    stripes = padded.view("<u8").reshape(-1, _LANES)
    lanes = _KEYS[_ROWS].copy()
    for first in range(0, len(stripes), _ROWS):
        rows = stripes[first : first + _ROWS]
        mixed = rows ^ _KEYS[: len(rows)]
        product = (mixed & np.uint64(0xFFFF_FFFF)) * (mixed >> np.uint64(32))
        swapped = rows.reshape(-1, _LANES // 2, 2)[:, :, ::-1].reshape(-1, _LANES)
        lanes += (product + swapped).sum(axis=0, dtype=np.uint64)
        if len(rows) == _ROWS:
            lanes = (lanes ^ (lanes >> np.uint64(47)) ^ _KEYS[_ROWS]) * np.uint64(0x9E37_79B1)
    return _finish([int(lane) for lane in lanes], raw.nbytes)


def _finish(lanes: list[int], nbytes: int) -> int:
    total = nbytes * 0x9E37_79B1_85EB_CA87
    for pair in range(_LANES // 2):
        left = lanes[2 * pair] ^ int(_KEYS[pair, 0])
        right = lanes[2 * pair + 1] ^ int(_KEYS[pair, 1])
        product = left * right
        total += (product ^ (product >> 64)) & _MASK
    total &= _MASK
    total ^= total >> 37
    total = (total * 0x1656_6791_9E37_79F9) & _MASK
    return total ^ (total >> 32)
