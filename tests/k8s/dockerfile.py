"""The Dockerfile as instructions, stage by stage, and the files its builder is given."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dockerfile_parse import DockerfileParser

from tests.k8s.schemas import ROOT


@dataclass
class Stage:
    """What follows one FROM."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    """Instruction and its value, continued lines joined."""

    def all(self, instruction: str) -> list[str]:
        return [value for name, value in self.steps if name == instruction]


def stages() -> dict[str, Stage]:
    """By name, in order."""
    found: dict[str, Stage] = {}
    for step in DockerfileParser(path=str(ROOT / "Dockerfile")).structure:
        name, value = step["instruction"], step["value"]
        if name == "FROM":
            base, _, alias = value.partition(" AS ")
            found[alias] = stage = Stage(alias, base)
        elif name != "COMMENT":
            stage.steps.append((name, value))
    return found


def lineage(stage: Stage) -> Iterator[Stage]:
    """A stage and those it is built on, the last first."""
    known = stages()
    while True:
        yield stage
        if stage.base not in known:
            return
        stage = known[stage.base]


def context(folder: Path) -> Path:
    """Copy into `folder` what `.dockerignore` lets a builder see."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    refused = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]

    def ignored(_: str, names: list[str]) -> set[str]:
        return {name for rule in refused for name in fnmatch.filter(names, rule)}

    for name in allowed:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder
