"""The overlays after a real kustomize build: their documents, pods and configuration."""

from __future__ import annotations

import copy
import functools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake_serve.config import AppConfig, load_app_config
from tests.k8s.schemas import ROOT

OVERLAYS = {"cpu-demo": "app.yaml", "gpu": "gpu-cluster.yaml"}
"""Each with the deployment whose configuration it has."""
KUBERNETES = "1.34"
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def kustomize(folder: Path) -> list[dict[str, Any]]:
    """The documents of a folder; kubectl's own kustomize or the tool of that name."""
    command = ["kustomize", "build"] if shutil.which("kustomize") else ["kubectl", "kustomize"]
    if not shutil.which(command[0]):
        pytest.skip("neither kustomize nor kubectl is installed")
    ran = subprocess.run([*command, str(folder)], capture_output=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    return list(yaml.safe_load_all(ran.stdout))


@functools.cache
def built(overlay: str) -> list[dict[str, Any]]:
    return kustomize(ROOT / "k8s" / "overlays" / overlay)


def one(overlay: str, kind: str) -> dict[str, Any]:
    (found,) = [document for document in built(overlay) if document["kind"] == kind]
    return copy.deepcopy(found)


def pods(overlay: str) -> dict[str, dict[str, Any]]:
    """Pod templates of the Ray cluster and of whatever else runs, by name."""
    cluster = one(overlay, "RayService")["spec"]["rayClusterConfig"]
    found = {"head": cluster["headGroupSpec"]["template"]}
    found |= {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    for document in built(overlay):
        if document["kind"] in {"StatefulSet", "Deployment"}:
            found[document["metadata"]["name"]] = document["spec"]["template"]
    return found


def application(overlay: str) -> AppConfig:
    config = yaml.safe_load(one(overlay, "RayService")["spec"]["serveConfigV2"])
    return load_app_config(config["applications"][0]["args"])


def size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]i)?", text).groups()  # pyright: ignore
    return int(number) * UNITS.get(unit, 1)
