"""Blocks stored coded: exact, smaller for good, denser once idle, and counted to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mooncake_serve.errors import ConfigError
from mooncake_serve.store import BlockShape, StoreClient, StoreServer
from tests.store.processes import MIB, Process, chain
from tests.waiting import eventually

SHAPE = BlockShape("bfloat16", 8, 64, 192)
LARGE = BlockShape("bfloat16", 32, 128, 192)


def kv_like(seed: int, shape: BlockShape = SHAPE) -> bytes:
    """bfloat16 with a scale for each channel, as keys and values have."""
    generator = np.random.default_rng(seed)
    scale = np.exp(generator.normal(0, 1, (shape.planes, 1, shape.channels)))
    size = (shape.planes, shape.tokens, shape.channels)
    values = (generator.normal(0, 1, size) * scale).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def put(client: StoreClient, name: str, blocks: list[bytes], shape: BlockShape = SHAPE) -> Any:
    keys, parents = chain(name, len(blocks))
    assert client.put(keys, parents, blocks, shape) == ["stored"] * len(blocks)
    return keys


def read(client: StoreClient, keys: list[bytes], nbytes: int) -> list[bytes]:
    buffers = [bytearray(nbytes) for _ in keys]
    assert client.read_into(keys, buffers) == len(keys)
    return [bytes(buffer) for buffer in buffers]


def usage(client: StoreClient) -> dict[str, dict[str, Any]]:
    """Rows by codec; the sums of every row and of the store are right."""
    stats = client.stats()
    for row in [*stats["usage"], stats]:
        saved = row["codec_saved_bytes"] - row["metadata_bytes"] - row["rounding_bytes"]
        assert row["logical_bytes"] - saved == row["physical_bytes"]
    parts = ("resident", "leased", "quarantined")
    assert sum(stats[f"{part}_bytes"] for part in parts) == stats["physical_bytes"]
    return {row["codec"]: row for row in stats["usage"]}


@pytest.mark.parametrize("codec", ["none", "fast", "dense"])
def test_what_is_stored_coded_reads_back_exactly(socket: Path, codec: str) -> None:
    blocks = [kv_like(seed) for seed in range(6)]
    with StoreServer(socket=socket, dram_bytes=64 * MIB, codec=codec) as server:
        with StoreClient.connect(server.socket, timeout_s=20) as client:
            keys = put(client, "exact", blocks)
            assert read(client, keys, SHAPE.nbytes) == blocks
            assert server.stats()["codec"] == codec
            rows = usage(client)
            saved = sum(row["codec_saved_bytes"] for row in rows.values())
            assert saved == 0 if codec == "none" else saved > 0.27 * 6 * SHAPE.nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "opaque"])
def test_any_bits_survive(socket: Path, dtype: str, seed: int) -> None:
    """Among them NaNs with payloads, infinities, subnormals and both zeros."""
    generator = np.random.default_rng(seed)
    shapes = [BlockShape(dtype, *generator.integers(1, 40, 3).tolist()) for _ in range(20)]
    with StoreServer(socket=socket, dram_bytes=64 * MIB, codec="fast") as server:
        with StoreClient.connect(server.socket, timeout_s=20) as client:
            for number, shape in enumerate(shapes):
                spread = int(generator.integers(1, 257))
                block = generator.integers(0, spread, shape.nbytes).astype(np.uint8).tobytes()
                (key,) = put(client, f"bits {number}", [block], shape)
                assert read(client, [key], shape.nbytes) == [block]
                (lease,) = client.lease([key])
                assert lease is not None
                assert lease.shape == shape
                assert lease.verify()
            usage(client)


def test_coding_returns_capacity(socket: Path) -> None:
    held = {}
    for codec in ("none", "fast"):
        with StoreServer(socket=socket, dram_bytes=32 * MIB, codec=codec) as server:
            with StoreClient.connect(server.socket, timeout_s=20) as client:
                for seed in range(240):
                    put(client, f"chain {seed}", [kv_like(seed)])
                stats = client.stats()
                held[codec] = stats["blocks"]
                assert stats["blocks"] + stats["evicted_for_room"] == 240
                assert stats["physical_bytes"] > 0.9 * stats["capacity_bytes"]
    assert held["fast"] >= 1.33 * held["none"]


def test_what_cannot_be_coded_stays_raw_and_can_be_viewed(socket: Path) -> None:
    noise = np.random.default_rng(1).integers(0, 256, SHAPE.nbytes).astype(np.uint8).tobytes()
    with StoreServer(socket=socket, dram_bytes=64 * MIB, codec="fast") as server:
        with StoreClient.connect(server.socket, timeout_s=20) as client:
            coded, raw = put(client, "mixed", [kv_like(1), noise])
            (lease,) = client.lease([raw])
            assert lease is not None
            assert lease.codec == "none"
            assert bytes(memoryview(lease)) == noise
            (lease,) = client.lease([coded])
            assert lease is not None
            assert lease.codec == "fast"
            with pytest.raises(BufferError, match=r"stored coded.*read_into"):
                memoryview(lease)
            physical = client.stats()["physical_bytes"]
            assert physical <= 1.01 * SHAPE.nbytes + 0.75 * SHAPE.nbytes


def test_idle_blocks_become_dense_while_they_are_read(socket: Path) -> None:
    blocks = [kv_like(seed) for seed in range(8)]
    server = StoreServer(
        socket=socket,
        dram_bytes=64 * MIB,
        codec="dense",
        transcode_share=1.0,
        transcode_idle_s=0.0,
    )
    with server, StoreClient.connect(server.socket, timeout_s=20) as client:
        keys = put(client, "idle", blocks)
        while client.stats()["transcoded_blocks"] < len(blocks):
            assert read(client, keys, SHAPE.nbytes) == blocks
        rows = usage(client)
        assert rows.keys() == {"dense"}
        dense = rows["dense"]["physical_bytes"]
        assert dense < 0.7 * rows["dense"]["logical_bytes"]
        leases = client.lease(keys)
        assert [lease.codec for lease in leases if lease] == ["dense"] * len(blocks)
        assert all(lease.verify() for lease in leases if lease)
        del leases
        assert read(client, keys, SHAPE.nbytes) == blocks
        assert client.evict(keys) == len(blocks)
        eventually(lambda: client.stats()["free_bytes"] == client.stats()["capacity_bytes"])


def test_dense_in_a_full_store_holds_more_than_fast(socket: Path) -> None:
    held = {}
    for codec in ("fast", "dense"):
        with StoreServer(
            socket=socket,
            dram_bytes=32 * MIB,
            codec=codec,
            transcode_share=1.0,
            transcode_idle_s=0.0,
        ) as server:
            with StoreClient.connect(server.socket, timeout_s=20) as client:
                for seed in range(200):
                    put(client, f"chain {seed}", [kv_like(seed)])
                    if codec == "dense" and seed % 20 == 0:
                        eventually(lambda: "fast" not in usage(client))
                held[codec] = client.stats()["blocks"]
                usage(client)
    assert held["dense"] > held["fast"]


def test_auto_says_what_it_chose_and_why(socket: Path) -> None:
    with StoreServer(socket=socket, dram_bytes=64 * MIB, codec="auto") as server:
        stats = server.stats()
        assert stats["codec"] in {"none", "fast"}
        assert stats["codec_why"].startswith("auto: decoding at ")
        assert stats["os_arena_bytes"] == stats["capacity_bytes"]
        assert stats["os_private_bytes"] > 0


def test_an_unknown_codec_names_the_field(socket: Path) -> None:
    with pytest.raises(ConfigError, match=r"codec: .*none, fast, dense or auto"):
        StoreServer(socket=socket, dram_bytes=64 * MIB, codec="zip")


def test_sharing_is_counted_by_process(socket: Path) -> None:
    with StoreServer(socket=socket, dram_bytes=64 * MIB, codec="fast") as server:
        with StoreClient.connect(server.socket, timeout_s=20) as client:
            keys, _ = chain("held", 1)
            put(client, "held", [kv_like(1)])
            read(client, keys, SHAPE.nbytes)
            assert client.stats()["shared_saved_bytes"] == 0
            # Of two processes with successive numbers, one at least is not counted as this one.
            with other_process(server), other_process(server):
                shared = client.stats()["shared_saved_bytes"]
                assert shared in {SHAPE.nbytes, 2 * SHAPE.nbytes}


def other_process(server: StoreServer) -> Process:
    return Process("hold_leases", server.socket, "held", 1)


def test_the_store_lists_its_blocks(socket: Path) -> None:
    with StoreServer(socket=socket, dram_bytes=64 * MIB, index_bytes=2 * MIB) as server:
        with StoreClient.connect(server.socket, timeout_s=20) as client:
            assert client.blocks() == []
            keys, parents = chain("list", 9000)
            client.put(keys, parents, [bytes(16)] * 9000, BlockShape.opaque(16))
            assert sorted(client.blocks()) == sorted(zip(keys, parents, strict=True))
            client.evict(keys[5:6])
            assert len(client.blocks()) == 8999


DISK_CODECS = {
    "none": ("fast", 1.0, 1.1),
    "fast": ("none", 0.65, 0.76),
    "dense": ("fast", 0.6, 0.7),
    None: ("fast", 0.65, 0.76),
}
"""How memory stores, and what the disk holds of the raw bytes, by the disk's codec."""


@pytest.mark.parametrize("codec", DISK_CODECS)
def test_the_disk_stores_in_its_own_form(socket: Path, tmp_path: Path, codec: str | None) -> None:
    memory, least, most = DISK_CODECS[codec]
    blocks = [kv_like(seed) for seed in range(8)]
    settings: dict[str, Any] = {
        "dram_bytes": 64 * MIB,
        "codec": memory,
        "nvme_path": tmp_path / "nvme",
        "nvme_bytes": 64 * MIB,
        "nvme_codec": codec,
        "transcode_share": 1.0,
    }
    with StoreServer(socket=socket, **settings) as server:
        with StoreClient.connect(socket, timeout_s=20) as client:
            keys = put(client, "disk", blocks)
            assert server.drain(timeout_s=60) == len(blocks)
            stats = client.stats()
            assert stats["nvme_recoded"] == (len(blocks) if codec else 0)
            assert stats["nvme_codec_why"] == ("as configured" if codec else "as in memory")
            share = stats["nvme_live_bytes"] / (len(blocks) * SHAPE.nbytes)
            assert least < share < most
            assert usage(client).keys() == {memory}, "memory keeps its form"
    with StoreServer(socket=socket, **settings):
        with StoreClient.connect(socket, timeout_s=20) as client:
            assert read(client, keys, SHAPE.nbytes) == blocks
            assert usage(client).keys() == {codec or memory}


def test_the_disk_decides_by_its_rate(socket: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"nvme_path": tmp_path / "nvme", "nvme_bytes": 64 * MIB}
    with StoreServer(socket=socket, dram_bytes=64 * MIB, nvme_codec="auto", **settings) as server:
        with StoreClient.connect(socket, timeout_s=20) as client:
            before = client.stats()["nvme_codec_why"]
            assert before == "auto: as in memory until the disk's rate is known"
            put(client, "auto", [kv_like(seed, LARGE) for seed in range(2)], LARGE)
            assert server.drain(timeout_s=60) == 2
            assert "the disk reads at" in client.stats()["nvme_codec_why"]
    with pytest.raises(ConfigError, match="no codec"):
        StoreServer(socket=socket, dram_bytes=64 * MIB, nvme_codec="lossy", **settings)
