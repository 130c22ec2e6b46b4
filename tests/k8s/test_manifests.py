"""The overlays held against schemas and against the deployments they come from."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.k8s.overlays import (
    KUBERNETES,
    OVERLAYS,
    application,
    built,
    every_overlay,
    kustomize,
    one,
)
from tests.k8s.schemas import CRDS, MODELS, ROOT, crd_schema, model_schema, problems

needs_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason="KubeRay's CRDs are not here; name them in MOONCAKE_KUBERAY_CRDS"
)


@needs_crds
@every_overlay
def test_rayservice_against_the_crd(overlay: str) -> None:
    schema = crd_schema("RayService")
    service = one(overlay, "RayService")
    assert problems(service, schema) == []
    worker = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    worker["template"]["spec"]["containers"][0]["lifecycel"] = {}
    assert problems(service, schema), "a misspelt field must be refused"


@every_overlay
def test_core_resources_against_kubernetes_schemas(overlay: str) -> None:
    checked = 0
    for document in built(overlay):
        if document["kind"] in {*MODELS, "RayService"}:
            continue
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        checked += 1
    assert checked >= 6


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_other_operators_resources_against_their_schemas(kind: str) -> None:
    """Each as the components have it, and refused with a misspelt field at any depth."""
    folder = ROOT / "k8s" / "components"
    documents = [
        document
        for path in sorted(folder.rglob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text("utf-8"))
        if document["kind"] == kind
    ]
    assert documents
    schema = model_schema(kind)
    for document in documents:
        assert problems(document, schema) == []
        for branch in branches(document["spec"]):
            branch["misspelt"] = 1
            assert problems(document, schema), branch
            del branch["misspelt"]


def branches(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping that has a fixed set of fields."""
    if isinstance(value, list):
        for item in value:
            yield from branches(item)
    elif isinstance(value, dict):
        yield value
        for name, child in value.items():
            if name not in {"matchLabels", "selfSigned"}:
                yield from branches(child)


@every_overlay
def test_serve_config_is_what_ray_accepts(overlay: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    text = one(overlay, "RayService")["spec"]["serveConfigV2"]
    parsed = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert parsed.applications[0].import_path == "mooncake_serve.app:build"
    application(overlay)


@every_overlay
def test_only_the_address_differs_from_the_deployment(overlay: str) -> None:
    source = yaml.safe_load((ROOT / "deployments" / OVERLAYS[overlay]).read_text("utf-8"))
    config = yaml.safe_load(one(overlay, "RayService")["spec"]["serveConfigV2"])
    assert source["http_options"].pop("host") == "127.0.0.1"
    assert config["http_options"].pop("host") == "0.0.0.0"
    assert config == source


def test_overlays_are_up_to_date() -> None:
    command = [sys.executable, ROOT / "scripts" / "k8s_config.py", "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, f"run `make manifests`: {ran.stdout}"


@every_overlay
def test_cluster_shape(overlay: str) -> None:
    spec = one(overlay, "RayService")["spec"]
    cluster = spec["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert workers["replicas"] >= 2
    assert cluster["enableInTreeAutoscaling"]
    assert cluster["autoscalerOptions"]["version"] == "v2"
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert spec["rayClusterDeletionDelaySeconds"] > application(overlay).api.request_timeout_s
    pinned = re.search(r"ray\[serve\]==([\d.]+)\.\*", (ROOT / "pyproject.toml").read_text())
    assert pinned is not None
    assert cluster["rayVersion"].startswith(pinned[1])
    stop = workers["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert "mooncake-serve store drain" in stop[-1]


@pytest.mark.parametrize("component", ["peer-tls", "monitoring", "redis"])
def test_components_build_on_the_demo(component: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    demo = tmp_path / "k8s" / "overlays" / "cpu-demo" / "kustomization.yaml"
    overlay = yaml.safe_load(demo.read_text("utf-8"))
    overlay["components"] = [f"../../components/{component}"]
    demo.write_text(yaml.safe_dump(overlay), "utf-8")
    documents = kustomize(demo.parent)
    assert any(document["kind"] == "RayService" for document in documents)
    if component == "peer-tls":
        service = next(one for one in documents if one["kind"] == "RayService")
        (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        mounts = group["template"]["spec"]["containers"][0]["volumeMounts"]
        assert {mount["name"] for mount in mounts} == {"tmp", "cache", "keys", "peer-tls"}


def test_no_secret_is_in_the_repository() -> None:
    for path in (ROOT / "k8s").rglob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text("utf-8")):
            kind = document.get("kind") if isinstance(document, dict) else None
            assert kind != "Secret", path
