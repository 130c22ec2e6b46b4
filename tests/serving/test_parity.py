"""What goes into keys, field by field, and which field is named when nodes disagree."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_serve import parity
from mooncake_serve.config import AppConfig
from mooncake_serve.engine.protocol import KVLayout, ModelInfo
from mooncake_serve.errors import ConfigError


class Words:
    """A tokenizer of one token per byte."""

    def __init__(self, suffix: str = "") -> None:
        self._suffix = suffix

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.encode("".join(message["content"] for message in messages) + self._suffix)


def card(namespace: str = "ns", block_tokens: int = 64, suffix: str = "") -> dict[str, str]:
    layout = KVLayout(2, 1, 8, block_tokens, "bfloat16")
    info = ModelInfo("m", namespace, layout, 512, 256, (), True, "cpu", "torch")
    return parity.parity_card(info, Words(suffix))


class Stores:
    """The stores of a cluster, of which the first has seen `first`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, first: dict[str, str] | None) -> None:
        self._cards = {} if first is None else {"all": first}
        self.first_card = self
        monkeypatch.setattr(parity, "store_names", lambda: {"mooncake-store/a/2"})
        monkeypatch.setattr(parity.ray, "get_actor", lambda *_, **__: self)
        monkeypatch.setattr(parity.ray, "get", lambda answer, **_: answer)

    def remote(self, configuration: str, shown: dict[str, str]) -> dict[str, str]:
        assert configuration
        return self._cards.setdefault("all", shown)


def test_the_same_node_twice_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    Stores(monkeypatch, None)
    parity.check_parity(AppConfig(), card())
    parity.check_parity(AppConfig(), card())


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"namespace": "ns2"}, "namespace"),
        ({"block_tokens": 32}, "engine.block_tokens"),
        ({"suffix": "!"}, "chat template"),
    ],
)
def test_what_differs_is_named(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], field: str
) -> None:
    Stores(monkeypatch, card())
    with pytest.raises(ConfigError) as caught:
        parity.check_parity(AppConfig(), card(**other))
    assert field in str(caught.value)


def test_keys_depend_on_every_field() -> None:
    cards = [card(), card(namespace="x"), card(block_tokens=32)]
    assert len({shown["keys"] for shown in cards}) == 3
