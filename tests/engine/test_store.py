"""The engine with the real store: blocks travel between engines, and its death costs nothing."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake_serve.store import NodeStore, StoreClient, StoreServer, block_keys
from tests.engine.chain_backend import ChainBackend, expected_tokens
from tests.engine.support import DictStore, chain_engine, generate, request, start

BLOCK = 16


def document(seed: int, length: int = 8 * BLOCK + 3) -> list[int]:
    return [(seed * 31 + 7 * each) % 250 for each in range(length)]


@pytest.fixture
def socket(tmp_path: Path) -> str:
    return str(tmp_path / "store.sock")


@pytest.fixture
def server(socket: str) -> Iterator[StoreServer]:
    with StoreServer(socket=socket, dram_bytes=64 << 20, ingest_bytes_max=1 << 20) as server:
        server.start()
        yield server
        server.stop()


@pytest.fixture
def stores(server: StoreServer, socket: str) -> Iterator[list[NodeStore]]:
    stores = [NodeStore(socket, ingest_bytes=1 << 20) for _ in range(2)]
    assert all(store.wait_until_healthy(30) for store in stores)
    yield stores
    for store in stores:
        store.close()


def engine(store: NodeStore):
    return chain_engine(ChainBackend(block_tokens=BLOCK), store)


def wanted(prompt: list[int]) -> list[int]:
    return expected_tokens(prompt, 4, block_tokens=BLOCK)


def test_another_engine_loads_what_one_published(stores: list[NodeStore]) -> None:
    with engine(stores[0]) as first, engine(stores[1]) as second:
        assert generate(first, [document(1)], 4) == [wanted(document(1))]
        assert first.flush()
        result = start(second, request(document(1), 4))
        assert result.finish().usage.cached_store_tokens == 8 * BLOCK
        assert result.tokens == wanted(document(1))


def test_an_engine_that_closes_publishes_what_it_has_computed() -> None:
    class SlowStore(DictStore):
        def put(self, *args: Any, **options: Any) -> list[str]:
            time.sleep(0.02)
            return super().put(*args, **options)

    store = SlowStore()
    with chain_engine(ChainBackend(block_tokens=BLOCK), store) as first:
        generate(first, [document(1)], 4)
    with chain_engine(ChainBackend(block_tokens=BLOCK), store) as second:
        result = start(second, request(document(1), 4))
        assert result.finish().usage.cached_store_tokens == 8 * BLOCK


class DeviceBackend(ChainBackend):
    """Its pool is not host memory."""

    stagings = 0

    def view_block(self, block: int) -> memoryview | None:
        return None

    def make_staging(self) -> memoryview:
        self.stagings += 1
        return super().make_staging()


def test_blocks_reach_a_device_through_one_buffer(stores: list[NodeStore]) -> None:
    device = DeviceBackend(block_tokens=BLOCK)
    with engine(stores[0]) as first, chain_engine(device, stores[1]) as second:
        prompts = [document(1), document(2)]
        assert generate(first, prompts, 4) == [wanted(each) for each in prompts]
        assert first.flush()
        for prompt in prompts:
            result = start(second, request(prompt, 4))
            assert result.finish().usage.cached_store_tokens == 8 * BLOCK
            assert result.tokens == wanted(prompt)
    assert device.stagings == 1


def test_a_store_that_stops_costs_hits_and_nothing_else(
    server: StoreServer, stores: list[NodeStore]
) -> None:
    with engine(stores[0]) as first, engine(stores[1]) as second:
        assert generate(first, [document(1)], 4) == [wanted(document(1))]
        assert first.flush()
        server.stop()
        prompts = [document(seed) for seed in range(1, 6)]
        assert generate(second, prompts, 4) == [wanted(each) for each in prompts]
        assert generate(first, prompts, 4) == [wanted(each) for each in prompts]
        assert first.flush()
        server.start()
        assert all(store.wait_until_healthy(60) for store in stores)
        assert generate(first, [document(9)], 4) == [wanted(document(9))]
        assert first.flush()
        result = start(second, request(document(9), 4))
        assert result.finish().usage.cached_store_tokens == 8 * BLOCK


def test_what_the_store_lost_is_published_again_when_it_is_used(stores: list[NodeStore]) -> None:
    """A prompt that stays hot in one pool must not stay cold for everybody else."""
    with engine(stores[0]) as first, engine(stores[1]) as second:
        generate(first, [document(1)], 4)
        assert first.flush()
        everything = block_keys(first.info.namespace, b"", document(1), BLOCK)
        with StoreClient.connect(stores[0].socket, timeout_s=20) as client:
            assert client.evict(everything) == 8
        again = start(first, request(document(1), 4))
        assert again.finish().usage.cached_pool_tokens == 8 * BLOCK
        assert first.flush()
        result = start(second, request(document(1), 4))
        assert result.finish().usage.cached_store_tokens == 8 * BLOCK
        assert result.tokens == again.tokens == wanted(document(1))
