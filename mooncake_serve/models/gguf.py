"""GGUF files: converted once to safetensors, because dequantising takes half a minute.

The converted folder is named by the file's SHA-256 and the dtype, so a changed file converts
anew. Fails with ModelNotFound (no such file) or UnsupportedModel (transformers cannot read it).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mooncake_serve.errors import ModelNotFound, UnsupportedModel
from mooncake_serve.models.cache import cached_folder
from mooncake_serve.progress import shown


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def converted_gguf(path: Path, dtype: str) -> Path:
    """Folder with the model in safetensors, its configuration and its tokenizer."""
    if not path.is_file():
        raise ModelNotFound(f"no GGUF file at {path}; check model.id")
    name = f"models/{path.stem}-{file_sha256(path)[:16]}-{dtype}"

    def convert(folder: Path) -> None:
        with shown(f"converting {path.name} to {dtype}; this happens once"):
            _convert(path, dtype, folder)

    return cached_folder(name, convert)


def _convert(path: Path, dtype: str, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, file = str(path.parent), path.name
    try:
        model = AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=file,
            quantization_config=GgufConfig(dequantize=True),
            dtype=getattr(torch, dtype),
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    except (ValueError, KeyError, NotImplementedError) as err:
        raise UnsupportedModel(
            f"transformers cannot convert {path}: {err}; use a safetensors folder of this model"
        ) from err
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
