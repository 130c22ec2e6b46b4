"""Attention over the paged pool, behind transformers' public `Cache` and `AttentionInterface`.

Owns nothing: one `PagedStep` describes one forward, travels through the model as the keyword
`paged`, and is dropped afterwards. `PagedCache` writes each layer's new K and V into the pool;
`paged_attention` reads the past from there. A prefill step is one sequence and at most one block;
a decode step is one token of each of several sequences.

Shapes: the pool is `[block, layer, 2, token, kv_head, head_dim]`; query `[rows, heads, tokens,
head_dim]`, new keys and values `[rows, kv_heads, tokens, head_dim]`; rows is 1 in prefill and
tokens is 1 in decode.

On the CPU the past and the new chunk are attended apart and merged by log-sum-exp, because only
then is neither of them masked: the query heads that share a KV head are packed into rows, so
grouped heads cost no copies, and only the chunk itself is causal. That is 3-5 times faster than
masked SDPA over everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin

ATTENTION_NAME = "mooncake_paged"


class AttentionKernels(Protocol):
    """Attention that reads past and new tokens from the pool itself."""

    prefills: bool
    """Whether `prefill` is to be used too."""

    def decode(
        self, paged: PagedStep, layer: int, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Query and output `[rows, heads, head_dim]`, one sequence each."""
        ...

    def prefill(
        self, paged: PagedStep, layer: int, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Query and output `[tokens, heads, head_dim]` of one sequence's chunk."""
        ...


@dataclass(slots=True)
class PagedStep:
    """One forward's view of the pool."""

    pool: torch.Tensor
    prefill: bool
    tables: torch.Tensor
    """Blocks of each row up to the one it writes to, `[rows, max_blocks]`, padded with 0."""
    blocks: torch.Tensor
    """Block that each row writes to."""
    offsets: torch.Tensor
    """Position inside that block."""
    lengths: torch.Tensor
    """Tokens of each row, including the new ones."""
    length: int
    """The largest of them."""
    kernels: AttentionKernels | None = None
    """None: attention by torch."""
    groups: Sequence[tuple[int, torch.Tensor]] = ()
    """Decode by torch: rows that share a call, by their number of blocks."""
    attended: int = 0
    """Layers that came to our attention; the backend's self-check counts them."""
    tables_int32: torch.Tensor = field(init=False)
    lengths_int32: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.tables_int32 = self.tables.int()
        self.lengths_int32 = self.lengths.int()

    @property
    def past(self) -> torch.Tensor:
        """Prefill: the blocks before the chunk's own."""
        return self.tables[0, :-1]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the new tokens of one layer into the pool."""
        planes = self.pool[:, layer]
        if self.prefill:
            count = keys.shape[2]
            target = planes[self.blocks[0]]
            target[0, :count] = keys[0].transpose(0, 1)
            target[1, :count] = values[0].transpose(0, 1)
        else:
            planes[:, 0].index_put_((self.blocks, self.offsets), keys[:, :, 0])
            planes[:, 1].index_put_((self.blocks, self.offsets), values[:, :, 0])


class _PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`; hands the new K and V through."""

    is_sliding = False

    def __init__(self, step: PagedStep, layer: int) -> None:
        super().__init__()
        self.step = step
        self.layer = layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool exists."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write to the pool. `paged_attention` finds the past there itself."""
        self.step.write(self.layer, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """No mask is built for our attention."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Positions are always given explicitly."""
        return 0

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


class PagedCache(Cache):
    """The pool as transformers sees it during one forward."""

    def __init__(self, step: PagedStep, layers: int) -> None:
        super().__init__(layers=[_PagedLayer(step, layer) for layer in range(layers)])


@dataclass(frozen=True, slots=True)
class _Inputs:
    """One layer's attention inputs."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paged: PagedStep | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function of every layer; output `[rows, tokens, heads, head_dim]`."""
    assert paged is not None, "the model dropped the step on its way to attention"
    layer = cast(int, module.layer_idx)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kernels = paged.kernels
    paged.attended += 1
    if not paged.prefill:
        decode = decode_torch if kernels is None else kernels.decode
        return decode(paged, layer, query[:, :, 0], scale).unsqueeze(1), None
    if kernels is not None and kernels.prefills:
        return kernels.prefill(paged, layer, query[0].transpose(0, 1), scale).unsqueeze(0), None
    prefill = _prefill_cpu if query.device.type == "cpu" else _prefill_cuda
    return prefill(paged, layer, _Inputs(query, key, value, scale)).transpose(1, 2), None


def _gather(paged: PagedStep, layer: int, which: int) -> torch.Tensor:
    """The past of one plane, contiguous, as `[1, kv_heads, tokens, head_dim]`."""
    plane = paged.pool[:, layer, which].index_select(0, paged.past)
    return plane.flatten(0, 1).transpose(0, 1).unsqueeze(0)


def _prefill_cpu(paged: PagedStep, layer: int, inputs: _Inputs) -> torch.Tensor:
    _, heads, tokens, dim = inputs.query.shape
    kv_heads = inputs.key.shape[1]
    shape = (kv_heads, heads // kv_heads, tokens, dim)
    query, scale = inputs.query.reshape(shape), inputs.scale
    keys = inputs.key[0].unsqueeze(1).expand(shape)
    values = inputs.value[0].unsqueeze(1).expand(shape)
    chunk, chunk_lse = _flash_cpu(query, keys, values, scale, causal=True)
    chunk = chunk.reshape(1, heads, tokens, dim)
    if paged.past.numel() == 0:
        return chunk
    packed = query.reshape(1, kv_heads, -1, dim)
    keys, values = _gather(paged, layer, 0), _gather(paged, layer, 1)
    past, past_lse = _flash_cpu(packed, keys, values, scale, causal=False)
    past = past.reshape(1, heads, tokens, dim)
    weight = torch.sigmoid(past_lse.reshape(1, heads, -1) - chunk_lse.reshape(1, heads, -1))
    merged = torch.lerp(chunk.float(), past.float(), weight.unsqueeze(-1))
    return merged.to(inputs.query.dtype)


def _flash_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and float32 log-sum-exp over the keys, per query row."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )


def _prefill_cuda(paged: PagedStep, layer: int, inputs: _Inputs) -> torch.Tensor:
    keys, values = inputs.key, inputs.value
    if paged.past.numel():
        keys = torch.cat([_gather(paged, layer, 0), keys], dim=2)
        values = torch.cat([_gather(paged, layer, 1), values], dim=2)
    return scaled_dot_product_attention(
        inputs.query,
        keys,
        values,
        attn_mask=causal_lower_right(inputs.query.shape[2], keys.shape[2]),
        scale=inputs.scale,
        enable_gqa=True,
    )


def decode_torch(paged: PagedStep, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
    """Decode attention on any device, one call for each of the step's groups.

    Each row attends to whole blocks, with the positions after its end masked. On the CPU, where a
    group is one row, its bits depend on its own length and table only.
    """
    _, heads, dim = query.shape
    kv_heads = paged.pool.shape[4]
    output = torch.empty_like(query)
    for count, members in paged.groups:
        tables = paged.tables.index_select(0, members)[:, :count].flatten()
        shape = (len(members), count * paged.pool.shape[3], kv_heads, dim)
        keys = paged.pool[:, layer, 0].index_select(0, tables).view(shape).transpose(1, 2)
        values = paged.pool[:, layer, 1].index_select(0, tables).view(shape).transpose(1, 2)
        packed = query.index_select(0, members).view(-1, kv_heads, heads // kv_heads, dim)
        positions = torch.arange(shape[1], device=query.device)
        inside = positions < paged.lengths.index_select(0, members).unsqueeze(1)
        attended = scaled_dot_product_attention(
            packed, keys, values, attn_mask=inside[:, None, None, :], scale=scale
        )
        output.index_copy_(0, members, attended.reshape(-1, heads, dim))
    return output


AttentionInterface.register(ATTENTION_NAME, paged_attention)
