"""What is wrong with a Serve config file, found without starting Ray's cluster.

The same checks run again in `build`, on the cluster, where the machine may differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from mooncake_serve.app.validate import validate
from mooncake_serve.config import StoreSettings, load_app_config
from mooncake_serve.errors import ConfigError, MooncakeError

IMPORT_PATH = "mooncake_serve.app:build"


def check(path: Path) -> list[str]:
    """Findings, one line each; empty when the application would start."""
    try:
        raw = _read(path)
    except ConfigError as err:
        return [str(err)]
    return _serve_findings(raw) or _application_findings(raw)


def store_settings(path: Path) -> StoreSettings:
    """The store that the applications of a config share. Raises ConfigError."""
    raw = _read(path)
    for finding in _serve_findings(raw):
        raise ConfigError("", finding)
    settings = [load_app_config(app.get("args") or {}).store for app in _ours(raw)]
    if not settings or any(other != settings[0] for other in settings):
        raise ConfigError("store", "no application of ours, or several that differ; one is wanted")
    return settings[0]


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text("utf-8"))
    except OSError as err:
        raise ConfigError("", f"cannot be read: {err.strerror}") from err
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise ConfigError("", f"not YAML: {' '.join(str(err).split())}") from err
    if not isinstance(raw, dict):
        raise ConfigError("", "not a Serve config: expected a mapping with `applications`")
    return raw


def _ours(raw: dict[str, Any]) -> list[dict[str, Any]]:
    return [app for app in raw["applications"] if app.get("import_path") == IMPORT_PATH]


def _serve_findings(raw: dict[str, Any]) -> list[str]:
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(raw)
    except ValidationError as err:
        return [
            f"{'.'.join(str(part) for part in error['loc'])}: {error['msg']}"
            for error in err.errors()
        ]
    # Ray drops keys it does not know: a typing error would silently become a default.
    findings = _unknown_keys("", raw, ServeDeploySchema)
    for number, app in enumerate(raw["applications"]):
        findings += _unknown_keys(f"applications.{number}.", app, ServeApplicationSchema)
    return findings


def _unknown_keys(where: str, raw: dict[str, Any], schema: type[BaseModel]) -> list[str]:
    known = ", ".join(sorted(schema.model_fields))
    unknown = [key for key in raw if key not in schema.model_fields]
    return [f"{where}{key}: unknown setting; known here: {known}" for key in unknown]


def _application_findings(raw: dict[str, Any]) -> list[str]:
    ours = _ours(raw)
    if not ours:
        return [f"no application has import_path: {IMPORT_PATH}"]
    findings = []
    for app in ours:
        try:
            config = load_app_config(app.get("args") or {})
            validate(config, weights=False, machine=True)
        except MooncakeError as err:
            findings.append(f"{app.get('name', 'default')}: {err}")
    return findings
