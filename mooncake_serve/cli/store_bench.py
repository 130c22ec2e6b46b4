"""How fast a live store answers a client of its own: medians of single calls, beside its load.

Blocks of random bytes under keys of this run alone; they are evicted in the end, whatever happens.
`mooncake-serve bench store` measures a store of its own, more closely, beside others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from mooncake_serve.bench.report import quantile, timed
from mooncake_serve.errors import StoreRefused
from mooncake_serve.store import BlockShape, StoreClient, block_keys

CALLS = 300


def measure(client: StoreClient, nbytes: int, blocks: int) -> dict[str, Any]:
    """µs by call, and bytes/s in GB of what copies. Raises StoreError.

    `match` asks for all blocks at once, every other call is of one. `missing` counts blocks that
    the store had evicted for others before they were read.
    """
    keys = block_keys(f"store bench {os.urandom(8).hex()}", b"", range(blocks), 1)
    shape, source, target = BlockShape.opaque(nbytes), os.urandom(nbytes), bytearray(nbytes)
    missing = 0

    def put(at: int) -> None:
        parent = keys[at - 1] if at else None
        (status,) = client.put([keys[at]], [parent], [source], shape)
        if status != "stored":
            raise StoreRefused(f"a put of {nbytes} bytes was {status}; choose a smaller --bytes")

    def read(at: int) -> None:
        nonlocal missing
        missing += 1 - client.read_into([keys[at]], [target])

    def lease() -> None:
        for held in client.lease(keys[:1]):
            if held is not None:
                held.release()

    try:
        puts, reads = _each(put, blocks), _each(read, blocks)
        leases = timed(lease, CALLS)
        matches = timed(lambda: client.match(keys), CALLS)
    finally:
        client.evict(keys)
    medians = {"put": puts, "read_into": reads, "lease_release": leases, "match": matches}
    us = {f"{name}_us_p50": quantile(seconds, 0.5) * 1e6 for name, seconds in medians.items()}
    rates = {f"{name}_gb_s": nbytes / us[f"{name}_us_p50"] / 1e3 for name in ("put", "read_into")}
    return {"bytes": nbytes, "blocks": blocks, **us, **rates, "missing": missing}


def _each(call: Callable[[int], None], times: int) -> list[float]:
    """Seconds of the call for each number, sorted."""
    seconds = []
    for at in range(times):
        began = time.perf_counter()
        call(at)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)
