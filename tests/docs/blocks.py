"""The commands of the README and the documentation, each with how it is tested.

A comment before a block says so: nothing (run as it is), `with a server`, `with a store`, `in the
foreground` (started, seen to work, ended with Ctrl-C), `in minutes` (run by `make test-slow`),
or `not run: REASON`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
MARKS = {"", "with a server", "with a store", "in the foreground", "in minutes"}
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>bash|python)\n(?P<code>.*?)```", re.DOTALL
)
REASONS = (
    "needs a GPU",
    "needs a Docker engine",
    "needs a Kubernetes cluster",
    "needs an RDMA fabric",
    "needs guidellm, in an environment of its own",
    "needs Ray Data and a dataset of yours",
    "it is what runs the tests",
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

    @property
    def commands(self) -> list[str]:
        """Lines of a shell block, continued ones joined, without comments."""
        lines = self.code.replace("\\\n", " ").splitlines()
        bare = (re.sub(r"\s+# .*", "", line).strip() for line in lines)
        return [line for line in bare if line and not line.startswith("#")]


def blocks() -> list[Block]:
    """All of them, by page."""
    found = []
    for path in PAGES:
        text = path.read_text("utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code"))
            page = str(path.relative_to(ROOT))
            mark = match["mark"] or ""
            found.append(Block(page, line, match["language"], match["code"], mark))
    return found


def fences(text: str) -> Iterator[tuple[str, str]]:
    """Language and contents of every fenced block, whatever its language."""
    language, lines = None, []
    for line in text.splitlines():
        if line.startswith("```"):
            if language is not None:
                yield language, "\n".join(lines)
            language, lines = (line[3:] if language is None else None), []
        elif language is not None:
            lines.append(line)


def marked(mark: str) -> list[Block]:
    """The blocks with this mark."""
    return [block for block in blocks() if block.mark == mark]
