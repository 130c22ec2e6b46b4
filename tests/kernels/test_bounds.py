"""What the native backend refuses, and what it leaves alone."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from mooncake_serve._store import cpu
from mooncake_serve.engine.native import NativeBackend, supports
from mooncake_serve.engine.protocol import WorkItem
from mooncake_serve.errors import ConfigError, UnsupportedModel
from tests.kernels.tiny import BLOCK_TOKENS, CONFIGS, MAX_CONTEXT, VOCAB, native, tiny_model


@pytest.mark.parametrize("name", CONFIGS)
def test_families_are_supported(name: str) -> None:
    assert supports(CONFIGS[name]) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "gpt2 is not one of"),
        (LlamaConfig(hidden_act="gelu"), "activation is gelu"),
        (LlamaConfig(mlp_bias=True), "biases"),
        (LlamaConfig(head_dim=48), "head_dim is 48"),
        (LlamaConfig(hidden_size=72, num_attention_heads=4, head_dim=64), "hidden_size is 72"),
        (LlamaConfig(intermediate_size=100), "intermediate_size is 100"),
        (LlamaConfig(num_attention_heads=32, num_key_value_heads=12), "evenly"),
        (MistralConfig(sliding_window=4096), "sliding window"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=2), "sliding window"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "scaling is dynamic",
        ),
    ],
)
def test_reasons(config: object, reason: str) -> None:
    assert reason in (supports(config) or "")


def test_other_dtypes_and_blocks_are_refused() -> None:
    assert supports(CONFIGS["llama-tied"], torch.float32) is not None
    loaded = tiny_model("llama-tied")
    with pytest.raises(UnsupportedModel, match="block_tokens is 48"):
        NativeBackend(loaded, block_tokens=48, threads=1)
    with pytest.raises(ConfigError, match="sse9 is not available"):
        NativeBackend(loaded, block_tokens=32, threads=1, isa="sse9")


def test_a_model_that_computes_something_else_is_refused() -> None:
    loaded = tiny_model("llama-tied")
    gated = loaded.model.model.layers[0].mlp
    own_forward = gated.forward
    gated.forward = lambda x: 2 * own_forward(x)
    with pytest.raises(UnsupportedModel, match="differ"):
        NativeBackend(loaded, block_tokens=BLOCK_TOKENS, threads=1)


@pytest.mark.parametrize(
    "item",
    [
        WorkItem([VOCAB], 0, [0], True),
        WorkItem([], 0, [0], True),
        WorkItem([1], 0, [], True),
        WorkItem([1], 0, [2], True),
        WorkItem([1], 0, [-1], True),
        WorkItem([1], 32, [0], True),
        WorkItem([1] * 33, 0, [0], True),
        WorkItem([1] * 2, 31, [0, 2], True),
        WorkItem([1], MAX_CONTEXT, [0] * 21, True),
    ],
)
def test_items_out_of_bounds_write_nothing(item: WorkItem) -> None:
    backend = native()
    backend.allocate_pool(2)
    with pytest.raises(ValueError, match=r"\w"):
        backend.forward([WorkItem([1], 0, [1], True), item])
    assert not any(backend.read_block(0))
    assert not any(backend.read_block(1))


def test_a_pool_of_another_model_is_refused() -> None:
    small, large = native(), native("qwen3-dim128")
    small.allocate_pool(2)
    logits = torch.empty(VOCAB)
    with pytest.raises(ValueError, match="another model"):
        large._model.forward(
            small._pool.obj, [([1], 0, [0], True)], logits.data_ptr(), logits.numel()
        )


def test_logits_of_the_wrong_size_are_refused() -> None:
    backend = native()
    backend.allocate_pool(1)
    logits = torch.empty(VOCAB)
    for count in (0, VOCAB - 1, 2 * VOCAB):
        with pytest.raises(ValueError, match="logits"):
            backend._model.forward(
                backend._pool.obj, [([1], 0, [0], True)], logits.data_ptr(), count
            )


def test_fresh_blocks_are_zero_and_others_stay_untouched() -> None:
    backend = native()
    backend.allocate_pool(3)
    assert not any(backend.read_block(block)[0] for block in range(3))
    backend.forward([WorkItem([5, 6, 7], 0, [1], False)])
    assert any(backend.read_block(1))
    assert not any(backend.read_block(0))
    assert not any(backend.read_block(2))
    backend.copy_block(1, 2)
    assert backend.read_block(1) == backend.read_block(2)


def test_a_block_holds_its_tokens_where_the_layout_says() -> None:
    """`[layer][K|V][token][kv_head][head_dim]`: three tokens write three rows of each plane."""
    backend = native()
    backend.allocate_pool(1)
    backend.forward([WorkItem([5, 6, 7], 0, [0], False)])
    layout = backend.layout
    block = torch.frombuffer(bytearray(backend.read_block(0)), dtype=torch.bfloat16)
    planes = block.view(layout.layers, 2, layout.block_tokens, layout.channels)
    assert (planes[:, :, :3] != 0).float().mean() > 0.99
    assert not planes[:, :, 3:].any()


def test_views_keep_their_memory_after_close() -> None:
    backend = native()
    backend.allocate_pool(1)
    view = backend.view_block(0)
    assert view is not None
    backend.close()
    view[:4] = b"kept"
    assert bytes(view[:4]) == b"kept"


def test_several_models_live_in_one_process() -> None:
    names = ("llama-tied", "qwen2", "qwen3-dim128")
    backends = [native(name, threads=2) for name in names]
    for backend in backends:
        backend.allocate_pool(1)
    item = WorkItem([3, 4, 5], 0, [0], True)
    alone = [native(name) for name in names]
    for one, backend in zip(alone, backends, strict=True):
        one.allocate_pool(1)
        assert torch.equal(one.forward([item]), backend.forward([item]))
    for backend in backends[::2]:
        backend.close()
    assert backends[1].forward([item]).isfinite().all()


def loader(**changes: object) -> cpu.ModelLoader:
    shape = dict(
        layers=1, hidden=64, heads=2, kv_heads=1, head_dim=64, inner=64, vocab=40, max_context=64,
        block_tokens=32, eps=1e-6, tied=True, qkv_bias=False, out_bias=False, qk_norm=False,
        threads=1,
    )  # fmt: skip
    return cpu.ModelLoader(**shape | changes)


def test_the_loader_wants_each_weight_once_and_whole() -> None:
    weights = torch.zeros(128 * 64, dtype=torch.bfloat16)
    vector = torch.zeros(64)
    one = loader()
    one.matrix("q", 0, weights.data_ptr(), 128 * 64)
    one.vector("input_norm", 0, vector.data_ptr(), 64)
    for name, layer, count in (("q", 0, 128 * 64), ("k", 1, 4096), ("x", 0, 1), ("k", 0, 4095)):
        with pytest.raises(ValueError, match=r"\w"):
            one.matrix(name, layer, weights.data_ptr(), count)
    for name, layer, count in (("post_norm", 0, 63), ("q_norm", 0, 64), ("post_norm", 1, 64)):
        with pytest.raises(ValueError, match=r"\w"):
            one.vector(name, layer, vector.data_ptr(), count)
    with pytest.raises(ValueError, match="no aligned address"):
        one.matrix("k", 0, 0, 4096)
    with pytest.raises(ValueError, match="11 weights are missing"):
        one.finish()


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 48},
        {"hidden": 48},
        {"inner": 0},
        {"kv_heads": 0},
        {"heads": 3, "kv_heads": 2},
        {"block_tokens": 16},
        {"layers": 0},
        {"threads": 0},
        {"isa": "sse9"},
        {"vocab": 1 << 40},
        {"hidden": 1 << 60},
    ],
)
def test_shapes_that_the_kernels_cannot_run_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        loader(**changes)


def test_the_pool_is_as_large_as_the_layout_says() -> None:
    backend = native("qwen3-dim128")
    backend.allocate_pool(3)
    assert backend._pool.nbytes == 3 * backend.layout.block_bytes
