"""What makes two KV blocks interchangeable: the namespace at the root of every block key.

Blocks of different namespaces never meet, in the pool or in the store. A namespace covers the
model (configuration, weights, dtype), the bytes' layout, and the numerics id: everything that can
change a bit of KV when the same tokens are computed again.
"""

from __future__ import annotations

import os
import platform

import torch
import transformers

from mooncake_serve.engine.protocol import Backend

ENGINE_VERSION = 1
"""Raise it whenever a change to the engine may change a bit of KV."""


def torch_numerics_id(
    *, device: torch.device, threads: int, kernel_id: str, block_tokens: int
) -> str:
    """Numerics id of kernels that come from torch, whose bits depend on shapes and threads."""
    if device.type == "cpu":
        where = f"cpu:{platform.machine()}:{torch.backends.cpu.get_cpu_capability()}"
        where += f":amx{int(torch.cpu._is_amx_tile_supported())}"
        where += f":{os.environ.get('ONEDNN_MAX_CPU_ISA', 'default')}:threads{threads}"
    else:
        where = f"{torch.cuda.get_device_name(device)}:cuda{torch.version.cuda}"
    return "/".join(
        [
            f"engine{ENGINE_VERSION}",
            f"torch{torch.__version__}",
            f"transformers{transformers.__version__}",
            where,
            kernel_id,
            f"B{block_tokens}",
        ]
    )


def namespace(backend: Backend, *, relaxed: bool) -> str:
    """Root of the block keys for one backend; the tenant's salt is added by `block_keys`."""
    layout = backend.layout
    shape = f"{layout.layers}x{layout.kv_heads}x{layout.head_dim}x{layout.block_tokens}"
    parts = [backend.fingerprint, layout.dtype, layout.order, shape, backend.numerics_id]
    return "|".join([*parts, "relaxed" if relaxed else "canonical"])
