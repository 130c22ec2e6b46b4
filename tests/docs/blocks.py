"""The commands of the documentation, each with how it is tested.

A comment before a block says so: nothing (run as it is), `with a server`, `run by: FILE` (that test
runs it), or `not run: REASON`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)```", re.DOTALL
)
REASONS = (
    "needs a GPU",
    "needs a Docker engine",
    "needs a Kubernetes cluster",
    "minutes of measurement",
    "tens of minutes of measurement",
    "a server stays in the foreground",
    "a store stays in the foreground",
)


@dataclass(frozen=True)
class Block:
    """A fenced block that a reader may run."""

    page: str
    line: int
    language: str
    code: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """All of them, by page."""
    found = []
    for path in sorted(DOCS.rglob("*.md")):
        text = path.read_text("utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code"))
            page = str(path.relative_to(DOCS))
            mark = match["mark"] or ""
            found.append(Block(page, line, match["language"], match["code"], mark))
    return found


def marked(mark: str) -> list[Block]:
    """The blocks with this mark."""
    return [block for block in blocks() if block.mark == mark]
