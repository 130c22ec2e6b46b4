"""Write the applications of `deployments/` into the overlays of `k8s/`, as `serveConfigV2`.

`--check` writes nothing and fails when an overlay is out of date. Only the address the proxy
listens on differs: a pod's, not a laptop's loopback.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
OVERLAYS = {"cpu-demo": "app.yaml", "gpu": "gpu-cluster.yaml"}
HEADER = "# From deployments/{name} by scripts/k8s_config.py: change that, run `make manifests`.\n"


class _Literal(str):
    """A string that YAML shows as a block."""


def _block(dumper: yaml.SafeDumper, text: _Literal) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")


yaml.SafeDumper.add_representer(_Literal, _block)


def serve_config(deployment: dict[str, Any]) -> dict[str, Any]:
    """What a pod runs of a configuration for a laptop."""
    return {**deployment, "http_options": {**deployment["http_options"], "host": "0.0.0.0"}}


def patch(name: str) -> str:
    """The overlay's patch of its RayService."""
    deployment = yaml.safe_load((ROOT / "deployments" / name).read_text("utf-8"))
    config = yaml.safe_dump(serve_config(deployment), sort_keys=False)
    return HEADER.format(name=name) + yaml.safe_dump(
        {
            "apiVersion": "ray.io/v1",
            "kind": "RayService",
            "metadata": {"name": "mooncake"},
            "spec": {"serveConfigV2": _Literal(config)},
        },
        sort_keys=False,
    )


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for overlay, name in OVERLAYS.items():
        path = ROOT / "k8s" / "overlays" / overlay / "serve-config.yaml"
        if path.is_file() and path.read_text("utf-8") == patch(name):
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not check:
            path.write_text(patch(name), "utf-8")
    print("\n".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
