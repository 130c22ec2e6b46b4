"""Clients that do what ours never does: rewrite what they put meanwhile, never take an answer."""

from __future__ import annotations

import mmap
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from mooncake_serve.store import BlockShape, StoreClient, StoreServer
from tests.store.processes import MIB, chain
from tests.store.test_wire import FAILED, LEASE, PUT, answer, frame, hello
from tests.waiting import eventually

LIST = 0x20
SHAPE = BlockShape("bfloat16", 4, 64, 128)
BFLOAT16 = 1
ROUNDS = 200


def kv_like(generator: np.random.Generator) -> bytes:
    values = generator.standard_normal(SHAPE.nbytes // 2, np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@pytest.mark.parametrize("codec", ["none", "fast"])
def test_bytes_that_change_while_they_are_put_are_stored_as_they_were_read(
    socket: Path, codec: str, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    with (
        StoreServer(socket=socket, dram_bytes=64 * MIB, codec=codec),
        StoreClient.connect(socket, timeout_s=20.0) as client,
    ):
        raw, fds = hello(socket, ingest_bytes=MIB)
        own = mmap.mmap(fds[1], MIB + 4096)
        own[MIB : MIB + 8] = struct.pack("<Q", SHAPE.nbytes)
        ended = threading.Event()

        def scribble() -> None:
            contents = [kv_like(generator) for _ in range(4)]
            while not ended.is_set():
                for content in contents:
                    own[: SHAPE.nbytes] = content

        scribbler = threading.Thread(target=scribble)
        scribbler.start()
        keys = [chain(f"changing {number}", 1)[0][0] for number in range(ROUNDS)]
        head = struct.pack("<BIII", BFLOAT16, SHAPE.planes, SHAPE.tokens, SHAPE.channels)
        try:
            for key in keys:
                item = key + bytes(32) + struct.pack("<Q", 0)
                raw.sendall(frame(PUT, head + bytes(7) + struct.pack("<I", 1) + item))
                op, message = answer(raw)
                assert op != FAILED, message
        finally:
            ended.set()
            scribbler.join()
        buffer = bytearray(SHAPE.nbytes)
        assert sum(client.read_into([key], [buffer]) for key in keys) == ROUNDS
        assert client.verify()["corrupt"] == 0
        assert client.stats()["corrupt_dropped"] == 0
        own.close()
        raw.close()
        [os.close(fd) for fd in fds]


def test_a_client_that_takes_no_answer_is_ended_and_costs_no_memory(socket: Path) -> None:
    keys, parents = chain("listed", 4000)
    with (
        StoreServer(socket=socket, dram_bytes=64 * MIB, index_bytes=4 * MIB),
        StoreClient.connect(socket, timeout_s=20.0) as client,
    ):
        assert client.put(keys, parents, [b"x"] * 4000, BlockShape.opaque(1)) == ["stored"] * 4000
        raw, fds = hello(socket)
        raw.sendall(frame(LEASE, bytes(16) + struct.pack("<I", 1) + keys[0]))
        assert answer(raw)[0] != FAILED
        before = client.stats()["os_private_bytes"]
        raw.sendall(frame(LIST, struct.pack("<I", 0)) * 3000)  # 750 MB of answers
        seen = []

        def violated() -> int:
            stats = client.stats()
            seen.append(stats["os_private_bytes"])
            return stats["sessions_violated"]

        assert eventually(violated) == 1
        assert max(seen) - before < 32 * MIB
        assert client.stats()["quarantined_bytes"] > 0, "its process lives, and may still read"
        assert client.match(keys) == 4000
        raw.close()
        [os.close(fd) for fd in fds]
