"""Can this configuration be served here? The same checks before Ray starts and in `build`."""

from __future__ import annotations

from mooncake_serve.app.machine import check_machine
from mooncake_serve.budget import host_weights
from mooncake_serve.config import AppConfig
from mooncake_serve.errors import ModelError
from mooncake_serve.models import load_tokenizer, resolve_model
from mooncake_serve.models.inspect import check_config


def validate(config: AppConfig, *, weights: bool, machine: bool) -> None:
    """Raise ConfigError or ModelError.

    `weights` also fetches the model's weights; `machine` says that everything runs on this one.
    """
    from transformers import AutoConfig

    if machine:
        check_machine(config)  # Before anything is fetched.
    load_tokenizer(config.model)
    folder = resolve_model(config.model, weights=weights)
    try:
        found = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as err:
        raise ModelError(f"model.id: {folder}/config.json is not usable: {err}") from err
    check_config(found)
    if machine:
        check_machine(config, weights=host_weights(config))
