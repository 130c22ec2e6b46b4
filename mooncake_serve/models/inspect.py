"""Which models paged KV blocks can represent: causal full attention over one K and V per token.

Everything else keeps state that a block of KV does not hold (a window, a recurrent state, an
encoder, a latent) or changes the scores in a way our kernels do not compute. Such a model is
refused at start with UnsupportedModel that names the reason; it is never served wrong. This file
reads the configuration; the backend adds a check of what the loaded model really does.
"""

from __future__ import annotations

from typing import Any

from mooncake_serve.errors import UnsupportedModel

_CONFIG_REASONS = {
    "kv_lora_rank": "multi-head latent attention stores a latent instead of K and V",
    "attn_logit_softcapping": "attention scores are soft-capped",
    "attention_chunk_size": "attention is chunked",
    "mamba_d_state": "it has Mamba layers, whose state is not KV",
    "ssm_cfg": "it has state-space layers, whose state is not KV",
    "cross_attention_layers": "it has cross-attention layers",
    "alibi": "it biases attention by distance (ALiBi)",
}
"""Configuration fields that, when set, rule a model out."""

_REQUIRED = ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size")


def check_config(config: Any) -> None:
    """Raise UnsupportedModel unless every layer is causal full attention."""
    reason = unsupported_reason(config)
    if reason:
        raise UnsupportedModel(
            f"{config.model_type} cannot be served: {reason}. Choose a model with full attention "
            "in every layer, such as Llama, Qwen2, Qwen3 or Mistral v0.3"
        )


def unsupported_reason(config: Any) -> str | None:
    """Why the configuration cannot be served, or None."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        return "it takes inputs other than text"
    odd = sorted(_layer_types(config) - {"full_attention"})
    if odd:
        return f"it has layers of type {', '.join(odd)}"
    for name, reason in _CONFIG_REASONS.items():
        if getattr(config, name, None):
            return f"{reason} (config.{name})"
    missing = [name for name in _REQUIRED if not isinstance(getattr(config, name, None), int)]
    return f"its configuration has no {missing[0]}" if missing else None


def _layer_types(config: Any) -> set[str]:
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        return set(layer_types)
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return {"sliding_attention" if slides else "full_attention"}
