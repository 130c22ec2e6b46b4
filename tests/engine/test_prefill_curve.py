"""The fit finds the coefficients it was fed, whatever the lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serve.engine.prefill_curve import TOKENS_MIN, PrefillCurve

TOKEN_S, ATTENTION_S = 7e-4, 2e-8


def seconds(new: int, prefix: int) -> float:
    return new * TOKEN_S + new * (prefix + new / 2) * ATTENTION_S


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=3, max_size=100, unique=True))
def test_any_mix_of_prefixes(blocks: list[int]) -> None:
    curve = PrefillCurve()
    for block in blocks:
        curve.observe(256, block * 256, seconds(256, block * 256))
    for block in blocks:
        predicted = 256 * curve.token_s + 256 * (block * 256 + 128) * curve.attention_s
        assert predicted == pytest.approx(seconds(256, block * 256), rel=1e-3)


def test_one_length_says_nothing_of_attention() -> None:
    curve = PrefillCurve()
    assert (curve.token_s, curve.attention_s) == (0, 0)
    for _ in range(5):
        curve.observe(256, 0, 0.2)
    assert curve.token_s == pytest.approx(0.2 / 256)
    assert curve.attention_s == 0


def test_short_forwards_are_not_prefill() -> None:
    curve = PrefillCurve()
    curve.observe(TOKENS_MIN - 1, 5000, 1.0)
    assert curve.token_s == 0


def test_a_machine_that_slows_down_is_noticed() -> None:
    curve = PrefillCurve()
    for at in range(300):
        pace = 1.0 if at < 150 else 3.0
        curve.observe(256, at % 10 * 256, pace * seconds(256, at % 10 * 256))
    assert curve.token_s == pytest.approx(3 * TOKEN_S, rel=0.3)
