"""`NativeBackend`: Llama-family models on kernels of our own, exact for any cut of the work.

Owns the packed weights, the KV pool (host memory, on huge pages where granted) and a team of
threads. A token's KV and logits depend on the tokens before it alone, so any chunks and any batch
may share a forward, and blocks written by decode are as good as blocks written by prefill.
Weights and KV are bf16, sums fp32. Called from one thread.

Fails at construction with UnsupportedModel (`supports` says why beforehand), or when the logits of
a short text are not the model's own up to rounding; with ConfigError for an instruction set that
the machine lacks. Tokens, positions and blocks out of bounds raise ValueError before anything is
written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from mooncake_serve._store import cpu
from mooncake_serve.engine.namespace import ENGINE_VERSION
from mooncake_serve.engine.probe import check_logits, own_logits
from mooncake_serve.engine.protocol import KVLayout, LayerGate, WorkItem
from mooncake_serve.errors import ConfigError, UnsupportedModel
from mooncake_serve.models import LoadedModel

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
HEAD_DIMS = (64, 80, 96, 128)
ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Scalings whose angles do not depend on the length of the sequence."""

CHECKED_TOKENS = 40


class NativeBackend:
    """Implements `Backend` with the kernels of `_store.cpu`."""

    name = "native"
    device = "cpu"
    exact = True
    any_cut = True
    max_decode_rows = 1024

    def __init__(
        self, loaded: LoadedModel, *, block_tokens: int, threads: int, isa: str | None = None
    ) -> None:
        """`isa` keeps to one of `_store.cpu.ISAS`; None takes the best."""
        config = loaded.model.config
        reason = supports(config, loaded.model.dtype)
        if reason is None and block_tokens % 32:
            reason = f"block_tokens is {block_tokens}, not a multiple of 32"
        if reason is not None:
            raise UnsupportedModel(
                f"{config.model_type} cannot run on the native backend: {reason}; "
                "set engine.backend to torch or auto"
            )
        if isa is not None and isa not in cpu.ISAS:
            raise ConfigError("engine.isa", f"{isa} is not available here: {', '.join(cpu.ISAS)}")
        # Torch only samples here; its own workers would spin on the cores that ours need.
        torch.set_num_threads(1)
        self.layout = KVLayout(
            layers=config.num_hidden_layers,
            kv_heads=_kv_heads(config),
            head_dim=_head_dim(config),
            block_tokens=block_tokens,
            dtype="bfloat16",
        )
        self.max_context = loaded.max_context
        self.vocab_size = config.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self.fingerprint = loaded.fingerprint
        self._pool: Any = None
        with torch.inference_mode():
            cos, sin = _rotation_tables(loaded.model, self.max_context)
            self._model: Any = _pack(loaded.model, cos, sin, block_tokens, threads, isa)
            angles = hashlib.sha256(cos.numpy().data).hexdigest()[:12]
            self.numerics_id = f"engine{ENGINE_VERSION}/native-{self._model.numerics_id}/{angles}"
            self._check_model(loaded.model)

    def _check_model(self, model: Any) -> None:
        length = min(CHECKED_TOKENS, self.max_context)
        generator = torch.Generator().manual_seed(20)
        tokens = torch.randint(self.vocab_size, (length,), generator=generator)
        self.allocate_pool(length // self.layout.block_tokens + 1)
        table = range(length // self.layout.block_tokens + 1)
        ours = [
            self.forward([WorkItem(tokens[at : at + 1].tolist(), at, table, True)])
            for at in range(length)
        ]
        self._pool = None
        check_logits(model, torch.cat(ours), own_logits(model, tokens))

    def allocate_pool(self, blocks: int) -> None:
        """Reserve the pool, zeroed, with every page present."""
        self._pool = memoryview(self._model.allocate_pool(blocks))

    def forward(self, batch: Sequence[WorkItem], gate: LayerGate | None = None) -> torch.Tensor:
        """Any batch of any chunks of different sequences."""
        logits = torch.empty((sum(item.logits for item in batch), self.vocab_size))
        self._model.forward(self._pool.obj, list(batch), logits.data_ptr(), logits.numel(), gate)
        return logits

    def make_gate(self) -> LayerGate:
        """A closed gate for one load."""
        return cpu.LayerGate()

    def forward_behind(self, batch: Sequence[WorkItem], gate: LayerGate) -> torch.Tensor | None:
        """`forward` whose attention waits for each layer in turn; None when the gate failed."""
        logits = self.forward(batch, gate)
        return None if cast(Any, gate).failed else logits

    def view_block(self, block: int) -> memoryview | None:
        """The block's bytes."""
        return self.read_block(block)

    def read_block(self, block: int) -> memoryview:
        """The block's bytes, in place."""
        size = self.layout.block_bytes
        return self._pool[block * size : (block + 1) * size]

    def write_block(self, block: int, data: memoryview) -> None:
        """Set the block's bytes."""
        self.read_block(block)[:] = data

    def make_staging(self) -> memoryview:
        """A buffer of one block."""
        return memoryview(bytearray(self.layout.block_bytes))

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool."""
        self.write_block(target, self.read_block(source))

    def close(self) -> None:
        """Drop weights, threads and pool."""
        self._pool = None
        self._model = None


def supports(config: Any, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why the native backend cannot run a model, or None when it can."""
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not one of {', '.join(sorted(FAMILIES))}"
    if dtype != torch.bfloat16:
        return f"its weights are {str(dtype).removeprefix('torch.')}, not bfloat16"
    if getattr(config, "quantization_config", None):
        return "its weights are quantised"
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    if getattr(config, "mlp_bias", False):
        return "its gated layers have biases"
    return _window_reason(config) or _rope_reason(config) or _shape_reason(config)


def _window_reason(config: Any) -> str | None:
    kinds = getattr(config, "layer_types", None)
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if set(kinds) != {"full_attention"} if kinds else slides:
        return "it attends through a sliding window"
    return None


def _rope_reason(config: Any) -> str | None:
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        return f"its rotary scaling is {kind}, not one of {', '.join(sorted(ROPE_TYPES))}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "it rotates a part of each head"
    return None


def _shape_reason(config: Any) -> str | None:
    dim, heads = _head_dim(config), config.num_attention_heads
    if dim not in HEAD_DIMS:
        return f"its head_dim is {dim}, not one of {', '.join(map(str, HEAD_DIMS))}"
    if heads % _kv_heads(config):
        return f"{heads} heads do not share {_kv_heads(config)} KV heads evenly"
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads x head_dim": heads * dim,
    }
    odd = [f"{name} is {width}" for name, width in widths.items() if width % 32]
    return f"{odd[0]}, not a multiple of 32" if odd else None


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _rotation_tables(model: Any, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[positions, head_dim / 2]` by the model's own rotary module, float32."""
    like = torch.empty(0, dtype=torch.float32)
    cos, sin = model.model.rotary_emb(like, torch.arange(positions).unsqueeze(0))
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


def _pack(
    model: Any,
    cos: torch.Tensor,
    sin: torch.Tensor,
    block_tokens: int,
    threads: int,
    isa: str | None,
) -> Any:
    config = model.config
    first = model.model.layers[0].self_attn
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    loader = cpu.ModelLoader(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=_kv_heads(config),
        head_dim=_head_dim(config),
        inner=config.intermediate_size,
        vocab=config.vocab_size,
        max_context=cos.shape[0],
        block_tokens=block_tokens,
        eps=config.rms_norm_eps,
        tied=tied,
        qkv_bias=first.q_proj.bias is not None,
        out_bias=first.o_proj.bias is not None,
        qk_norm=hasattr(first, "q_norm"),
        threads=threads,
        isa=isa,
    )
    for name, layer, weight in _matrices(model, tied):
        values = weight.detach().to("cpu", torch.bfloat16).contiguous()
        loader.matrix(name, layer, values.data_ptr(), values.numel())
    for name, layer, vector in [*_vectors(model), ("cos", 0, cos), ("sin", 0, sin)]:
        values = vector.detach().to("cpu", torch.float32).contiguous()
        loader.vector(name, layer, values.data_ptr(), values.numel())
    return loader.finish()


def _matrices(model: Any, tied: bool) -> Iterator[tuple[str, int, torch.Tensor]]:
    for index, layer in enumerate(model.model.layers):
        attention, gated = layer.self_attn, layer.mlp
        yield "q", index, attention.q_proj.weight
        yield "k", index, attention.k_proj.weight
        yield "v", index, attention.v_proj.weight
        yield "out", index, attention.o_proj.weight
        yield "gate", index, gated.gate_proj.weight
        yield "up", index, gated.up_proj.weight
        yield "down", index, gated.down_proj.weight
    yield "lm_head", 0, model.lm_head.weight
    if not tied:
        yield "embedding", 0, model.model.embed_tokens.weight


def _vectors(model: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        yield "input_norm", index, layer.input_layernorm.weight
        yield "post_norm", index, layer.post_attention_layernorm.weight
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        if attention.q_proj.bias is not None:
            yield "qkv_bias", index, torch.cat([p.bias for p in projections])
        if attention.o_proj.bias is not None:
            yield "out_bias", index, attention.o_proj.bias
        if hasattr(attention, "q_norm"):
            yield "q_norm", index, attention.q_norm.weight
            yield "k_norm", index, attention.k_norm.weight
    yield "final_norm", 0, model.model.norm.weight
