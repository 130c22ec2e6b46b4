"""Schemas to hold manifests against: KubeRay's from its CRDs, all others from packages."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonschema
import yaml

ROOT = Path(__file__).resolve().parents[2]
CRDS = Path(os.environ.get("MOONCAKE_KUBERAY_CRDS", ROOT.parent / "shared" / "k8s-crds"))
MODELS = {
    "PodMonitor": "cloudcoil.models.prometheus_operator.v1",
    "Issuer": "cloudcoil.models.cert_manager.v1",
    "Certificate": "cloudcoil.models.cert_manager.v1",
}
"""Kinds of other operators, and the modules that hold what was generated from their CRDs."""


def crd_schema(kind: str) -> dict[str, Any]:
    """JSON schema of a KubeRay resource's v1, refusing fields it does not name."""
    crd = yaml.load((CRDS / f"ray.io_{kind.lower()}s.yaml").read_text("utf-8"), yaml.CSafeLoader)
    versions = {version["name"]: version for version in crd["spec"]["versions"]}
    return _closed(versions["v1"]["schema"]["openAPIV3Schema"])


def model_schema(kind: str) -> dict[str, Any]:
    """JSON schema of another operator's resource, refusing fields it does not name."""
    return _closed(getattr(import_module(MODELS[kind]), kind).model_json_schema(by_alias=True))


def _closed(schema: Any) -> Any:
    """As Kubernetes reads a structural schema: what is not named is not allowed."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get(
        "x-kubernetes-embedded-resource"
    )
    if (
        isinstance(schema.get("properties"), dict)
        and schema.get("type") == "object"
        and not open_ended
    ):
        closed.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    return closed


def problems(document: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """What is wrong with a document, each with its path."""
    found = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in found]
