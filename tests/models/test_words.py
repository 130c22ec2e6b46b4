"""Looking words up gives what the tokenizer gives, for every rule that we say it holds for."""

import random
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, processors
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer

from mooncake_serve.config import ModelConfig
from mooncake_serve.models import load_tokenizer, words
from mooncake_serve.models.words import LLAMA3, QWEN, Words

CORPUS = [
    "the cat sat on the mat, it's 1984 and the dog doesn't care; don't ask (why).",
    "  for each in range(10):\n\n\t    print(each)\r\n  # an indented comment   with spaces",
    "Größe und Äpfel: naïve café, 北京 is a city, मुंबई too; 1 234 567 or 12,5 %",
]

byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=True)
bytes_only = pre.ByteLevel(add_prefix_space=False, use_regex=False)


def split(rule: str) -> Any:
    return pre.Sequence([pre.Split(Regex(rule), "isolated"), bytes_only])


CUTTING: dict[str, Any] = {
    "gpt2": byte_level,
    "digits": pre.Sequence([pre.Digits(individual_digits=True), byte_level]),
    "llama3": split(LLAMA3),
    "qwen": split(QWEN),
}


def trained(cutting: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cutting
    tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(
        CORPUS * 4,
        BpeTrainer(
            vocab_size=700,
            initial_alphabet=pre.ByteLevel.alphabet(),
            special_tokens=["<s>", "<|im_start|>"],
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("cat", single_word=True), AddedToken("ß)", normalized=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


TOKENIZERS = {
    **{name: trained(cutting) for name, cutting in CUTTING.items()},
    "nfc": trained(split(QWEN), normalizers.NFC()),
}

SPACES = st.sampled_from(
    [" ", " ", " ", "", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\x1c", "\xa0"]
)
PIECES = st.one_of(
    st.sampled_from(" ".join(CORPUS).split()),
    st.sampled_from(["<s>", "<|im_start|>", "cat", "'s", "'LL", "'", "e\u0301", "\u0301", "🙂"]),
    st.text(max_size=4),
)
TEXTS = st.lists(st.tuples(SPACES, PIECES, SPACES)).map(
    lambda parts: "".join(part for three in parts for part in three)
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_the_same_ids(name: str, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    known = Words.of(tokenizer)
    assert known is not None
    for text in (*texts, *texts, " ".join(texts)):  # Unknown at first, then remembered.
        for special in (False, True):
            expected = tokenizer.encode(text, add_special_tokens=special).ids
            assert known.encode(text, special_tokens=special) == expected, repr(text)


def test_the_embedded_model_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer(ModelConfig())
    backend = tokenizer.fast.backend_tokenizer
    text = " ".join(CORPUS)
    expected = backend.encode(text).ids
    assert tokenizer.encode(text) == expected
    monkeypatch.setattr(words.Words, "_learn", _must_not_be_called)
    assert tokenizer.encode("the dog sat on") == backend.encode("the dog sat on").ids


def _must_not_be_called(*_: object) -> None:
    raise AssertionError("a known word was encoded again")


def test_long_texts_are_looked_up_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "PART_CHARS", 7)
    tokenizer = TOKENIZERS["llama3"]
    known = Words.of(tokenizer)
    assert known is not None
    for text in (" ".join(CORPUS), " " * 50, "x" * 50, " a" * 50, "a  " * 50, ""):
        for _ in range(2):
            expected = tokenizer.encode(text).ids
            assert known.encode(text, special_tokens=True) == expected, text


def test_memory_is_bounded_and_shared_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "WORDS_MAX", 20)
    tokenizer = TOKENIZERS["gpt2"]
    known = Words.of(tokenizer)
    assert known is not None
    wrong: list[str] = []

    def encode(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(300):
            text = " ".join(f"w{dice.randrange(60)}" for _ in range(8))
            if known.encode(text, special_tokens=False) != tokenizer.encode(text).ids[1:]:
                wrong.append(text)

    threads = [Thread(target=encode, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert wrong == []
    assert len(known._known) <= 20 + 4 * 8


def other(change: Callable[[Tokenizer], object]) -> Tokenizer:
    tokenizer = trained(byte_level)
    change(tokenizer)
    return tokenizer


@pytest.mark.parametrize(
    "change",
    [
        lambda one: setattr(one, "normalizer", normalizers.NFKC()),
        lambda one: setattr(one, "pre_tokenizer", pre.Metaspace()),
        lambda one: setattr(one, "pre_tokenizer", bytes_only),
        lambda one: setattr(one, "pre_tokenizer", pre.ByteLevel(add_prefix_space=True)),
        lambda one: setattr(one, "pre_tokenizer", split(r"\w+ \w+|\s+")),
        lambda one: setattr(one, "pre_tokenizer", None),
        lambda one: one.add_tokens([AddedToken("New York")]),
        lambda one: one.add_special_tokens([AddedToken("<mask>", lstrip=True)]),
        lambda one: one.enable_truncation(8),
        lambda one: one.enable_padding(),
        lambda one: setattr(one.model, "dropout", 0.1),
    ],
)
def test_other_tokenizers_encode_whole_texts(change: Callable[[Tokenizer], object]) -> None:
    assert Words.of(other(change)) is None
