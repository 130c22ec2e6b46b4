"""What we build on: licences allowed by deny.toml, registries only, every pin where it belongs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DENY = tomllib.loads((ROOT / "deny.toml").read_text("utf-8"))


def packages() -> list[dict[str, Any]]:
    """Every crate of the lock file."""
    if not shutil.which("cargo"):
        pytest.skip("no cargo is installed")
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--offline"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
    if ran.returncode:
        pytest.skip("the crates are not downloaded yet")
    return json.loads(ran.stdout)["packages"]


def allowed(expression: str) -> bool:
    """Whether a licence expression can be met with what deny.toml allows; OR binds looser."""
    known = set(DENY["licenses"]["allow"])
    flat = expression.replace("/", " OR ").replace("(", " ").replace(")", " ")
    parts = [option.split(" AND ") for option in flat.split(" OR ")]
    if "(" in expression and " AND " in expression:  # (A OR B) AND C
        inner, rest = re.split(r"\)\s*AND\s*", expression.strip("("), maxsplit=1)
        return allowed(inner) and allowed(rest)
    return any(all(part.strip() in known for part in option) for option in parts)


def test_licences_are_allowed() -> None:
    foreign = [one for one in packages() if one["source"] is not None]
    assert foreign
    assert not {one["name"]: one["license"] for one in foreign if not allowed(one["license"] or "")}


def test_crates_come_from_the_registry() -> None:
    sources = {one["source"] for one in packages() if one["source"] is not None}
    assert sources == {"registry+https://github.com/rust-lang/crates.io-index"}


def test_the_licence_check_can_say_no() -> None:
    assert allowed("MIT OR GPL-3.0")
    assert allowed("(MIT OR Apache-2.0) AND Unicode-3.0")
    assert not allowed("GPL-3.0")
    assert not allowed("MIT AND GPL-3.0")


def test_python_dependencies_have_bounds() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    for requirement in [*project["dependencies"], *(one for extra in extras for one in extra)]:
        assert re.search(r"(==|>=|~=)", requirement), requirement
