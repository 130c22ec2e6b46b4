"""The link between two nodes is cut and healed: requests are answered right throughout."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_serve.engine.core import EngineCore
from mooncake_serve.store import NodeStore
from tests.cluster.namespaces import Node, Refused, cut, heal, joined
from tests.engine.chain_backend import ChainBackend, expected_tokens
from tests.engine.support import chain_engine, request, start
from tests.waiting import eventually

BLOCK = 16
BLOCKS = 8
TOKENS = 4


def document(seed: int) -> list[int]:
    return random.Random(seed).choices(range(250), k=BLOCKS * BLOCK + 3)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    try:
        with joined(tmp_path) as pair:
            yield pair
    except (Refused, FileNotFoundError) as refused:
        pytest.skip(f"no network namespaces here: {refused}")


@pytest.fixture
def stores(nodes: tuple[Node, Node]) -> Iterator[list[NodeStore]]:
    stores = [NodeStore(node.socket, ingest_bytes=1 << 20) for node in nodes]
    assert all(store.wait_until_healthy(30) for store in stores)
    yield stores
    for store in stores:
        store.close()


def answer(engine: EngineCore, seed: int) -> int:
    """Ask for a document's answer and check it; how many tokens came from the store."""
    result = start(engine, request(document(seed), TOKENS))
    usage = result.finish().usage
    assert result.tokens == expected_tokens(document(seed), TOKENS, block_tokens=BLOCK)
    return usage.cached_store_tokens


def peers(store: NodeStore) -> int:
    return (store.store_stats() or {}).get("peers_connected", -1)


def test_no_request_fails_while_the_link_is_cut(
    nodes: tuple[Node, Node], stores: list[NodeStore]
) -> None:
    first_node, _ = nodes
    here, there = stores
    seeds = itertools.count()

    with (
        chain_engine(ChainBackend(block_tokens=BLOCK), here) as first,
        chain_engine(ChainBackend(block_tokens=BLOCK), there) as second,
    ):

        def crosses() -> bool:
            """A document computed on the first node is loaded on the second."""
            seed = next(seeds)
            answer(first, seed)
            assert first.flush()
            return answer(second, seed) == BLOCKS * BLOCK

        eventually(crosses)
        wanted = [next(seeds) for _ in range(8)]
        for seed in wanted:
            answer(first, seed)
        assert first.flush()

        cut(first_node)
        # What the second node would fetch does not come; it computes.
        assert [answer(second, seed) for seed in wanted[:4]] == [0] * 4
        eventually(lambda: peers(there) == 0 and peers(here) == 0)
        assert [answer(second, seed) for seed in wanted[4:]] == [0] * 4
        answer(first, wanted[0])

        heal(first_node)
        eventually(lambda: peers(there) == 1 and peers(here) == 1)
        eventually(crosses)
