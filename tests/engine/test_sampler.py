"""Sampling: filters keep what they should, seeds repeat, log-probabilities are the model's."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serve.engine.protocol import SamplingParams
from mooncake_serve.engine.sampler import Sampler

LOGITS = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))


def draws(count: int = 400, **params: float) -> Counter[int]:
    sampler = Sampler(SamplingParams(seed=3, **params))  # type: ignore[arg-type]
    return Counter(sampler.sample(LOGITS).token_id for _ in range(count))


def test_greedy_takes_the_first_of_the_largest() -> None:
    sampler = Sampler(SamplingParams())
    assert sampler.is_plain_greedy
    assert sampler.sample(torch.tensor([1.0, 3.0, 3.0])).token_id == 1


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"temperature": 1.0}, {0, 1, 2, 3}),
        ({"temperature": 1.0, "top_k": 2}, {1, 3}),
        ({"temperature": 1.0, "top_k": 99}, {0, 1, 2, 3}),
        ({"temperature": 1.0, "top_p": 0.79}, {1, 3}),
        ({"temperature": 1.0, "top_p": 0.81}, {1, 2, 3}),
        ({"temperature": 1.0, "top_p": 0.0}, {1}),
        ({"temperature": 0.01}, {1}),
    ],
)
def test_filters_keep_the_likely(params: dict, kept: set[int]) -> None:
    assert set(draws(**params)) == kept


def test_draws_follow_the_distribution() -> None:
    counts = draws(4000, temperature=1.0)
    for token, share in enumerate([0.05, 0.5, 0.15, 0.3]):
        assert abs(counts[token] / 4000 - share) < 0.04


def test_a_seed_repeats_and_requests_do_not_share_a_generator() -> None:
    def tokens(other: bool) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=9))
        company = Sampler(SamplingParams(temperature=1.0, seed=1))
        drawn = []
        for _ in range(50):
            if other:
                company.sample(LOGITS)
            drawn.append(sampler.sample(LOGITS).token_id)
        return drawn

    assert tokens(other=False) == tokens(other=True)


def test_logprobs_are_before_temperature_and_filters() -> None:
    params = SamplingParams(temperature=0.5, top_k=1, logprobs=2)
    sampled = Sampler(params).sample(LOGITS)
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == 1
    assert math.isclose(sampled.logprob.logprob, math.log(0.5), abs_tol=1e-6)
    assert [each.token_id for each in sampled.top_logprobs] == [1, 3]
    none = Sampler(SamplingParams(logprobs=0)).sample(LOGITS)
    assert none.logprob is not None
    assert none.top_logprobs == ()


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    st.floats(0.05, 5),
    st.floats(0, 1),
    st.integers(0, 50),
)
@settings(max_examples=100, deadline=None)
def test_any_filters_leave_a_valid_token(logits, temperature, top_p, top_k) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=0)
    token = Sampler(params).sample(torch.tensor(logits)).token_id
    assert 0 <= token < len(logits)


def test_penalties_and_bias_move_the_choice() -> None:
    def tokens(**params: object) -> list[int]:
        sampler = Sampler(SamplingParams(**params), prompt=[1])  # type: ignore[arg-type]
        return [sampler.sample(LOGITS).token_id for _ in range(4)]

    assert tokens() == [1, 1, 1, 1]
    assert tokens(presence_penalty=2.0)[:2] == [1, 3]
    assert tokens(frequency_penalty=0.6) == [1, 3, 1, 3]
    # Negative logits are multiplied: the prompt's token 1 falls from -0.69 to -1.39, below 3's.
    assert tokens(repetition_penalty=2.0)[0] == 3
    assert tokens(logit_bias=((2, 100.0),)) == [2, 2, 2, 2]
    assert set(tokens(logit_bias=((1, -100.0),))) == {3}


def test_min_p_keeps_what_is_likely_enough() -> None:
    assert set(draws(temperature=1.0, min_p=0.5)) == {1, 3}
    assert set(draws(temperature=1.0, min_p=1.0)) == {1}
    assert set(draws(temperature=1.0, min_p=0.2, top_p=0.6)) == {1, 3}


def test_settings_at_rest_change_no_bit() -> None:
    rest = SamplingParams(temperature=0.8, seed=5, top_k=3)
    plain = Sampler(rest)
    assert not plain._adjusts
    assert [plain.sample(LOGITS).token_id for _ in range(50)] == [
        each.token_id for each in map(Sampler(rest).sample, [LOGITS] * 50)
    ]
    for params in ({"logit_bias": ((0, 0.0),)}, {"presence_penalty": 1e-9}):
        assert not Sampler(SamplingParams(**params)).is_plain_greedy  # type: ignore[arg-type]
