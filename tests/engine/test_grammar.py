"""Structured output: masks leave only what the grammar allows, on any logits."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from mooncake_serve.engine.grammar import GrammarFailed, Grammars, check_grammar, json_grammar
from mooncake_serve.engine.protocol import SamplingParams
from mooncake_serve.engine.sampler import Sampler
from mooncake_serve.errors import InvalidRequest
from tests.engine.support import (
    DictStore,
    byte_tokenizer,
    model_engine,
    random_prompt,
    request,
    start,
    tiny_model,
)

EOS = 256
VOCAB = 320
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_random_logits_give_valid_json(tokenizer: Any, temperature: float) -> None:
    grammars = Grammars(tokenizer)
    seed = random.randrange(1 << 30)
    print("seed", seed)
    noise = torch.Generator().manual_seed(seed)
    for number in range(20):
        params = SamplingParams(
            temperature=temperature, seed=number, min_p=0.01, repetition_penalty=1.3
        )
        matcher = grammars.matcher(json_grammar(SCHEMA), VOCAB, [EOS])
        sampler = Sampler(params, (1, 2), matcher)
        tokens: list[int] = []
        while not sampler.complete and len(tokens) < 200:
            tokens.append(sampler.sample(torch.randn(VOCAB, generator=noise) * 5).token_id)
        value = json.loads(tokenizer.decode([token for token in tokens if token != EOS]))
        assert set(value) == {"name", "age"}
        assert value["name"] in {"Ada", "Bo"}
        assert isinstance(value["age"], int)


def test_a_token_that_may_not_follow_ends_the_request_only(tokenizer: Any) -> None:
    matcher = Grammars(tokenizer).matcher(json_grammar(SCHEMA), VOCAB, [EOS])
    with pytest.raises(GrammarFailed):
        matcher.advance(EOS)
    with pytest.raises(GrammarFailed):
        matcher.mask(torch.zeros(VOCAB))


def test_bad_grammars_name_their_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_grammar(json_grammar({"type": "nonsense"}), "response_format")
    assert caught.value.param == "response_format"
    with pytest.raises(InvalidRequest, match="larger"):
        check_grammar(json_grammar({"enum": ["x" * 300_000]}), "response_format")


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_both_backends_follow_grammars_and_leave_others_alone(tokenizer: Any, backend: str) -> None:
    prompts = [random_prompt(70, seed=1), random_prompt(40, seed=2)]
    loaded = tiny_model("llama", head_dim=64)
    with model_engine(loaded, backend=backend, grammars=Grammars(tokenizer)) as engine:
        alone = [start(engine, request(prompt, 24)) for prompt in prompts]
        for each in alone:
            each.finish()
        plain = [start(engine, request(prompt, 24)) for prompt in prompts]
        structured = start(engine, request(prompts[0], 60, grammar=json_grammar(SCHEMA)))
        assert structured.finish().reason == "stop"
        value = json.loads(tokenizer.decode(structured.tokens))
        assert set(value) == {"name", "age"}
        for each, again in zip(alone, plain, strict=True):
            again.finish()
            assert again.tokens == each.tokens


def test_a_failing_grammar_fails_its_request_only(tokenizer: Any, monkeypatch: Any) -> None:
    def broken(*_: object) -> None:
        raise GrammarFailed("made to fail")

    monkeypatch.setattr("mooncake_serve.engine.grammar.Matcher.mask", broken)
    loaded = tiny_model("llama")
    with model_engine(loaded, grammars=Grammars(tokenizer)) as engine:
        wrong = start(engine, request([1, 2, 3], 8, grammar=json_grammar(SCHEMA)))
        right = start(engine, request([1, 2, 3], 8))
        assert isinstance(wrong.fail(), GrammarFailed)
        assert len(right.finish() and right.tokens) == 8
        assert engine.healthy


def test_a_prompt_that_will_not_come_again_stays_out_of_the_store() -> None:
    store = DictStore()
    with model_engine(tiny_model("llama"), store) as engine:
        once, again = random_prompt(100, seed=3), random_prompt(100, seed=4)
        start(engine, request(once, 2, reuse=False)).finish()
        assert engine.flush()
        assert store.blocks == {}
        start(engine, request(again, 2)).finish()
        assert engine.flush()
        assert len(store.blocks) == 3
