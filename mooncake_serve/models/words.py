"""Token ids of words, remembered: a prompt is looked up word by word instead of being merged again.

A byte-level BPE tokenizer first cuts a text into words, each with the space before it, and merges
within words only. So between two characters that are no white space, a space is where a text may be
cut: the ids of both parts, one after the other, are those of the whole. `Words` remembers the ids
of what lies between such cuts, and asks the tokenizer for what it does not know.

That holds for the cutting rules named here and for no others: `Words.of` gives None for a tokenizer
that normalises, cuts or finds its own tokens in another way; it encodes whole texts. Thread-safe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Self

WORDS_MAX = 1 << 16
"""About 20 MB. Beyond it all are forgotten: counting uses would cost each lookup more."""
WORD_CHARS_MAX = 32
PART_CHARS = 1 << 14
"""Looked up at once: a millisecond during which no other thread runs."""

CUT = re.compile(r" (?=\S)(?<=\S )")
BEGIN = " "
"""Marks the first word of a text, which has no space before it. No other word begins with one."""

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
QWEN = rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}|{_REST}"
RULES = frozenset({LLAMA3, QWEN})
"""Beside GPT-2's, which is part of `ByteLevel`. In none does a match hold a space anywhere but at
its beginning, or depend on what is before it."""


class Words:
    """The memory of one tokenizer."""

    def __init__(self, backend: Any) -> None:
        """`backend` is a `tokenizers.Tokenizer` that `of` accepts."""
        self._backend = backend
        self._known: dict[str, list[int]] = {}
        self._before, self._after = _special_tokens(backend)

    @classmethod
    def of(cls, backend: Any) -> Self | None:
        """For a `tokenizers.Tokenizer`; None if its texts may not be cut at spaces."""
        return cls(backend) if _cuts_at_spaces(json.loads(backend.to_str())) else None

    def encode(self, text: str, *, special_tokens: bool) -> list[int]:
        """What the tokenizer gives; `special_tokens` are those it puts around every text."""
        ids = list(self._before) if special_tokens else []
        mark = BEGIN
        for part in _parts(text):
            ids += self._part(part, mark)
            mark = ""
        return ids + self._after if special_tokens else ids

    def _part(self, part: str, mark: str) -> list[int]:
        words = part.split(" ") if len(part) <= 2 * PART_CHARS else [part]
        words[0] = mark + words[0]
        try:
            # Known words begin and end without white space: between them the text may be cut.
            return list(chain.from_iterable(map(self._known.__getitem__, words)))
        except KeyError:
            return self._learn(part, mark)

    def _learn(self, part: str, mark: str) -> list[int]:
        words = CUT.split(part)
        words[0] = mark + words[0]
        known = {word: self._known.get(word) for word in words}
        unknown = [word for word, ids in known.items() if ids is None]
        texts = [word[1:] if word.startswith(BEGIN) else f" {word}" for word in unknown]
        encoded = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        fresh = {word: one.ids for word, one in zip(unknown, encoded, strict=True)}
        self._remember(fresh)
        known.update(fresh)
        return list(chain.from_iterable(known[word] or () for word in words))

    def _remember(self, fresh: dict[str, list[int]]) -> None:
        if len(self._known) > WORDS_MAX:
            self._known.clear()
        for word, ids in fresh.items():
            if len(word) <= WORD_CHARS_MAX and not word[-1].isspace():
                self._known[word] = ids


def _special_tokens(backend: Any) -> tuple[list[int], list[int]]:
    """What comes before and after every text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    begin = next(at for at in range(len(whole)) if whole[at : at + len(bare)] == bare)
    return whole[:begin], whole[begin + len(bare) :]


def _parts(text: str) -> Iterator[str]:
    """The text, cut where it may be."""
    begin = 0
    while (cut := CUT.search(text, begin + PART_CHARS)) is not None:
        yield text[begin : cut.start()]
        begin = cut.end()
    yield text[begin:]


def _cuts_at_spaces(tokenizer: dict[str, Any]) -> bool:
    model, normalizer = tokenizer["model"], tokenizer["normalizer"]
    return (
        model["type"] == "BPE"
        and not model["dropout"]
        # NFC composes nothing with a space.
        and (normalizer is None or normalizer["type"] == "NFC")
        and tokenizer["truncation"] is None
        and tokenizer["padding"] is None
        and _are_known_rules(tokenizer["pre_tokenizer"])
        and not any(map(_reaches_beyond_words, tokenizer["added_tokens"]))
    )


def _are_known_rules(cutting: dict[str, Any] | None) -> bool:
    if cutting is None:
        return False
    steps = cutting["pretokenizers"] if cutting["type"] == "Sequence" else [cutting]
    return all(map(_is_known_rule, steps)) and any(
        step["type"] == "Split" or step.get("use_regex") for step in steps
    )


def _is_known_rule(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        isolates = step["behavior"] == "Isolated" and not step["invert"]
        return isolates and step["pattern"].get("Regex") in RULES
    return step["type"] == "Digits" or (
        step["type"] == "ByteLevel" and not step["add_prefix_space"]
    )


def _reaches_beyond_words(token: dict[str, Any]) -> bool:
    """Added tokens are found in the text before it is cut by any rule."""
    spaced = any(map(str.isspace, token["content"]))
    return spaced or token["lstrip"] or token["rstrip"]
