"""KV of a model's layers in safetensors files, as the codec's benchmark reads it.

Tensors `layer.{i}.k` and `layer.{i}.v`, each `[tokens, kv_heads, head_dim]`, keys after rotary
embedding. Read without torch, so any dtype comes as its bytes; written by `capture` from a model.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_serve.bench.report import progress
from mooncake_serve.codec import Shape
from mooncake_serve.config import ModelConfig

_DTYPES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}


@dataclass(frozen=True)
class KVFile:
    """Whole blocks of a file: bytes in the store's order, `[block][layer][K|V][token][channel]`."""

    name: str
    shape: Shape
    """Of one block: 2 planes a layer, K and V in turn."""
    blocks: NDArray[np.uint8]
    """`[blocks, planes, bytes of a plane]`."""


def read(path: Path, block_tokens: int) -> KVFile:
    """The file's whole blocks; ValueError when it holds something else, or less than one."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.tell()
    layers = sum(name.startswith("layer.") and name.endswith(".k") for name in header)
    if layers == 0:
        raise ValueError(f"{path}: no tensors layer.0.k, layer.0.v, …; see `capture`")
    first = header["layer.0.k"]
    tokens, heads, head_dim = first["shape"]
    dtype = _DTYPES.get(first["dtype"])
    if dtype is None:
        raise ValueError(f"{path}: dtype {first['dtype']}; expected one of {', '.join(_DTYPES)}")
    shape = Shape(dtype, 2 * layers, block_tokens, heads * head_dim)
    count = tokens // block_tokens
    if count == 0:
        raise ValueError(f"{path}: {tokens} tokens are less than a block of {block_tokens}")
    blocks = np.empty((count, shape.planes, shape.plane_nbytes), np.uint8)
    source = np.memmap(path, np.uint8, "r")
    for plane in range(shape.planes):
        entry = header[f"layer.{plane // 2}.{'kv'[plane % 2]}"]
        if entry["shape"] != first["shape"] or entry["dtype"] != first["dtype"]:
            raise ValueError(f"{path}: layer {plane // 2} differs from layer 0 in shape or dtype")
        start = data + entry["data_offsets"][0]
        whole = source[start : start + count * shape.plane_nbytes]
        blocks[:, plane] = whole.reshape(count, -1)
    return KVFile(path.name, shape, blocks)


def capture(model: Any, tokens: list[int], block_tokens: int, path: Path) -> None:
    """Prefill block by block, as the engine does, and write what the cache holds."""
    import torch
    from safetensors.torch import save_file
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    with torch.inference_mode():
        for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
            block = torch.tensor([tokens[start : start + block_tokens]], device=model.device)
            model(block, past_key_values=cache, use_cache=True)
    tensors = {}
    for index, layer in enumerate(cache.layers):
        for kind, states in (("k", layer.keys), ("v", layer.values)):
            tensors[f"layer.{index}.{kind}"] = states[0].transpose(0, 1).contiguous().cpu()
    save_file(tensors, path)


def capture_texts(folder: Path, model: str, block_tokens: int, blocks: int) -> list[Path]:
    """KV of a model on three kinds of text that every Python carries, and in other element types.

    float32 is what the model computes in that type; float16 and both 8-bit floats are rounded from
    it, as an engine that keeps such a cache does.
    """
    import argparse
    from pydoc_data.topics import topics

    rows = [{"id": i, "name": f"row {i}", "value": i * i % 97} for i in range(2000)]
    texts = {
        "prose": "\n".join(topics.values()),
        "code": inspect.getsource(argparse),
        "json": json.dumps(rows),
    }
    bf16 = ModelConfig(id=model)
    paths = _capture_all(folder, bf16, texts, block_tokens, blocks)
    wide = ModelConfig(id=model, dtype="float32")
    (exact,) = _capture_all(folder, wide, {"prose-float32": texts["prose"]}, block_tokens, 1)
    return [*paths, exact, *_rounded(exact)]


def _capture_all(
    folder: Path, config: ModelConfig, texts: dict[str, str], block_tokens: int, blocks: int
) -> list[Path]:
    from mooncake_serve.models import load_model, load_tokenizer

    progress(f"prefilling {config.id} in {config.dtype} on {', '.join(texts)}")
    model, tokenizer = load_model(config, "cpu").model, load_tokenizer(config)
    paths = []
    for name, text in texts.items():
        paths.append(folder / f"{name}.safetensors")
        tokens = tokenizer.encode(text[: 20 * block_tokens * blocks])
        capture(model, tokens[: block_tokens * blocks], block_tokens, paths[-1])
    return paths


def _rounded(path: Path) -> list[Path]:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    paths = []
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        name = str(dtype).removeprefix("torch.")
        paths.append(path.with_name(f"prose-{name}.safetensors"))
        save_file({key: each.to(dtype) for key, each in tensors.items()}, paths[-1])
    return paths
