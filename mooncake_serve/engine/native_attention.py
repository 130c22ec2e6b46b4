"""Attention by the native CPU kernel, for models that torch runs: exact per row, in place.

`torch` attends sequence by sequence, which costs a Python loop over rows in every layer of every
decode step; the kernel takes the whole batch and releases the GIL. It reads the pool through
addresses, so every tensor it is given must be contiguous and stay alive during the call. Where
it cannot run the model's shapes the constructor raises, and the caller keeps to torch.
"""

from __future__ import annotations

from typing import Any

import torch

from mooncake_serve._store import cpu
from mooncake_serve.engine.paged_attention import PagedStep
from mooncake_serve.engine.protocol import KVLayout


class NativeAttention:
    """Implements `AttentionKernels` over `_store.cpu.PagedAttention`."""

    def __init__(self, layout: KVLayout, heads: int, threads: int) -> None:
        """Raises ValueError when the kernel cannot run these shapes."""
        self._layout = layout
        self._heads = heads
        self._threads = threads
        self._plane_bytes = layout.block_bytes // layout.planes
        self._kernels: dict[tuple[int, float], Any] = {}
        self.kernel_id = str(self._kernel(1, 1.0).numerics_id)
        self.prefills = self.kernel_id.endswith("amx")
        """Without AMX, torch's prefill is faster."""

    def _kernel(self, blocks: int, scale: float) -> Any:
        kernel = self._kernels.get((blocks, scale))
        if kernel is None:
            layout = self._layout
            kernel = cpu.PagedAttention(
                heads=self._heads,
                kv_heads=layout.kv_heads,
                head_dim=layout.head_dim,
                block_tokens=layout.block_tokens,
                blocks=blocks,
                block_bytes=layout.block_bytes,
                dtype=layout.dtype,
                scale=scale,
                threads=self._threads,
            )
            self._kernels[blocks, scale] = kernel
        return kernel

    def decode(
        self, paged: PagedStep, layer: int, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Query and output `[rows, heads, head_dim]`, one sequence each."""
        query = query.contiguous()
        output = torch.empty_like(query)
        offset = 2 * layer * self._plane_bytes
        self._kernel(paged.pool.shape[0], scale).decode(
            query=query.data_ptr(),
            out=output.data_ptr(),
            pool=paged.pool.data_ptr(),
            k_offset=offset,
            v_offset=offset + self._plane_bytes,
            tables=paged.tables_int32.data_ptr(),
            table_width=paged.tables_int32.shape[1],
            lengths=paged.lengths_int32.data_ptr(),
            rows=query.shape[0],
        )
        return output

    def prefill(
        self, paged: PagedStep, layer: int, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Query and output `[tokens, heads, head_dim]` of one sequence's chunk."""
        query = query.contiguous()
        output = torch.empty_like(query)
        offset = 2 * layer * self._plane_bytes
        rows = query.shape[0]
        self._kernel(paged.pool.shape[0], scale).prefill(
            query=query.data_ptr(),
            out=output.data_ptr(),
            pool=paged.pool.data_ptr(),
            k_offset=offset,
            v_offset=offset + self._plane_bytes,
            table=paged.tables_int32.data_ptr(),
            table_width=paged.tables_int32.shape[1],
            start=paged.length - rows,
            rows=rows,
        )
        return output
