"""Decode over long contexts: how fast a batch reads its KV, beside how fast the machine copies.

One step of 16 requests that each hold 4,000 tokens reads more KV than any cache holds, so what
limits it is the way from memory. The native backend runs alone here, without a scheduler: its pool
is filled with random keys and values, because computing 64,000 tokens would take minutes and
change nothing about the reading.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import numpy as np
import torch

from mooncake_serve.bench.store import memcpy_rate
from mooncake_serve.config import ModelConfig
from mooncake_serve.engine.native import NativeBackend
from mooncake_serve.engine.protocol import WorkItem
from mooncake_serve.models import load_model

BATCH, CONTEXT = 16, 4000
BLOCK_TOKENS = 256
COPIED = 128 << 20


def decode_long(model: ModelConfig, threads: int, isa: str | None, steps: int) -> dict[str, Any]:
    """The `decode_long` object of `bench engine`."""
    backend = NativeBackend(
        load_model(model, "cpu"), block_tokens=BLOCK_TOKENS, threads=threads, isa=isa
    )
    each = CONTEXT // BLOCK_TOKENS + 1
    backend.allocate_pool(BATCH * each)
    values = torch.randn(backend.layout.block_bytes // 2, dtype=torch.bfloat16)
    for block in range(BATCH * each):
        backend.write_block(block, values.view(torch.uint8).numpy().data)
    items = [
        WorkItem([100 + row], CONTEXT, range(row * each, (row + 1) * each), True)
        for row in range(BATCH)
    ]
    seconds, copies = [], []
    for _ in range(steps):
        copies.append(copy_rate(threads))
        begin = time.perf_counter()
        backend.forward(items)
        seconds.append(time.perf_counter() - begin)
    backend.close()
    step_s = statistics.median(seconds)
    read = BATCH * CONTEXT * backend.layout.block_bytes // BLOCK_TOKENS
    one, together = memcpy_rate(4 << 20), statistics.median(copies)
    return {
        "batch": BATCH,
        "context": CONTEXT,
        "kv_bytes": read,
        "step_s": step_s,
        "tok_s": BATCH / step_s,
        "kv_gb_s": read / step_s / 1e9,
        "memcpy_gb_s": one,
        "memcpy_all_threads_gb_s": together,
        "kv_over_memcpy": read / step_s / 1e9 / one,
        "kv_over_memcpy_all_threads": read / step_s / 1e9 / together,
    }


def copy_rate(threads: int) -> float:
    """GB/s that so many threads copy together, each from and to memory of its own."""
    buffers = [(np.ones(COPIED, np.uint8), np.zeros(COPIED, np.uint8)) for _ in range(threads)]
    workers = [threading.Thread(target=np.copyto, args=(to, of)) for of, to in buffers]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return threads * COPIED / (time.perf_counter() - begin) / 1e9
