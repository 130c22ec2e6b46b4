"""Token ids to text, one token at a time, and stop strings across token borders.

A token may end in the middle of a character, and a stop string may begin in one token and end in
a later one. Text that could still change or be cut is held back; what `push` returned stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, without special tokens."""

_CONTEXT_TOKENS = 6
"""Tokens before the new one that may change how it decodes (spaces, joined characters)."""

_MAX_PENDING_TOKENS = 8
"""No character takes more tokens; what is still unfinished then is not going to finish."""


class Detokenizer:
    """Incremental text of one request."""

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = [text for text in stop if text]
        self._ids: list[int] = []
        self._context = 0
        """First id that is decoded again with each new one."""
        self._read = 0
        """Ids whose text was taken."""
        self._held = ""
        """Text that may be the beginning of a stop string."""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take a token; the text that is certain now. Sets `stopped` at a stop string."""
        self._ids.append(token_id)
        return self._take(self._fresh_text(final=False))

    def finish(self) -> str:
        """No more tokens: what is still held back. Empty after a stop string."""
        if self.stopped:
            return ""
        text = self._take(self._fresh_text(final=True))
        rest, self._held = self._held, ""
        return text + ("" if self.stopped else rest)

    def _fresh_text(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        unfinished = len(text) <= len(before) or text.endswith("\ufffd")
        if unfinished and not final and len(self._ids) - self._read < _MAX_PENDING_TOKENS:
            return ""
        self._read = len(self._ids)
        self._context = max(0, self._read - _CONTEXT_TOKENS)
        return text[len(before) :]

    def _take(self, text: str) -> str:
        if not self._stop:
            return text
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
