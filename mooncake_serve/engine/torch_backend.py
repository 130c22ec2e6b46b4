"""`TorchBackend`: any full-attention transformers model over a paged pool, on CPU or CUDA.

Owns the weights and the pool tensor `[block, layer, K|V, token, kv_head, head_dim]`. Keeps to
canonical compute: a forward is one prefill item inside one block, or decode rows of one token
each. A decode row has the same bits whoever shares its forward: rows are padded to
`max_decode_rows` where the linear layers ask for it (found by a probe at start), and attention
works row by row. Called from one thread, which must be the thread that constructs it, because
torch keeps its thread count per thread. Fails at construction with UnsupportedModel when the
model computes anything but plain causal attention.
"""

from __future__ import annotations

import itertools
import logging
import mmap
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import torch

from mooncake_serve.engine.namespace import torch_numerics_id
from mooncake_serve.engine.native_attention import NativeAttention
from mooncake_serve.engine.paged_attention import (
    ATTENTION_NAME,
    PagedCache,
    PagedStep,
)
from mooncake_serve.engine.probe import check_logits, least_exact_rows, own_logits
from mooncake_serve.engine.protocol import KVLayout, WorkItem
from mooncake_serve.errors import UnsupportedModel
from mooncake_serve.models import LoadedModel

log = logging.getLogger(__name__)

MAX_DECODE_ROWS = 32


class TorchBackend:
    """Implements `Backend` with transformers' public API."""

    name = "torch"
    any_cut = False
    max_decode_rows = MAX_DECODE_ROWS

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        block_tokens: int,
        threads: int,
        attention: Literal["auto", "torch"] = "auto",
    ) -> None:
        """`attention="torch"` keeps attention off the native kernels."""
        torch.set_num_threads(threads)
        self._model: Any = loaded.model
        config = loaded.model.config
        self._device = loaded.model.device
        self.device = str(self._device)
        heads = config.num_attention_heads
        self.layout = KVLayout(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            block_tokens=block_tokens,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
        )
        self.max_context = loaded.max_context
        self.vocab_size = config.vocab_size
        self.eos_token_ids = loaded.eos_token_ids
        self.fingerprint = loaded.fingerprint
        self._pool = torch.empty(0)
        self._least_rows = 1
        self._kernels = self._choose_kernels(heads, threads, attention)
        kernel_id = "torch-sdpa" if self._kernels is None else self._kernels.kernel_id
        self.numerics_id = torch_numerics_id(
            device=self._device, threads=threads, kernel_id=kernel_id, block_tokens=block_tokens
        )
        with torch.inference_mode():
            self._check_model()
            self._least_rows, self.exact = self._probe_rows()

    def _choose_kernels(
        self, heads: int, threads: int, attention: Literal["auto", "torch"]
    ) -> NativeAttention | None:
        if attention == "torch" or self._device.type != "cpu":
            return None
        try:
            return NativeAttention(self.layout, heads, threads)
        except ValueError as err:
            log.info("attention by torch: %s", err)
            return None

    def _check_model(self) -> None:
        """Compare a full block, a tail and a decode step with the model's own attention."""
        block_tokens = self.layout.block_tokens
        length = min(block_tokens + 9, self.max_context)
        generator = torch.Generator().manual_seed(20)
        tokens = torch.randint(self.vocab_size, (length,), generator=generator).tolist()
        reference = own_logits(self._model, self._tensor(tokens))
        self._model.set_attn_implementation(ATTENTION_NAME)
        self.allocate_pool(2)
        cuts = [cut for cut in (0, block_tokens, length - 1, length) if cut <= length]
        items = [
            WorkItem(tokens[start:end], start, (0, 1), True)
            for start, end in itertools.pairwise(cuts)
        ]
        try:
            ours = [self.forward([item]) for item in items]
        except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as err:
            raise UnsupportedModel(
                f"{self._model.config.model_type} cannot be served: its attention does not run "
                f"over a paged cache: {err}"
            ) from err
        self._pool = torch.empty(0)
        check_logits(self._model, torch.cat(ours), reference[[cut - 1 for cut in cuts[1:]]])

    def _probe_rows(self) -> tuple[int, bool]:
        """Rows that decode pads to, and whether a row's bits are then its own."""
        if self._device.type != "cpu":
            # One bucket: cuBLAS picks its kernel by the number of rows.
            return MAX_DECODE_ROWS, False
        least = least_exact_rows(self._model, MAX_DECODE_ROWS)
        return (MAX_DECODE_ROWS, False) if least is None else (least, True)

    def allocate_pool(self, blocks: int) -> None:
        """Reserve the pool; zeroed, so that no stale bit pattern is ever a NaN."""
        layout, size = self.layout, blocks * self.layout.block_bytes
        if self._device.type == "cpu":
            pool = _host_memory(size)
        else:
            pool = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._pool = pool.view(getattr(torch, layout.dtype)).view(
            blocks, layout.layers, 2, layout.block_tokens, layout.kv_heads, layout.head_dim
        )

    def forward(self, batch: Sequence[WorkItem]) -> torch.Tensor:
        """One prefill item inside one block, or up to `max_decode_rows` items of one token."""
        with torch.inference_mode():
            if len(batch) == 1 and len(batch[0].tokens) > 1:
                return self._prefill(batch[0])
            assert len(batch) <= self.max_decode_rows
            assert all(len(item.tokens) == 1 for item in batch)
            return self._decode_rows(batch)

    def _prefill(self, item: WorkItem) -> torch.Tensor:
        block_tokens = self.layout.block_tokens
        index, offset = divmod(item.start, block_tokens)
        count = len(item.tokens)
        assert offset == 0, "canonical prefill starts at a block"
        assert count <= block_tokens, "canonical prefill stays inside one block"
        step = PagedStep(
            pool=self._pool,
            prefill=True,
            tables=self._tensor([item.table[: index + 1]]),
            blocks=self._tensor(item.table[index : index + 1]),
            offsets=self._tensor([0]),
            lengths=self._tensor([item.start + count]),
            length=item.start + count,
            kernels=self._kernels,
        )
        positions = torch.arange(item.start, item.start + count, device=self._device)
        tokens = self._tensor(item.tokens).unsqueeze(0)
        return self._run(step, tokens, positions.unsqueeze(0), logits=item.logits)

    def _decode_rows(self, batch: Sequence[WorkItem]) -> torch.Tensor:
        block_tokens = self.layout.block_tokens
        rows = list(batch)
        # Copies of the last row write the bytes it writes itself; their logits are dropped.
        rows += [rows[-1]] * (self._least_rows - len(rows))
        counts = [item.start // block_tokens + 1 for item in rows]
        width = max(counts)
        tables = [
            [*item.table[:count], *[0] * (width - count)]
            for item, count in zip(rows, counts, strict=True)
        ]
        starts = [item.start for item in rows]
        step = PagedStep(
            pool=self._pool,
            prefill=False,
            tables=self._tensor(tables),
            blocks=self._tensor(
                [item.table[count - 1] for item, count in zip(rows, counts, strict=True)]
            ),
            offsets=self._tensor([start % block_tokens for start in starts]),
            lengths=self._tensor([start + 1 for start in starts]),
            length=max(starts) + 1,
            kernels=self._kernels,
            groups=self._groups(counts) if self._kernels is None else (),
        )
        tokens = self._tensor([item.tokens[0] for item in rows]).unsqueeze(1)
        keep = [row for row, item in enumerate(batch) if item.logits]
        positions = self._tensor(starts).unsqueeze(1)
        logits = self._run(step, tokens, positions, logits=bool(keep))
        return logits[keep]

    def _groups(self, counts: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
        if self._device.type == "cpu":
            # Torch's kernel decides by the batch's size whether it packs the keys, and that
            # changes bits: rows go one by one.
            return [(count, self._tensor([row])) for row, count in enumerate(counts)]
        members: dict[int, list[int]] = defaultdict(list)
        for row, count in enumerate(counts):
            members[count].append(row)
        return [(count, self._tensor(rows)) for count, rows in members.items()]

    def _run(
        self, step: PagedStep, tokens: torch.Tensor, positions: torch.Tensor, *, logits: bool
    ) -> torch.Tensor:
        """Float32 logits of each row's last token; `[0, vocab]` without the head."""
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "cache": PagedCache(step, self.layout.layers),
            "use_cache": True,
            "paged": step,
        }
        if logits:
            result = self._model(**inputs, logits_to_keep=1).logits[:, -1].float()
        else:
            self._model.base_model(**inputs)
            result = torch.empty((0, self.vocab_size), device=self._device)
        assert step.attended == self.layout.layers, "some layers have attention of their own"
        return result

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def view_block(self, block: int) -> memoryview | None:
        """The block's bytes, or None when the pool is on a device."""
        if self._device.type != "cpu":
            return None
        return _bytes_of(self._pool[block])

    def read_block(self, block: int) -> memoryview:
        """The block's bytes; a pinned copy when the pool is on a device."""
        if self._device.type == "cpu":
            return _bytes_of(self._pool[block])
        # The copy waits for the forward that wrote the block: both are in the device's one stream.
        staging = self.make_staging()
        torch.frombuffer(staging, dtype=torch.uint8).copy_(self._flat(block))
        return staging

    def write_block(self, block: int, data: memoryview) -> None:
        """Set the block's bytes; returns when `data` has been read."""
        self._flat(block).copy_(torch.frombuffer(data, dtype=torch.uint8))

    def make_staging(self) -> memoryview:
        """A buffer of one block, pinned when the pool is on a device; torch reuses freed ones."""
        pinned = self._device.type != "cpu"
        size = self.layout.block_bytes
        return _bytes_of(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))

    def _flat(self, block: int) -> torch.Tensor:
        return self._pool[block].view(torch.uint8).view(-1)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block within the pool."""
        self._pool[target].copy_(self._pool[source])

    def close(self) -> None:
        """Drop weights and pool."""
        self._pool = torch.empty(0)
        del self._model


def _host_memory(size: int) -> torch.Tensor:
    """Zeroed bytes, uint8 `[size]`, on huge pages where granted; a load never waits for a page."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A writable view of a contiguous host tensor's bytes; keeps the tensor alive."""
    return tensor.view(torch.uint8).reshape(-1).numpy().data
