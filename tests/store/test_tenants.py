"""Tenants on one store, in processes of their own: a flood by one leaves the other its blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncake_serve.store import BlockShape, StoreClient, tenant_salt
from mooncake_serve.store import block_keys as keys_of
from tests.store.processes import MIB, Process, chain

SHAPE = BlockShape.opaque(MIB // 4)
DRAM, QUOTA, DISK = 64 * MIB, 16 * MIB, 64 * MIB
BLOCKS = 32
"""Of the tenant that is flooded: half of its quota."""


def put(client: StoreClient, tenant: str) -> list[bytes]:
    keys, parents = chain(f"document of {tenant}", BLOCKS)
    blocks = [bytes([at]) * SHAPE.nbytes for at in range(BLOCKS)]
    assert client.put(keys, parents, blocks, SHAPE, tenant) == ["stored"] * BLOCKS
    return keys


def flooded(socket: Path, nvme: Path, quota: int, disk: int) -> tuple[int, dict[str, Any]]:
    """How many of a quiet tenant's blocks are still read after another has put a thousand."""
    with Process("quota_store", socket, DRAM, quota, nvme, disk):
        with StoreClient.connect(socket, timeout_s=30.0) as client:
            keys = put(client, "quiet")
            with Process("flood", socket, "loud", SHAPE.nbytes) as flood:
                assert flood.said == "a thousand blocks"
            buffers = [bytearray(SHAPE.nbytes) for _ in keys]
            held = client.read_into(keys, buffers, "quiet", timeout_s=30.0)
            assert all(buffers[at] == bytes([at]) * SHAPE.nbytes for at in range(held))
            return held, client.stats()


@pytest.mark.parametrize("disk", [0, DISK], ids=["memory", "disk"])
def test_a_flood_leaves_the_other_tenants_hits(socket: Path, tmp_path: Path, disk: int) -> None:
    held, stats = flooded(socket, tmp_path / "nvme", QUOTA, disk)
    assert held == BLOCKS
    assert stats["tenants"]["loud"]["bytes"] <= QUOTA
    assert stats["puts_stored"] > 900, "the flood was taken, at its own cost"


def test_without_quotas_a_flood_takes_all(socket: Path, tmp_path: Path) -> None:
    """What the quota is for: the same flood, and nothing of the quiet tenant is left."""
    held, _ = flooded(socket, tmp_path / "nvme", 0, 0)
    assert held == 0


def test_the_same_tokens_have_nothing_in_common(socket: Path) -> None:
    """Keys of two tenants differ in every block, and so do those of a guessed secret."""
    tokens = range(4 * 16)
    salts = [tenant_salt(b"the cluster's secret", name) for name in ("acme", "umbrella")]
    salts.append(tenant_salt(b"a guess at the secret", "acme"))
    chains = [keys_of("model", salt, tokens, 16) for salt in salts]
    assert len({key for keys in chains for key in keys}) == 3 * 4
    with Process("store", socket, DRAM), StoreClient.connect(socket, timeout_s=30.0) as client:
        mine, other, guessed = chains
        blocks = [bytes(SHAPE.nbytes)] * 4
        client.put(mine, [None, *mine[:-1]], blocks, SHAPE, "acme")
        before = client.stats()
        assert client.match(mine, "acme") == 4
        for keys in (other, guessed):
            assert client.match(keys, "umbrella") == 0
            assert client.lease(keys, "umbrella") == [None] * 4
        # Equal bytes under other keys are other blocks: nothing tells that they were there.
        stored = client.put(other, [None, *other[:-1]], blocks, SHAPE, "umbrella")
        assert stored == ["stored"] * 4
        assert client.stats()["blocks"] == before["blocks"] + 4
