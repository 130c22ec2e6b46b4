"""From `model.id` to a folder on this machine that holds the model in safetensors.

An id is, in this order: the embedded default's name, a `.gguf` file, a local folder, or a Hugging
Face id. Only the last one ever touches the network. Weights in pickle format are not accepted.
Fails with ModelNotFound, saying what to do.
"""

from __future__ import annotations

from pathlib import Path

from mooncake_serve.config import ModelConfig
from mooncake_serve.errors import ModelNotFound
from mooncake_serve.models.embedded import embedded_folder
from mooncake_serve.models.gguf import converted_gguf

EMBEDDED_MODEL = "smollm2-135m"

TOKENIZER_FILES = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
WEIGHT_FILES = ["*.safetensors"]


def resolve_model(model: ModelConfig, *, weights: bool = True) -> Path:
    """The model's folder. `weights=False` fetches only configuration and tokenizer."""
    if model.id == EMBEDDED_MODEL:
        return embedded_folder(model.dtype)
    path = Path(model.id).expanduser()
    if path.suffix == ".gguf":
        return converted_gguf(path, model.dtype)
    if path.is_dir():
        folder = path
    elif model.id.startswith(("/", ".", "~")) or model.id.count("/") > 1:
        raise ModelNotFound(f"model.id: no folder at {path}")
    else:
        folder = _from_hub(model, weights)
    _require(folder, "config.json")
    if weights:
        _require(folder, "*.safetensors")
    return folder


def _from_hub(model: ModelConfig, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = TOKENIZER_FILES + (WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(model.id, revision=model.revision, allow_patterns=patterns))
    except HFValidationError as err:
        raise ModelNotFound(
            f"model.id: {model.id!r} is neither {EMBEDDED_MODEL!r}, a local folder, a .gguf file "
            f"nor a Hugging Face id ({err})"
        ) from err
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as err:
        raise ModelNotFound(
            f"model.id: {model.id!r} is not cached and the Hugging Face hub did not give it: "
            f"{_first_line(err)}. Check the name and HF_TOKEN, or download it once with "
            f"`hf download {model.id}`, or set model.id to a local folder"
        ) from err


def _require(folder: Path, pattern: str) -> None:
    if not any(folder.glob(pattern)):
        raise ModelNotFound(
            f"model.id: {folder} holds no {pattern}; a model folder needs config.json, "
            "*.safetensors and a tokenizer (weights in pickle format are not accepted)"
        )


def _first_line(err: Exception) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0]
