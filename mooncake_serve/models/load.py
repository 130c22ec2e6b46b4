"""Weights and tokenizer of a resolved model, through transformers' public API.

`load_tokenizer` never reads weights: the ingress needs only the tokenizer. A local model never
touches the network. Fails with ModelNotFound or UnsupportedModel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mooncake_serve.config import ModelConfig
from mooncake_serve.errors import ConfigError, InvalidRequest, ModelNotFound, UnsupportedModel
from mooncake_serve.models.digest import weights_digest
from mooncake_serve.models.inspect import check_config
from mooncake_serve.models.resolve import resolve_model
from mooncake_serve.models.words import Words

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Tokenizer:
    """Text to token ids and back, and the model's chat template. Thread-safe for reading."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._words = Words.of(self._backend) if self._backend is not None else None

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt, with the special tokens the model expects."""
        return self._encode(text, special_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, without special tokens; incomplete characters give U+FFFD."""
        return cast(
            str,
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
        )

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        `tools` goes to the template as it is; one that does not know of tools ignores it.

        Raises InvalidRequest when the model has no chat template or the template refuses.
        """
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=True,
            )
        except (TemplateError, TypeError, KeyError) as err:
            raise InvalidRequest(f"the chat template refused: {err}", param="messages") from err
        return self._encode(text, special_tokens=False)

    def _encode(self, text: str, *, special_tokens: bool) -> list[int]:
        if self._words is not None:
            return self._words.encode(text, special_tokens=special_tokens)
        if self._backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=special_tokens))
        # Without the offsets of each token in the text, which nobody reads.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)
        return encoding.ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` works."""
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template(self) -> str:
        """The template's source, or nothing."""
        return str(self._tokenizer.chat_template or "")

    @property
    def fast(self) -> Any:
        """transformers' own tokenizer, for libraries that read its vocabulary."""
        return self._tokenizer

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-sequence id."""
        return self._tokenizer.eos_token_id


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, ready for a backend."""

    model: PreTrainedModel
    folder: Path
    fingerprint: str
    """Digest of configuration, weights and dtype."""
    eos_token_ids: tuple[int, ...]
    max_context: int


def load_tokenizer(model: ModelConfig) -> Tokenizer:
    """The model's tokenizer, fetching it (not the weights) if needed."""
    from transformers import AutoTokenizer

    folder = resolve_model(model, weights=False)
    try:
        return Tokenizer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError) as err:
        raise ModelNotFound(f"model.id: {folder} holds no usable tokenizer: {err}") from err


def load_model(model: ModelConfig, device: str) -> LoadedModel:
    """Weights on `device` ("cpu", "cuda", "cuda:1") in the configured dtype."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    folder = resolve_model(model)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as err:
        raise UnsupportedModel(f"transformers does not know the model in {folder}: {err}") from err
    check_config(config)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("engine.device", "no CUDA device is visible; set it to cpu or auto")
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=getattr(torch, model.dtype), local_files_only=True
        )
    except (OSError, ValueError, SafetensorError) as err:
        raise ModelNotFound(
            f"model.id: the weights in {folder} cannot be read ({err}); fetch them again"
        ) from err
    loaded = loaded.to(device).eval().requires_grad_(False)
    return LoadedModel(
        model=loaded,
        folder=folder,
        fingerprint=f"{weights_digest(folder)}-{model.dtype}",
        eos_token_ids=_eos_token_ids(loaded),
        max_context=int(getattr(config, "max_position_embeddings", 0) or 2048),
    )


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
