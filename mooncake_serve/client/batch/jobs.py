"""Jobs: one request each, read from OpenAI's JSONL or made of documents and questions.

A document that does not fit the model's context is refused or split, as the caller chose; it is
never cut. Raises BatchError, which names the file, the line or the document.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_serve.errors import BatchError

URLS = ("/v1/chat/completions", "/v1/completions")
TEMPLATE = "{document}\n\n{question}"
PART_CHARS_MIN = 64


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `custom_id` names it in the output; a body without a model gets the client's."""

    custom_id: str
    body: Mapping[str, Any]
    url: str = URLS[0]


@dataclass(frozen=True, slots=True)
class Document:
    """A text and what to call it."""

    name: str
    text: str


def read_jobs(path: Path) -> list[Job]:
    """Jobs of a JSONL file in OpenAI's batch format."""
    jobs: list[Job] = []
    seen: set[str] = set()
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                job = _job(line, f"{path}:{number}")
                if job.custom_id in seen:
                    raise BatchError(f"{path}:{number}: custom_id {job.custom_id!r} came before")
                seen.add(job.custom_id)
                jobs.append(job)
    return jobs


def _job(line: str, where: str) -> Job:
    try:
        request = json.loads(line)
        job = Job(request["custom_id"], request["body"], request.get("url", URLS[0]))
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise BatchError(f"{where}: expected an object with custom_id and body") from err
    if not isinstance(job.custom_id, str) or not isinstance(job.body, dict):
        raise BatchError(f"{where}: custom_id must be a text, body an object")
    if job.url not in URLS:
        raise BatchError(f"{where}: url must be {' or '.join(URLS)}")
    if job.body.get("stream"):
        raise BatchError(f"{where}: stream is not possible in a batch")
    return job


def read_documents(paths: Sequence[str | Path]) -> list[Document]:
    """Texts of files, of all files in folders, and of what glob patterns match, in that order."""
    found: dict[Path, None] = {}
    for path in paths:
        before = len(found)
        found.update(dict.fromkeys(_files(path)))
        if len(found) == before:
            raise BatchError(f"{path}: no such file, no file in that folder, or given twice")
    return [Document(str(path), _text(path)) for path in found]


def _files(path: str | Path) -> Iterator[Path]:
    one = Path(path)
    if one.is_file():
        yield one
    elif one.is_dir():
        yield from sorted(each for each in one.rglob("*") if each.is_file())
    else:
        yield from sorted(map(Path, glob.glob(str(path), recursive=True)))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as err:
        raise BatchError(f"{path}: not text in UTF-8; convert it first") from err
    except OSError as err:
        raise BatchError(f"{path}: {err.strerror}") from err


def document_jobs(
    documents: Sequence[Document],
    questions: Sequence[str],
    *,
    template: str = TEMPLATE,
    options: Mapping[str, Any] | None = None,
) -> list[Job]:
    """Every question about every document. The document comes first in the template, so that its
    questions share its KV."""
    if "{document}" not in template or "{question}" not in template:
        raise BatchError("the template needs {document} and {question}")
    return [
        Job(
            f"{document.name}#{number}",
            {
                "messages": [{"role": "user", "content": _fill(template, document, question)}],
                **(options or {}),
            },
        )
        for document in documents
        for number, question in enumerate(questions, 1)
    ]


def _fill(template: str, document: Document, question: str) -> str:
    # Not str.format: a document may hold braces.
    before, _, after = template.partition("{document}")
    return f"{before.replace('{question}', question)}{document.text}" + after.replace(
        "{question}", question
    )


def split(document: Document, fits: Callable[[str], bool]) -> list[Document]:
    """Parts of a document that fit, cut in halves at blank space; together they are all of it."""
    texts = _halves(document.text, fits, document.name)
    if len(texts) == 1:
        return [document]
    return [
        Document(f"{document.name}[{number}/{len(texts)}]", text)
        for number, text in enumerate(texts, 1)
    ]


def _halves(text: str, fits: Callable[[str], bool], name: str) -> list[str]:
    if fits(text):
        return [text]
    if len(text) < PART_CHARS_MIN:
        raise BatchError(f"{name}: the question alone fills the context; ask for fewer tokens")
    cut = _border(text, len(text) // 2)
    return [*_halves(text[:cut], fits, name), *_halves(text[cut:], fits, name)]


def _border(text: str, middle: int) -> int:
    """The best place to cut near the middle: a paragraph, a line, a word, or just there."""
    reach = len(text) // 4
    for mark in ("\n\n", "\n", " "):
        found = text.rfind(mark, middle - reach, middle + reach)
        if found > 0:
            return found + len(mark)
    return middle
