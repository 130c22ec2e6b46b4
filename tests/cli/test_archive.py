"""`store export` and `store import`: blocks move between stores, and bad files move nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_serve.archive import parents_first
from mooncake_serve.codec import portable
from mooncake_serve.store import BlockShape, StoreClient, StoreServer, block_keys

COMMAND = str(Path(sys.executable).with_name("mooncake-serve"))
DRAM = 64 << 20
SHAPE = BlockShape("bfloat16", 4, 32, 64)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mooncake-") as directory:
        yield Path(directory)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "store", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def filled(client: StoreClient) -> dict[bytes, bytes]:
    """Two chains of blocks, some of which a codec shrinks."""
    blocks: dict[bytes, bytes] = {}
    for name in ("one", "two"):
        keys = block_keys(name, b"", range(20), 4)
        data = [
            bytes([number]) * (SHAPE.nbytes // 2) + os.urandom(SHAPE.nbytes // 2)
            for number in range(5)
        ]
        assert client.put(keys, [None, *keys[:-1]], data, SHAPE) == ["stored"] * 5
        blocks |= dict(zip(keys, data, strict=True))
    return blocks


def test_blocks_move_from_store_to_store(folder: Path) -> None:
    archive = folder / "kv.tar"
    old, new = folder / "old" / "store.sock", folder / "new" / "store.sock"
    with StoreServer(socket=old, dram_bytes=DRAM, codec="fast") as server:
        with StoreClient.connect(server.socket) as client:
            blocks = filled(client)
        done = run("export", archive, "--socket", old)
        assert done.returncode == 0, done.stderr
        assert "10 blocks" in done.stderr
        assert run("export", archive, "--socket", old).returncode != 0, "never overwritten"
    with tarfile.open(archive) as tar:
        for key, block in blocks.items():
            member = tar.extractfile(f"blocks/{key.hex()}")
            assert member is not None
            shape, raw = portable.read(member.read())
            assert (shape.nbytes, raw) == (SHAPE.nbytes, block), "readable without the extension"
    with StoreServer(socket=new, dram_bytes=DRAM, codec="none") as server:
        for _ in range(2):
            done = run("import", archive, "--socket", new, "--tenant", "acme")
            assert done.returncode == 0, done.stderr
        assert "10 were there already" in done.stderr
        with StoreClient.connect(server.socket) as client:
            for key, block in blocks.items():
                out = bytearray(SHAPE.nbytes)
                assert client.read_into([key], [out]) == 1
                assert out == block
            assert client.stats()["tenants"]["acme"]["blocks"] == 10


def test_damaged_blocks_and_their_children_stay_out(folder: Path) -> None:
    archive, socket = folder / "kv.tar", folder / "new" / "store.sock"
    with StoreServer(socket=folder / "old" / "store.sock", dram_bytes=DRAM) as server:
        with StoreClient.connect(server.socket) as client:
            keys = block_keys("chain", b"", range(12), 4)
            client.put(keys, [None, *keys[:-1]], [os.urandom(4096)] * 3, BlockShape.opaque(4096))
        assert run("export", archive, "--socket", server.socket).returncode == 0
    contents = bytearray(archive.read_bytes())
    with tarfile.open(archive) as tar:
        contents[tar.getmember(f"blocks/{keys[1].hex()}").offset_data + 1000] ^= 1
    archive.write_bytes(contents)
    with StoreServer(socket=socket, dram_bytes=DRAM) as server:
        done = run("import", archive, "--socket", socket)
        assert done.returncode == 0, done.stderr
        assert "1 blocks" in done.stderr
        assert "2 left out" in done.stderr
        with StoreClient.connect(server.socket) as client:
            assert client.match(keys) == 1


@pytest.mark.parametrize("contents", [b"", b"x" * 4096, b"\x1f\x8b" + bytes(99)])
def test_a_file_that_is_no_archive_says_so(folder: Path, contents: bytes) -> None:
    archive, socket = folder / "kv.tar", folder / "new" / "store.sock"
    archive.write_bytes(contents)
    with StoreServer(socket=socket, dram_bytes=DRAM):
        done = run("import", archive, "--socket", socket)
    assert done.returncode != 0
    assert "is not an archive of blocks" in done.stderr
    assert "Traceback" not in done.stderr


def test_parents_come_first_and_orphans_not_at_all() -> None:
    a, b, c, d = (bytes([n]) * 32 for n in range(4))
    links = [(c, b), (b, a), (a, None), (d, bytes([9]) * 32)]
    assert parents_first(links) == [(a, None), (b, a), (c, b)]
