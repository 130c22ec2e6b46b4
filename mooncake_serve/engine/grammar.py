"""Structured output: a grammar says which tokens may come next, and follows those that were chosen.

A grammar is llguidance's text form: made and checked by the ingress (`json_grammar`,
`check_grammar`), compiled by the engine (`Grammars`), and followed by one request (`Matcher`). The
mask is made on the CPU from the tokenizer alone, so it is the same for every backend. A grammar
that cannot be compiled is an InvalidRequest; one that fails while it runs (the library's limits)
is a GrammarFailed, which ends its request and no other.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_serve.errors import EngineFailed, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from llguidance import LLMatcher, LLTokenizer

GRAMMAR_CHARS_MAX = 256 << 10
JSON_SPACING: Any = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""One way to write each value: a model cannot lose itself in blanks."""


class GrammarFailed(EngineFailed):
    """The grammar could not be followed any further."""


def json_grammar(schema: dict[str, Any] | bool) -> str:
    """The grammar of JSON values of a schema."""
    from llguidance import LLMatcher

    whole = schema if isinstance(schema, dict) else {"allOf": [schema]}
    return LLMatcher.grammar_from_json_schema(json.dumps(whole), overrides=JSON_SPACING)


def check_grammar(grammar: str, param: str) -> None:
    """Raise InvalidRequest, naming `param`, unless the grammar compiles."""
    from llguidance import LLMatcher

    if len(grammar) > GRAMMAR_CHARS_MAX:
        raise InvalidRequest(
            f"{param}: larger than {GRAMMAR_CHARS_MAX} characters", param=param, code="too_large"
        )
    wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        reason = " ".join(messages[0].split())[:500]
        raise InvalidRequest(f"{param}: {reason}", param=param, code="invalid_schema")


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is transformers' fast one. It is converted at the first use: a second."""
        self._tokenizer = tokenizer
        self._converted: LLTokenizer | None = None
        self._lock = threading.Lock()

    def matcher(self, grammar: str, vocab_size: int, eos_token_ids: Sequence[int]) -> Matcher:
        """A request's own matcher; milliseconds. Raises InvalidRequest."""
        from llguidance import LLMatcher

        with self._lock:
            if self._converted is None:
                self._converted = self._convert(vocab_size, eos_token_ids)
        matcher = LLMatcher(self._converted, grammar, log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:500]
            raise InvalidRequest(f"response_format: {reason}", param="response_format")
        return Matcher(matcher)

    def _convert(self, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, vocab_size, list(eos_token_ids) or None)
        except ValueError as err:
            raise InvalidRequest(
                f"response_format: not with this model's tokenizer: {err}",
                param="response_format",
            ) from err


class Matcher:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Nothing but the end may follow."""
        return self._matcher.is_stopped()

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[vocab]` with -inf where a token may not follow."""
        import torch

        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=logits.shape[0])
        if self._matcher.is_error() or not allowed.any():
            raise self._failed()
        return logits.masked_fill(torch.from_numpy(allowed == 0), float("-inf"))

    def advance(self, token_id: int) -> None:
        """The token was chosen."""
        if not self._matcher.consume_token(token_id):
            raise self._failed()

    def _failed(self) -> GrammarFailed:
        reason = " ".join(self._matcher.get_error().split())[:200] or "no token may follow"
        return GrammarFailed(f"structured output cannot go on: {reason}", code="grammar_failed")
