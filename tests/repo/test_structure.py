"""The repository's shape: which module may import which, and what no file may contain."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mooncake_serve"

LAYERS = [
    {"durable", "errors", "logs", "memory", "metrics", "progress"},
    {"config", "prometheus", "secret_file", "tracing"},
    {"client", "store", "models", "codec", "policy"},
    {"budget", "engine", "archive", "ray_metrics"},
    {"store_actor", "router", "load_report"},
    {"parity"},
    {"replica"},
    {"api", "dashboard"},
    {"app"},
    {"bench", "simulate", "demo"},
    {"cli"},
]
"""From the bottom up: a module imports its own layer's siblings never, lower layers freely."""

IMPORTS_RAY = {
    "ray_metrics",
    "store_actor",
    "parity",
    "router",
    "replica",
    "api",
    "app",
    "bench",
}
FILE_LINES_MAX = 500
RUST_LAYERS = [
    {"error", "key", "latency", "memory", "progress", "written"},
    {"alloc", "index", "log", "wire", "block"},
    {"arena", "fdpass"},
    {"peer", "cluster"},
    {"route"},
    {"server", "disk", "client"},
    {"python"},
]


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    """Top-level name below the package, path and tree of each Python file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        yield name, path, ast.parse(path.read_text("utf-8"))


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names a file imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(name: str) -> int | None:
    return next((i for i, layer in enumerate(LAYERS) if name in layer), None)


def test_every_module_has_a_layer() -> None:
    unknown = {name for name, _, _ in modules() if layer_of(name) is None}
    assert unknown == {"__init__"}


def test_python_dependencies_point_down() -> None:
    wrong = set()
    for name, path, tree in modules():
        here = layer_of(name)
        if here is None:
            continue
        for target in imported(tree):
            parts = target.split(".")
            if parts[0] != "mooncake_serve" or len(parts) < 2 or parts[1] == name:
                continue
            there = layer_of(parts[1])
            if there is not None and there >= here:
                wrong.add(f"{path.relative_to(ROOT)} imports {parts[1]}")
    assert not wrong


def test_only_serving_imports_ray() -> None:
    wrong = {
        str(path.relative_to(ROOT))
        for name, path, tree in modules()
        if name not in IMPORTS_RAY and any(t.split(".")[0] == "ray" for t in imported(tree))
    }
    assert not wrong


def test_nothing_imports_pickle() -> None:
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    wrong = {
        str(path.relative_to(ROOT))
        for _, path, tree in modules()
        if any(t.split(".")[0] in banned for t in imported(tree))
    }
    assert not wrong


def test_rust_dependencies_point_down() -> None:
    source = ROOT / "store_rs" / "src"
    layer = {name: i for i, names in enumerate(RUST_LAYERS) for name in names}
    wrong = set()
    for path in sorted(source.rglob("*.rs")):
        here = path.relative_to(source).parts[0].removesuffix(".rs")
        if here not in layer:
            continue
        for target in re.findall(r"\bcrate::(\w+)", path.read_text("utf-8")):
            if target != here and layer.get(target, -1) > layer[here]:
                wrong.add(f"{path.relative_to(ROOT)} uses {target}")
    assert not wrong


@pytest.mark.parametrize("suffix", ["py", "rs", "h", "cc"])
def test_files_hold_one_concept(suffix: str) -> None:
    skip = {"target", ".venv", "build"}
    long = {
        str(path.relative_to(ROOT)): lines
        for path in ROOT.rglob(f"*.{suffix}")
        if not skip & set(path.relative_to(ROOT).parts)
        and (lines := len(path.read_text("utf-8").splitlines())) > FILE_LINES_MAX
    }
    assert not long


def test_the_public_names() -> None:
    import mooncake_serve

    assert set(mooncake_serve.__all__) == {
        "AsyncClient",
        "Client",
        "Completion",
        "MooncakeError",
        "__version__",
    }


def test_the_sdk_is_light() -> None:
    """Importing the package must not bring in torch, ray or the server."""
    import subprocess
    import sys

    code = "import sys, mooncake_serve; print([m for m in ('torch', 'ray') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    assert out.stdout.strip() == b"[]"
