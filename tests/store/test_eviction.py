"""What goes when there is no room: the policies, and what callers know of their blocks."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from mooncake_serve.errors import ConfigError
from mooncake_serve.store import BlockShape, Hint, StoreClient, StoreServer, block_keys
from tests.store.processes import MIB

SHAPE = BlockShape.opaque(64 << 10)
BLOCK = bytes(SHAPE.nbytes)


def put(client: StoreClient, key: bytes, hint: Hint | None = None) -> None:
    assert client.put([key], [None], [BLOCK], SHAPE, hint=hint) == ["stored"]


@pytest.mark.parametrize("eviction", ["ours", "lru"])
def test_the_policy_is_chosen_and_shown(socket: Path, eviction: str) -> None:
    with StoreServer(socket=socket, dram_bytes=16 * MIB, eviction=eviction) as server:
        assert server.stats()["eviction"] == eviction


def test_an_unknown_policy_names_the_field(socket: Path) -> None:
    with pytest.raises(ConfigError, match="eviction"):
        StoreServer(socket=socket, dram_bytes=16 * MIB, eviction="fifo")


def test_a_conversation_that_is_over_makes_room_first(socket: Path) -> None:
    """Once hints have come true for a while, blocks of ended sessions go before older ones."""
    over, goes_on = Hint(session_end=True), Hint(priority=100)
    keys = block_keys("hints", b"", range(6000), 1)
    with StoreServer(socket=socket, dram_bytes=32 * MIB) as server:
        client = StoreClient.connect(server.socket)
        for at in range(0, 4000, 2):
            put(client, keys[at], goes_on)
            put(client, keys[at + 1], over)
            if at >= 100:
                for lease in client.lease([keys[at - 100]]):
                    assert lease is not None
        stays, goes = keys[4000:4040], keys[4040:4080]
        for key in stays:
            put(client, key, goes_on)
        for key in goes:
            put(client, key, over)
        for key in keys[4100:4200]:
            put(client, key)
        kept = sum(client.match([key]) for key in stays)
        gone = sum(1 - client.match([key]) for key in goes)
        assert min(kept, gone) > 30, (kept, gone)


def test_hints_are_checked_and_travel() -> None:
    hint = Hint(priority=-3, session_end=True, expected_reuse_s=7)
    assert copy.deepcopy(hint) == hint
    assert repr(hint) == "Hint(priority=-3, session_end=True, expected_reuse_s=7)"
    with pytest.raises(ValueError, match="-100 to 100"):
        Hint(priority=101)
