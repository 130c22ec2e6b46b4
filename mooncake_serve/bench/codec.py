"""`mooncake-serve bench codec`: ratio and rates of the codecs on real KV, beside memcpy and peers.

The unit is one (layer, K|V) plane of a block, for every codec. Ours run in a loop in Rust over
more planes than a cache holds, copy, encode and decode of all planes in turn, medians per plane;
encoding includes the checksum of the raw bytes and decoding its verification. `ratio` counts all
that a container stores for a plane, its table entry and padding included. No codec is calibrated
beforehand: each plane carries its own model, so files named by `--calibrate` change no figure; they
are only kept out of what is measured. `--kv` names safetensors files (see `kv_file`); without it
`--model` is run on prose, code and JSON, and on prose once more in float32, from which the other
element types are rounded. Random bytes come last.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from mooncake_serve import _store
from mooncake_serve.bench import codec_peers, kv_file
from mooncake_serve.bench.kv_file import KVFile
from mooncake_serve.bench.report import emit, machine, progress, version
from mooncake_serve.config import ModelConfig

OURS = ("fast", "dense", "zstd")
RANDOM = "random bytes"
ALIGN, TABLE_ENTRY = 64, 24
WORKING_SET = 384 << 20
QUICK_WORKING_SET = 96 << 20


def main(argv: list[str] | None = None) -> int:
    """Entry of `mooncake-serve bench codec` and of `python -m mooncake_serve.bench.codec`."""
    parser = argparse.ArgumentParser(prog="mooncake-serve bench codec", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object (the default)")
    parser.add_argument("--quick", action="store_true", help="less data, within a minute")
    parser.add_argument(
        "--kv", nargs="+", action="extend", type=Path, default=[], help="safetensors files of KV"
    )
    parser.add_argument("--model", default=ModelConfig().id, help="whose KV, without --kv")
    parser.add_argument(
        "--calibrate", nargs="+", action="extend", type=Path, default=[], help="never measured"
    )
    parser.add_argument("--block-tokens", type=int, default=256)
    parser.add_argument("--no-peers", action="store_true", help="measure our codecs only")
    options = parser.parse_args(argv)
    try:
        emit(measure(options))
    except (OSError, ValueError) as err:
        sys.stderr.write(f"bench codec: {err}\n")
        return 1
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything; the object that `--json` prints."""
    codec: Any = _store.codec
    files = _files(options)
    result: dict[str, Any] = {
        "machine": machine(),
        "version": version(),
        "runs": 1,
        "isa": codec.use_isa(),
        "block_tokens": options.block_tokens,
        "calibration": None,
        "files": [],
    }
    copies = []
    for file in files:
        progress(f"{file.name}: {len(file.blocks)} blocks of {file.shape}")
        codecs, rates = _ours(codec, file, options.quick)
        copies += rates
        why: dict[str, str] = {}
        if not options.no_peers and file.shape.dtype == "bfloat16" and file.name != RANDOM:
            planes = file.blocks.reshape(-1, file.shape.plane_nbytes)
            most = file.shape.planes * (1 if options.quick else 2)
            codecs |= codec_peers.measure(planes[:most], file.shape.dtype, 3)
            why = codecs.pop("why")
        entry = {"file": file.name, "dtype": file.shape.dtype, "codecs": codecs, "why": why}
        result["files"].append(entry)
    result["memcpy_gb_s"] = float(np.median(copies))
    result["why"] = {"calibration": "each plane carries its own model, and is charged for it"}
    return result


def _files(options: argparse.Namespace) -> list[KVFile]:
    """What to measure. ValueError when a file is also one to calibrate from."""
    held_out = {path.resolve() for path in options.calibrate}
    for path in options.kv:
        if path.resolve() in held_out:
            raise ValueError(f"{path} is to be measured and to calibrate from; name another text")
    if options.kv:
        files = [kv_file.read(path, options.block_tokens) for path in options.kv]
    else:
        with tempfile.TemporaryDirectory() as scratch:
            blocks = 2 if options.quick else 6
            made = kv_file.capture_texts(Path(scratch), options.model, options.block_tokens, blocks)
            files = [kv_file.read(path, options.block_tokens) for path in made]
    first = files[0]
    noise = np.random.default_rng(0).integers(0, 256, first.blocks.shape).astype(np.uint8)
    return [*files, KVFile(RANDOM, first.shape, noise)]


def _ours(codec: Any, file: KVFile, quick: bool) -> tuple[dict[str, Any], list[float]]:
    repeats = -(-(QUICK_WORKING_SET if quick else WORKING_SET) // file.blocks.nbytes)
    data = np.tile(file.blocks, (repeats, 1, 1))
    best = codec.use_isa()
    runs = [(name, name, best) for name in OURS]
    if best == "avx512":
        runs += [(f"{name}_avx2", name, "avx2") for name in ("fast", "dense")]
    codecs, copies = {}, []
    for label, name, isa in runs:
        progress(f"{file.name}: {label}")
        codec.use_isa(isa)
        rates, copy = _rates(codec, name, file, data, 3 if quick else 5)
        codec.use_isa(best)
        codecs[label] = rates
        copies.append(copy)
    return codecs, copies


def _rates(
    codec: Any, name: str, file: KVFile, data: np.ndarray, rounds: int
) -> tuple[dict[str, float], float]:
    copy, encode, decode, sizes = codec.rates(data, name, tuple(file.shape), rounds)
    stored = -(-np.array(sizes, np.int64) // ALIGN) * ALIGN + TABLE_ENTRY
    raw, half = data.nbytes, data.nbytes / 2
    rates = {
        "ratio": float(stored.sum()) / raw,
        "ratio_k": float(stored[0::2].sum()) / half,
        "ratio_v": float(stored[1::2].sum()) / half,
        "encode_gb_s": raw / encode / 1e9,
        "decode_gb_s": raw / decode / 1e9,
        "memcpy_gb_s": raw / copy / 1e9,
    }
    return rates, raw / copy / 1e9


if __name__ == "__main__":
    raise SystemExit(main())
