"""Every command of the documentation runs, or its page says why it does not."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from tests.docs.blocks import DOCS, REASONS, ROOT, Block, blocks, marked

TIMEOUT_S = 240.0


@pytest.mark.parametrize("block", marked(""), ids=str)
def test_commands_run(block: Block) -> None:
    assert block.language == "bash", "a Python example needs `with a server`, or nothing to import"
    tools = {line.split()[0] for line in block.code.splitlines() if line.strip()}
    missing = {tool for tool in tools if tool == "kubectl" and not shutil.which(tool)}
    if missing:
        pytest.skip(f"{missing} is not installed")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # `make` would build; everything is built already.
    code = block.code.replace("make manifests", f"{sys.executable} scripts/k8s_config.py")
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_every_block_is_accounted_for() -> None:
    for block in blocks():
        kind, _, argument = block.mark.partition(": ")
        if kind == "run by":
            assert (ROOT / argument).is_file(), block
        elif kind == "not run":
            assert argument.split(";")[0] in REASONS, f"{block}: a reason of tests/docs/blocks.py"
            for test in re.findall(r"tests/[\w/]+(?:\.py)?", argument):
                assert (ROOT / test).exists(), block
        else:
            assert block.mark in {"", "with a server"}, block


def test_nothing_runnable_escapes() -> None:
    """Fences of other languages hold no commands."""
    for path in DOCS.rglob("*.md"):
        fences = set(re.findall(r"^```(\w*)$", path.read_text("utf-8"), re.MULTILINE))
        assert fences <= {"", "bash", "python", "yaml"}, path


def test_python_examples_compile() -> None:
    for block in blocks():
        if block.language == "python":
            ast.parse(block.code)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for block in blocks():
        assert set(re.findall(r"^make ([a-z-]+)", block.code, re.MULTILINE)) <= targets, block


def test_files_that_pages_name_exist() -> None:
    roots = "deployments|docs|k8s|mooncake_serve|scripts|tests|store_rs|codec_rs|kernels_rs"
    for path in DOCS.rglob("*.md"):
        named = re.findall(rf"`((?:{roots})/[\w./-]+)`", path.read_text("utf-8"))
        missing = [name for name in named if not (ROOT / name).exists()]
        assert not missing, path


def test_settings_that_pages_name_exist() -> None:
    """`store.dram` and its like, against the configuration."""
    from pydantic import BaseModel

    from mooncake_serve.config import AppConfig

    def known(dotted: str) -> bool:
        section: object = AppConfig
        for name in dotted.split("."):
            if not (isinstance(section, type) and issubclass(section, BaseModel)):
                return False
            if name not in section.model_fields:
                return False
            annotation = section.model_fields[name].annotation
            # Of an optional section, the section.
            section = next(iter(get_args(annotation)), annotation)
        return True

    sections = "|".join(AppConfig.model_fields)
    for path in DOCS.rglob("*.md"):
        text = path.read_text("utf-8")
        named = re.findall(rf"`((?:{sections})\.[a-z_.]+?)(?::[^`]*)?`", text)
        unknown = [name for name in named if not known(name) and not name.endswith(".py")]
        assert not unknown, path
