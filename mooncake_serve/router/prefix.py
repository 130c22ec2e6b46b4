"""Which part of a prompt each node can supply, and from which tier: what the planner asks.

`NodeIndex` knows one node, by asking its store. Every failure of the store is an empty answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from mooncake_serve.store import NodeStore

Tier = Literal["dram"]


class Prefix(NamedTuple):
    """The first `tokens` tokens of a prompt, whose KV is in `tier`."""

    tokens: int
    tier: Tier = "dram"


class PrefixIndex(Protocol):
    """Answers where the blocks of a prompt are."""

    def match(
        self, keys: Sequence[bytes], block_tokens: int, tenant: str
    ) -> Mapping[str, Sequence[Prefix]]:
        """Usable prefixes by Ray node id; a node that holds nothing is absent."""
        ...


class NodeIndex:
    """The prefixes in the store of one node."""

    def __init__(self, node_id: str, store: NodeStore | None) -> None:
        self._node_id = node_id
        self._store = store

    def match(
        self, keys: Sequence[bytes], block_tokens: int, tenant: str
    ) -> Mapping[str, Sequence[Prefix]]:
        """Usable prefixes on this node. Blocks for 50 ms at most."""
        blocks = self._store.match(keys, tenant) if self._store is not None and keys else 0
        return {self._node_id: [Prefix(blocks * block_tokens)]} if blocks else {}
