"""The pool's bookkeeping against a model: no block lost, shared wrongly, or evicted in use."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_serve.engine.pool import BlockPool

BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Holders take chains of blocks as sequences do: from the root, released deepest first."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.holders: list[tuple[list[bytes], list[int]]] = []

    @rule(chain=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def take(self, chain: list[int]) -> None:
        keys = [bytes(chain[: end + 1]) for end in range(len(chain))]
        found = self.pool.match(keys)
        blocks = []
        for index, key in enumerate(keys):
            block = self.pool.acquire(key)
            assert (block is not None) == (index < found)
            if block is None:
                block = self.pool.allocate()
                if block is None:
                    break
                parent = keys[index - 1] if index else None
                assert self.pool.publish(key, parent, block) == block
            blocks.append(block)
        self.holders.append((keys[: len(blocks)], blocks))

    @rule(private=st.integers(1, 3))
    def take_private(self, private: int) -> None:
        blocks = [self.pool.allocate() for _ in range(private)]
        self.holders.append(([], [block for block in blocks if block is not None]))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holders) - 1))
        keys, blocks = self.holders.pop(index)
        for block in reversed(blocks):
            self.pool.release(block)
        assert self.pool.match(keys) >= 0

    @invariant()
    def holders_keep_their_blocks(self) -> None:
        self.pool.check_integrity()
        used = {block for _, blocks in self.holders for block in blocks}
        assert self.pool.available == BLOCKS - len(used)
        for keys, blocks in self.holders:
            assert self.pool.match(keys) == len(keys)
            assert [self.pool.acquire(key) for key in keys] == blocks[: len(keys)]
            for block in reversed(blocks[: len(keys)]):
                self.pool.release(block)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_least_recently_used_prefix_goes_first() -> None:
    pool = BlockPool(4)
    for root in (b"a", b"b"):
        parent, blocks = None, []
        for key in (root, root + b"1"):
            block = pool.allocate()
            assert block is not None
            pool.publish(key, parent, block)
            blocks.append(block)
            parent = key
        for block in reversed(blocks):
            pool.release(block)
    touched = pool.acquire(b"a")
    assert touched is not None
    pool.release(touched)
    assert pool.allocate() is not None
    assert [pool.has(key) for key in (b"a", b"a1", b"b", b"b1")] == [True, False, True, True]
    pool.check_integrity()


def test_publishing_a_present_key_moves_to_its_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    assert first is not None
    assert second is not None
    assert pool.publish(b"k", None, first) == first
    assert pool.publish(b"k", None, second) == first
    assert pool.available == 1
    pool.release(first)
    pool.release(first)
    pool.check_integrity()
    assert pool.available == 2
