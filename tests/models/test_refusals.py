"""Models that paged KV cannot represent are refused with the reason, before and after loading."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from mooncake_serve.engine.torch_backend import TorchBackend
from mooncake_serve.errors import UnsupportedModel
from mooncake_serve.models import LoadedModel
from mooncake_serve.models.inspect import check_config
from tests.engine.support import tiny_config, tiny_model

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "pad_token_id": 0,
}


def config(name: str, **fields: Any) -> Any:
    return getattr(transformers, name)(**{**SIZES, **fields})


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (config("MistralConfig", sliding_window=64), "sliding_attention"),
        (
            config("Qwen2Config", use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "sliding_attention",
        ),
        (config("Gemma2Config"), "sliding_attention"),
        (config("MambaConfig"), "linear_attention"),
        (config("JambaConfig"), "linear_attention"),
        (config("Llama4TextConfig"), "chunked_attention"),
        (config("DeepseekV3Config"), "latent"),
        (config("FalconConfig", alibi=True), "ALiBi"),
        (transformers.T5Config(vocab_size=320), "encoder-decoder"),
        (transformers.LlavaConfig(), "other than text"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_configurations_are_refused_by_name(wrong: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_config(wrong)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_full_attention_is_accepted(family: str) -> None:
    check_config(tiny_config(family))


def wrap(model: Any) -> LoadedModel:
    return LoadedModel(model.eval(), Path(), "x", (), 128)


@pytest.mark.parametrize("name", ["BloomConfig", "MptConfig"])
def test_models_with_attention_of_their_own_are_refused(name: str) -> None:
    """Nothing in these configurations says so; the loaded model does."""
    fields = {"d_model": 64, "n_heads": 4, "n_layers": 2} if name == "MptConfig" else {}
    model = AutoModelForCausalLM.from_config(config(name, **fields), dtype=torch.float32)
    with pytest.raises(UnsupportedModel, match="cannot be served"):
        TorchBackend(wrap(model), block_tokens=32, threads=1)


def test_scores_changed_behind_the_configuration_are_refused() -> None:
    """A model whose attention is not softmax(QK)V, though its cache looks plain."""
    loaded = tiny_model("llama", dtype=torch.float32)
    for layer in loaded.model.model.layers:
        original = layer.self_attn.forward

        def forward(*args: Any, original: Any = original, **options: Any) -> Any:
            eager = loaded.model.config._attn_implementation == "eager"
            output, weights = original(*args, **options)
            return (output * 2 if eager else output), weights

        layer.self_attn.forward = forward
    with pytest.raises(UnsupportedModel, match="not plain causal softmax"):
        TorchBackend(loaded, block_tokens=32, threads=1)


def test_experts_are_served_but_not_called_exact() -> None:
    moe = config(
        "Qwen3MoeConfig",
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        intermediate_size=96,
    )
    model = AutoModelForCausalLM.from_config(moe, dtype=torch.float32)
    assert TorchBackend(wrap(model), block_tokens=32, threads=1).exact is False
