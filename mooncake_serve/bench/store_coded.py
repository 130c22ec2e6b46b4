"""Verified reads from a store that codes, for `bench store`: the codec's rate inside the store.

Blocks are bfloat16 with a scale for each channel, as keys and values have; each is read once, in
place of being copied. Under `dense` the reads begin when the store has coded every block again, or
has kept it as it was because the denser form takes as many granules of the arena.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_serve.bench import store_peers as peers
from mooncake_serve.bench.report import progress, quantile
from mooncake_serve.store import BlockShape, StoreClient, block_keys

DISTINCT = 8
WAIT_S = 300.0


def measure(client: StoreClient, codec: str, shape: BlockShape, blocks: int) -> dict[str, Any]:
    """A row of `read_into`, and what the blocks took of the arena."""
    progress(f"{codec}: {shape.nbytes >> 10} KiB blocks")
    source = kv_like(shape, DISTINCT)
    recoded = looked_at(client)
    keys = block_keys(f"coded {codec} {shape.nbytes}", b"", range(blocks), 1)
    for at, key in enumerate(keys):
        (status,) = client.put(
            [key], [keys[at - 1] if at else None], [source[at % DISTINCT].data], shape
        )
        if status != "stored":
            raise RuntimeError(f"a put was {status}")
    if codec == "dense":
        wait_until_recoded(client, recoded + blocks)
    stats = client.stats()
    target = peers.touched(blocks, shape.nbytes)
    seconds = []
    for at, (key, buffer) in enumerate(zip(keys, target, strict=True)):
        start = time.perf_counter()
        got = client.read_into([key], [buffer.data])
        seconds.append(time.perf_counter() - start)
        if got != 1 or not np.array_equal(buffer, source[at % DISTINCT]):
            raise RuntimeError("a block that was stored could not be read back")
    client.evict(keys)
    return {
        "bytes": shape.nbytes,
        "codec": codec,
        "ours_gb_s": shape.nbytes / quantile(sorted(seconds), 0.5) / 1e9,
        "ratio": stats["physical_bytes"] / stats["logical_bytes"],
    }


def wait_until_recoded(client: StoreClient, blocks: int) -> None:
    """Until the background thread has looked at so many blocks since the store began."""
    deadline = time.monotonic() + WAIT_S
    while looked_at(client) < blocks:
        if time.monotonic() > deadline:
            raise TimeoutError("blocks were not coded again in time")
        time.sleep(0.05)


def looked_at(client: StoreClient) -> int:
    """How many blocks the background thread has coded again or left as they were."""
    stats = client.stats()
    return stats["transcoded_blocks"] + stats["transcode_kept_blocks"]


def kv_like(shape: BlockShape, blocks: int) -> NDArray[np.uint8]:
    """`[blocks, bytes]` of bfloat16."""
    generator = np.random.default_rng(0)
    scale = np.exp(generator.normal(0, 1, (1, shape.planes, 1, shape.channels)))
    size = (blocks, shape.planes, shape.tokens, shape.channels)
    values = (generator.normal(0, 1, size) * scale).astype(np.float32)
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    return words.reshape(blocks, -1).view(np.uint8)
