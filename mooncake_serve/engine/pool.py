"""Bookkeeping of the KV pool: which block holds what, who uses it, what may be evicted.

Pure: no tensors, no clock, no threads. Each block is in exactly one state:

    free       on the free list
    private    used by requests (references > 0), without a key
    shared     has a key, is used
    cached     has a key, unused; evicted when the pool needs room, least recently used first

Keyed blocks form a tree, because a block's key chains over its prefix. A block is evicted only
when no block of the pool hangs below it, so a kept block can always be reached from the root.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    """A keyed block."""

    block: int
    parent: bytes | None
    children: int = 0


class BlockPool:
    """Reference counts, prefix tree and LRU of `blocks` pool blocks."""

    def __init__(
        self, blocks: int, note: Callable[[bytes, bool], None] = lambda _key, _here: None
    ) -> None:
        """`note(key, here)` hears of every block that gets its key or is evicted."""
        self.blocks = blocks
        self._note = note
        self._free = list(range(blocks - 1, -1, -1))
        self._references = [0] * blocks
        self._entries: dict[bytes, _Entry] = {}
        self._keys: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give at most: free and cached ones."""
        return len(self._free) + len(self._cached)

    def has(self, key: bytes) -> bool:
        """Whether a block with this key is in the pool."""
        return key in self._entries

    def match(self, keys: Sequence[bytes]) -> int:
        """Length of the longest run of present blocks from the first key."""
        for count, key in enumerate(keys):
            if key not in self._entries:
                return count
        return len(keys)

    def match_unused(self, keys: Sequence[bytes]) -> int:
        """How many blocks of the matching run are cached, so that using them takes from
        `available`."""
        matched = keys[: self.match(keys)]
        return sum(self._entries[key].block in self._cached for key in matched)

    def acquire(self, key: bytes) -> int | None:
        """Use the block with this key; None when it is not here."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self.retain(entry.block)
        return entry.block

    def allocate(self) -> int | None:
        """A block for new tokens, with one reference; evicts if needed. None when all are used."""
        if not self._free and not self._evict():
            return None
        block = self._free.pop()
        self._references[block] = 1
        return block

    def retain(self, block: int) -> None:
        """One more user of a used or cached block."""
        self._cached.pop(block, None)
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One user less. A keyed block without users stays cached, another becomes free."""
        assert self._references[block] > 0, f"block {block} was released too often"
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._keys:
                self._cached[block] = None
            else:
                self._free.append(block)

    def publish(self, key: bytes, parent: bytes | None, block: int) -> int:
        """Give a complete private block its key, so that others find it.

        The block of `parent` must be in use. Returns the block to use from now on: when the key
        is here already (both hold the same bytes), the caller's reference moves to its block.
        """
        entry = self._entries.get(key)
        if entry is not None:
            self.retain(entry.block)
            self.release(block)
            return entry.block
        assert self._references[block] > 0, "only a block in use gets a key"
        assert block not in self._keys, "a block has one key"
        if parent is not None:
            self._entries[parent].children += 1
        self._entries[key] = _Entry(block, parent)
        self._keys[block] = key
        self._note(key, True)
        return block

    def _evict(self) -> bool:
        """Free the least recently used cached block that has no children."""
        for block in self._cached:
            key = self._keys[block]
            entry = self._entries[key]
            if entry.children == 0:
                if entry.parent is not None:
                    self._entries[entry.parent].children -= 1
                del self._entries[key], self._keys[block], self._cached[block]
                self._free.append(block)
                self._note(key, False)
                return True
        return False

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        used = {block for block, count in enumerate(self._references) if count > 0}
        assert len(free) + len(cached) + len(used) == self.blocks, "a block is in two states"
        assert free | cached | used == set(range(self.blocks)), "a block is lost"
        assert all(count >= 0 for count in self._references)
        assert {entry.block: key for key, entry in self._entries.items()} == self._keys
        assert cached <= self._keys.keys(), "a cached block has no key"
        assert not free & self._keys.keys(), "a free block has a key"
        children = dict.fromkeys(self._entries, 0)
        for entry in self._entries.values():
            if entry.parent is not None:
                assert entry.parent in self._entries, "a kept block lost its prefix"
                children[entry.parent] += 1
        assert all(entry.children == children[key] for key, entry in self._entries.items())
