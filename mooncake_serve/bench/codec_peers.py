"""Lossless codecs of others, on the same planes: ratio, encode and decode rates.

Each is measured only where it is installed. One thread, one plane at a time, the Python call
included; the round trip is checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

Encode = Callable[[NDArray[np.uint8]], Any]
Decode = Callable[[Any, int], Any]


def measure(planes: NDArray[np.uint8], dtype: str, rounds: int) -> dict[str, Any]:
    """`name: rates`, or `name: None` and the reason under `why`."""
    results: dict[str, Any] = {}
    why: dict[str, str] = {}
    for name, build in PEERS.items():
        try:
            encode, decode, nbytes = build(dtype)
        except ImportError as err:
            results[name], why[name] = None, f"not installed: {err.name}"
            continue
        except ValueError as err:
            results[name], why[name] = None, str(err)
            continue
        results[name] = _rates(planes, encode, decode, nbytes, rounds)
    results["why"] = why
    return results


def _rates(
    planes: NDArray[np.uint8],
    encode: Encode,
    decode: Decode,
    nbytes: Callable[[Any], int],
    rounds: int,
) -> dict[str, float]:
    sizes = np.zeros(len(planes))
    seconds = {"encode": 0.0, "decode": 0.0}
    for index, plane in enumerate(planes):
        coded = encode(plane)
        sizes[index] = nbytes(coded)
        if bytes(decode(coded, plane.nbytes)) != plane.tobytes():
            raise AssertionError("a peer's round trip lost bits")
        seconds["encode"] += _median(lambda plane=plane: encode(plane), rounds)
        seconds["decode"] += _median(
            lambda coded=coded, size=plane.nbytes: decode(coded, size), rounds
        )
    raw = planes.nbytes
    return {
        "ratio": float(sizes.sum()) / raw,
        "ratio_k": float(sizes[0::2].sum()) / (raw / 2),
        "ratio_v": float(sizes[1::2].sum()) / (raw / 2),
        "encode_gb_s": raw / seconds["encode"] / 1e9,
        "decode_gb_s": raw / seconds["decode"] / 1e9,
    }


def _median(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2]


def _zipnn(dtype: str) -> tuple[Encode, Decode, Callable[[Any], int]]:
    if dtype != "bfloat16":
        raise ValueError("measured on bfloat16 only")
    zipnn = import_module("zipnn").ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)
    # It works in place and by reference on some inputs: give it its own copy each time.
    return (
        lambda plane: zipnn.compress(bytearray(plane)),
        lambda coded, _: zipnn.decompress(bytes(coded)),
        len,
    )


def _zstd_planes(dtype: str) -> tuple[Encode, Decode, Callable[[Any], int]]:
    zstandard = import_module("zstandard")
    size = {"bfloat16": 2, "float16": 2, "float32": 4}.get(dtype, 1)
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def decode(coded: list[bytes], _: int) -> bytes:
        parts = [np.frombuffer(decompressor.decompress(part), np.uint8) for part in coded]
        return np.stack(parts, axis=1).tobytes()

    return (
        lambda plane: [compressor.compress(part.tobytes()) for part in plane.reshape(-1, size).T],
        decode,
        lambda coded: sum(map(len, coded)),
    )


def _blosc2(dtype: str) -> tuple[Encode, Decode, Callable[[Any], int]]:
    blosc2 = import_module("blosc2")
    blosc2.set_nthreads(1)
    size = {"bfloat16": 2, "float16": 2, "float32": 4}.get(dtype, 1)
    return (
        lambda plane: blosc2.compress(
            plane.tobytes(), size, 5, blosc2.Filter.BITSHUFFLE, blosc2.Codec.LZ4
        ),
        lambda coded, _: blosc2.decompress(coded),
        len,
    )


def _pcodec(dtype: str) -> tuple[Encode, Decode, Callable[[Any], int]]:
    kind = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}.get(dtype)
    if kind is None:
        raise ValueError("it has no 8-bit numbers")
    pcodec = import_module("pcodec")
    standalone, config = pcodec.standalone, pcodec.ChunkConfig(compression_level=8)
    return (
        lambda plane: standalone.simple_compress(plane.view(kind), config),
        lambda coded, _: standalone.simple_decompress(coded).tobytes(),
        len,
    )


PEERS: dict[str, Callable[[str], tuple[Encode, Decode, Callable[[Any], int]]]] = {
    "zipnn": _zipnn,
    "zstd_planes": _zstd_planes,
    "blosc2": _blosc2,
    "pcodec": _pcodec,
}
