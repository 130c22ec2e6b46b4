"""Do all nodes make the same keys of the same text? Checked when a replica starts.

Blocks are shared by key, so a node with another tokenizer, chat template, block size or numerics
would fill its store with blocks that no other node can use, without an error anywhere. Each replica
therefore shows a card of what goes into keys to the stores of all nodes, which keep the first card
of each configuration. A replica whose card differs refuses to start and names the field.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from mooncake_serve.config import AppConfig
from mooncake_serve.engine.protocol import ModelInfo
from mooncake_serve.errors import ConfigError
from mooncake_serve.store import block_keys
from mooncake_serve.store_actor import NAMESPACE, store_names

log = logging.getLogger(__name__)

ASK_S = 10.0
PROBE = "Ein Text mit Ümläuten, 数字 123 and\tspaces, again and again. " * 40
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROBE}]


class Tokenizer(Protocol):
    """What of a tokenizer goes into keys."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt."""
        ...

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation."""
        ...


def parity_card(info: ModelInfo, tokenizer: Tokenizer) -> dict[str, str]:
    """What goes into keys on this node, field by field; the last field is the result."""
    text, chat = tokenizer.encode(PROBE), tokenizer.encode_chat(CHAT)
    block_tokens = info.layout.block_tokens
    tokens = (text + chat) * (1 + block_tokens // max(1, len(text)))
    keys = block_keys(info.namespace, b"", array("I", tokens), block_tokens)
    return {
        "model.id (tokenizer)": _digest(text),
        "model.id (chat template)": _digest(chat),
        "engine.block_tokens": str(block_tokens),
        "namespace (weights, versions, instruction set, threads)": info.namespace,
        "keys": keys[-1].hex(),
    }


def check_parity(config: AppConfig, card: dict[str, str]) -> None:
    """Show `card` to the stores of all nodes. Raises ConfigError naming the field that differs.

    A store that does not answer is no judge.
    """
    parts = [config.model.model_dump(mode="json"), config.engine.model_dump(mode="json")]
    configuration = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    for name in store_names():
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
            first: Any = ray.get(actor.first_card.remote(configuration, card), timeout=ASK_S)
        except (RayError, ValueError) as err:
            log.warning("%s does not say how its node makes keys: %s", name, err)
            continue
        for field, value in card.items():
            if first.get(field) != value:
                raise ConfigError(
                    field,
                    f"is {value!r} on this node but {first.get(field)!r} where {name} runs; "
                    "install the same model and packages on every node",
                )


def _digest(tokens: list[int]) -> str:
    return hashlib.sha256(array("I", tokens)).hexdigest()[:16]
