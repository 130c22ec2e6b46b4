"""Every command of the documents runs, or its page says why it does not."""

from __future__ import annotations

import ast
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, get_args

import kubernetes_validate
import pytest
import yaml

from mooncake_serve.config import AppConfig, load_app_config
from tests.docs.blocks import DOCS, MARKS, PAGES, REASONS, ROOT, Block, blocks, fences, marked
from tests.docs.running import expanded, run, scratch

TIMEOUT_S = 240.0
INLINE = re.compile(r"`(mooncake-serve [^`]+)`")


@pytest.mark.parametrize("block", marked(""), ids=str)
def test_commands_run(block: Block, tmp_path: Path) -> None:
    assert block.language == "bash", "a Python example needs `with a server`, or nothing to import"
    tools = {command.split()[0] for command in block.commands}
    missing = {tool for tool in tools if tool == "kubectl" and not shutil.which(tool)}
    if missing:
        pytest.skip(f"{missing} is not installed")
    run(expanded(block.code), scratch(tmp_path), TIMEOUT_S)


def test_every_block_is_accounted_for() -> None:
    for block in blocks():
        kind, _, argument = block.mark.partition(": ")
        if kind == "not run":
            assert argument in REASONS, f"{block}: a reason of tests/docs/blocks.py"
        else:
            assert block.mark in MARKS, block


def test_commands_that_the_text_names_exist() -> None:
    """`mooncake-serve …` in a sentence or a table: its command and its options."""
    from typer.main import get_command

    from mooncake_serve.cli import app

    named = {(path, text) for path in PAGES for text in INLINE.findall(path.read_text("utf-8"))}
    assert len(named) > 20
    for path, text in named:
        words = [word for word in shlex.split(text)[1:] if word != "…"]
        assert _known(get_command(app), words), f"{path.relative_to(ROOT)}: {text}"


def _known(command: Any, words: list[str]) -> bool:
    while words and words[0] in (commands := getattr(command, "commands", {})):
        command = commands[words.pop(0)]
    if command.context_settings.get("ignore_unknown_options"):  # A benchmark parses its own.
        return True
    asked = {word for word in words if word.startswith("-")}
    options = {option for parameter in command.params for option in parameter.opts}
    if not hasattr(command, "commands"):
        return asked <= options
    # A group: run by itself, or several of its commands at once, as in `drain|stop`.
    bare = [word for word in words if not word.startswith("-")]
    several = {name for word in bare for name in word.split("|")} <= set(command.commands)
    return bool(several and bare) or (asked <= options and command.invoke_without_command)


def test_nothing_runnable_escapes() -> None:
    """Fences of other languages hold no commands."""
    for path in PAGES:
        for language, code in fences(path.read_text("utf-8")):
            assert language in {"", "bash", "python", "yaml"}, path
            command = re.search(r"^\s*(make|mooncake-serve|curl|kubectl|pip) ", code, re.MULTILINE)
            assert language == "bash" or not command, f"{path}: {code}"


def test_python_examples_compile() -> None:
    for block in blocks():
        if block.language == "python":
            ast.parse(block.code)


CONFIGURATIONS = [
    (str(path.relative_to(ROOT)), code)
    for path in PAGES
    for language, code in fences(path.read_text("utf-8"))
    if language == "yaml"
]


def test_configurations_are_there_to_be_checked() -> None:
    assert len(CONFIGURATIONS) >= 10


@pytest.mark.parametrize(("page", "code"), CONFIGURATIONS, ids=[page for page, _ in CONFIGURATIONS])
def test_configurations_are_accepted(page: str, code: str) -> None:
    """A Serve config, an application of it, its `args`, or a Kubernetes resource."""
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    from mooncake_serve.app.check import IMPORT_PATH

    shown = yaml.safe_load(code)
    if "kind" in shown:
        kubernetes_validate.validate(shown, "1.34", strict=True)
        return
    if "applications" in shown:
        assert shown.keys() <= ServeDeploySchema.model_fields.keys(), page
        ServeDeploySchema.model_validate(shown)
    elif shown.keys() <= AppConfig.model_fields.keys():
        shown = {"args": shown}
    for application in shown.get("applications", [shown]):
        assert application.keys() <= ServeApplicationSchema.model_fields.keys(), page
        ServeApplicationSchema.model_validate({"import_path": IMPORT_PATH, **application})
        load_app_config(application["args"])


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


def spans() -> set[str]:
    """Names of all spans, by the source."""
    sources = (path.read_text("utf-8") for path in (ROOT / "mooncake_serve").rglob("*.py"))
    return {name for text in sources for name in re.findall(r'tracing\.span\("([a-z.]+)"', text)}


def test_the_page_on_traces_knows_every_span() -> None:
    page = (DOCS / "how-to" / "observe.md").read_text("utf-8")
    listed = re.findall(r"^\| `([a-z.]+)` \| (?:ingress|replica) \|", page, re.MULTILINE)
    assert set(listed) == spans()


def test_settings_that_pages_name_exist() -> None:
    """`store.dram` and its like, against the configuration; names of spans look the same."""
    from pydantic import BaseModel

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
        settings = {name for name in named if not name.endswith(".py")} - spans()
        unknown = [name for name in settings if not known(name)]
        assert not unknown, path
