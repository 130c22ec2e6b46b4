"""The documents tell the truth about names: files, links, targets and examples exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(path.name for path in ROOT.glob("*.md"))
ROOTS = {path.name for path in ROOT.iterdir() if path.is_dir()}
MADE = ("build/", "/")
"""Beginnings of paths that only exist after a run, or on another machine."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_are_named_exist(name: str) -> None:
    quoted = re.findall(r"`([\w./-]+)`", text_of(name))
    paths = [word for word in quoted if "/" in word and word.split("/")[0] in ROOTS]
    missing = [path for path in paths if not path.startswith(MADE) and not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", text_of(name))
    assert not [link for link in links if "://" not in link and not (ROOT / link).exists()]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text_of("Makefile"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", text_of(name))) <= targets


@pytest.mark.parametrize("name", DOCUMENTS)
def test_python_examples_compile(name: str) -> None:
    for block in re.findall(r"```python\n(.*?)```", text_of(name), re.DOTALL):
        ast.parse(block)


def test_commands_of_the_readme_exist() -> None:
    from typer.main import get_command

    from mooncake_serve.cli import app

    known = set(getattr(get_command(app), "commands"))  # noqa: B009
    assert set(re.findall(r"mooncake-serve ([a-z]+)", text_of("README.md"))) <= known


def test_ports_that_ray_opens_are_chosen_and_named() -> None:
    """HAProxy's, which cannot be bound to loopback: whoever runs the application must know them."""
    fast = [
        path for path in (ROOT / "deployments").glob("*.yaml") if "HA_PROXY" in path.read_text()
    ]
    assert len(fast) >= 3
    for path in fast:
        shipped = path.read_text("utf-8")
        comment, _, settings = shipped.partition("proxy_location:")
        ports = re.findall(r"RAY_SERVE_HAPROXY_(?:STATS|METRICS)_PORT: \"(\d+)\"", settings)
        assert len(ports) == 2, path
        assert not [port for port in ports if port not in text_of("README.md")]
        assert not [port for port in ports if port not in comment], path


def test_the_readme_has_the_place_for_figures() -> None:
    readme = text_of("README.md")
    assert 0 < readme.index("<!-- figures -->") < readme.index("<!-- end of figures -->")
