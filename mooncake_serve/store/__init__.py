"""The node's KV store, typed: server, client, keys, and the engine's fail-safe view of it.

    with StoreServer(socket="/run/user/1000/mooncake/store.sock", dram_bytes=4 << 30):
        client = StoreClient.connect("/run/user/1000/mooncake/store.sock")
        keys = block_keys("my model, bf16, 256", b"", token_ids, 256)
        client.put(keys, [None, *keys[:-1]], blocks, BlockShape("bfloat16", 60, 256, 192))
        loaded = client.read_into(keys, buffers)

`StoreClient` raises on failure; `NodeStore` turns every failure into a miss.
"""

from mooncake_serve._store import (
    BlockShape,
    ClusterView,
    Hint,
    Lease,
    PeerSettings,
    StoreClient,
    StoreServer,
    block_keys,
    tenant_salt,
)
from mooncake_serve.store.node import NodeStore, NodeStoreStats

__all__ = [
    "BlockShape",
    "ClusterView",
    "Hint",
    "Lease",
    "NodeStore",
    "NodeStoreStats",
    "PeerSettings",
    "StoreClient",
    "StoreServer",
    "block_keys",
    "tenant_salt",
]
