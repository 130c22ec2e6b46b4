"""A backend whose KV is a hash chain: cheap, exact, and wrong as soon as anything is wrong.

The 8 bytes kept for a position are the hash of the position before (read from the pool through
the block table), the token, and how the forward was cut. A wrong block, a lost or reused page, or
a cut that is not canonical changes every later position and with it every sampled token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from mooncake_serve.engine.protocol import KVLayout, WorkItem

STATE_BYTES = 8


class ChainBackend:
    """Implements `Backend`."""

    name = "chain"
    device = "cpu"
    numerics_id = "chain/1"
    fingerprint = "chain"
    exact = True
    vocab_size = 251
    eos_token_ids = ()
    max_context = 4096

    def __init__(self, *, block_tokens: int = 4, any_cut: bool = False, max_decode_rows: int = 32):
        self.layout = KVLayout(1, 1, 1, block_tokens, "float32")
        self.any_cut = any_cut
        self.max_decode_rows = max_decode_rows
        self.forwards: list[list[tuple[int, int]]] = []
        self.fail_next: Exception | None = None

    def allocate_pool(self, blocks: int) -> None:
        self._pool = bytearray(blocks * self.layout.block_bytes)

    def forward(self, batch: Sequence[WorkItem]) -> torch.Tensor:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        assert batch
        self.forwards.append([(item.start, len(item.tokens)) for item in batch])
        if not self.any_cut:
            lengths = [len(item.tokens) for item in batch]
            assert len(batch) == 1 or lengths == [1] * len(batch), "prefill shares a forward"
            assert len(batch) <= self.max_decode_rows
        rows = [self._run(item) for item in batch]
        states = [row for row, item in zip(rows, batch, strict=True) if item.logits]
        logits = torch.zeros(len(states), self.vocab_size)
        for row, state in enumerate(states):
            logits[row, int.from_bytes(state, "little") % self.vocab_size] = 1.0
        return logits

    def _run(self, item: WorkItem) -> bytes:
        cut = b"" if self.any_cut else bytes([item.start % 256, len(item.tokens)])
        state = self._at(item.table, item.start - 1) if item.start else bytes(STATE_BYTES)
        for position, token in enumerate(item.tokens, start=item.start):
            data = state + token.to_bytes(4, "little") + cut
            state = hashlib.blake2b(data, digest_size=STATE_BYTES).digest()
            self._pool[self._slice(item.table, position)] = state
        return state

    def _at(self, table: Sequence[int], position: int) -> bytes:
        return bytes(self._pool[self._slice(table, position)])

    def _slice(self, table: Sequence[int], position: int) -> slice:
        index, offset = divmod(position, self.layout.block_tokens)
        begin = table[index] * self.layout.block_bytes + offset * STATE_BYTES
        return slice(begin, begin + STATE_BYTES)

    def view_block(self, block: int) -> memoryview | None:
        return self.read_block(block)

    def read_block(self, block: int) -> memoryview:
        size = self.layout.block_bytes
        return memoryview(self._pool)[block * size : (block + 1) * size]

    def write_block(self, block: int, data: memoryview) -> None:
        self.read_block(block)[:] = data

    def make_staging(self) -> memoryview:
        return memoryview(bytearray(self.layout.block_bytes))

    def copy_block(self, source: int, target: int) -> None:
        self.read_block(target)[:] = self.read_block(source)

    def close(self) -> None:
        pass


def expected_tokens(prompt: Sequence[int], count: int, *, block_tokens: int, any_cut: bool = False):
    """What a request alone, with nothing cached, generates."""
    backend = ChainBackend(block_tokens=block_tokens, any_cut=any_cut)
    blocks = -(-(len(prompt) + count) // block_tokens)
    backend.allocate_pool(blocks)
    table = list(range(blocks))
    tokens, at = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        whole = (len(prompt) - 1) // block_tokens * block_tokens
        end = at + block_tokens if at < whole else max(len(prompt), at + 1)
        logits = backend.forward([WorkItem(tokens[at:end], at, table, True)])
        if end == len(tokens):
            tokens.append(int(logits[0].argmax()))
        at = end
    return tokens[len(prompt) :]
