"""Models: from a name in the configuration to weights and a tokenizer on this machine."""

from mooncake_serve.models.load import LoadedModel, Tokenizer, load_model, load_tokenizer
from mooncake_serve.models.resolve import EMBEDDED_MODEL, resolve_model
from mooncake_serve.models.size import weight_bytes

__all__ = [
    "EMBEDDED_MODEL",
    "LoadedModel",
    "Tokenizer",
    "load_model",
    "load_tokenizer",
    "resolve_model",
    "weight_bytes",
]
