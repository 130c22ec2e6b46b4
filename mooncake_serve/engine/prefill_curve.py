"""What prefill costs on this replica, fitted to the forwards it runs.

    seconds(n new tokens behind a prefix of p) = n · token_s + n · (p + n/2) · attention_s

A least-squares fit over a window that forgets, without a constant: a prompt is many forwards, so
what each of them costs by itself belongs to the tokens. Pure; one thread observes, others read.
"""

from __future__ import annotations

MEMORY = 64
"""Forwards after which an observation counts half as much as a new one, about."""
TOKENS_MIN = 16
"""A shorter forward says more of overheads than of the cost of a token."""


class PrefillCurve:
    """See the module. All coefficients are 0 before the first observation."""

    def __init__(self) -> None:
        self.token_s = 0.0
        self.attention_s = 0.0
        self._sums = [0.0] * 5

    def observe(self, new: int, prefix: int, seconds: float) -> None:
        """One forward of `new` tokens behind `prefix` tokens took `seconds`."""
        if new < TOKENS_MIN or seconds <= 0:
            return
        context = new * (prefix + new / 2)
        keep = 1 - 1 / MEMORY
        added = (new * new, new * context, context * context, new * seconds, context * seconds)
        self._sums = [keep * old + one for old, one in zip(self._sums, added, strict=True)]
        self._fit()

    def _fit(self) -> None:
        xx, xz, zz, xy, zy = self._sums
        determinant = xx * zz - xz * xz
        # One length seen so far: nothing tells tokens and attention apart.
        alone = determinant <= 1e-6 * xx * zz
        attention_s = 0.0 if alone else (xx * zy - xz * xy) / determinant
        attention_s = max(0.0, attention_s)
        token_s = (xy - attention_s * xz) / xx
        if token_s <= 0:
            token_s, attention_s = 0.0, zy / zz
        self.token_s, self.attention_s = token_s, attention_s
