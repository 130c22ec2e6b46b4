"""OpenAI's batch files: checking an input file, and what output lines hold. Blocking, bounded.

Every line is an object with `custom_id`, `method`, `url` and `body`. A file with one wrong line is
refused whole, with the first errors by line, as OpenAI does.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mooncake_serve.api.batches.ledger import Line
from mooncake_serve.client.batch.groups import group, prompt_text

LINES_MAX = 50_000
LINE_BYTES_MAX = 16 << 20
ERRORS_SHOWN = 20
CUSTOM_ID_CHARS_MAX = 512
PROMPT_CHARS_COMPARED = 8192
"""Prompts alike so far are taken to share a document; the rest of them stays on the disk."""

JSON = dict[str, Any]


def read_lines(path: Path, endpoint: str) -> tuple[list[Line], list[JSON]]:
    """The lines of an input file by the prompts they share, or OpenAI's `errors.data`."""
    found: list[tuple[str, int, int]] = []
    prompts: list[str] = []
    errors: list[JSON] = []
    seen: set[str] = set()
    for number, start, raw in _raw_lines(path):
        if len(found) == LINES_MAX:
            errors.append(_error("too_many_lines", f"more than {LINES_MAX} lines", None, number))
            break
        try:
            request = _request(raw, endpoint, seen)
        except _WrongLine as wrong:
            errors.append(_error(wrong.code, str(wrong), wrong.param, number))
            if len(errors) == ERRORS_SHOWN:
                break
            continue
        found.append((request["custom_id"], start, len(raw)))
        prompts.append(prompt_text(request["body"])[:PROMPT_CHARS_COMPARED])
    if not found and not errors:
        errors.append(_error("empty_file", "the file has no line", None, None))
    runs = {member: run for run, each in enumerate(group(prompts)) for member in each.members}
    lines = [
        Line(number, custom_id, runs[number], start, length)
        for number, (custom_id, start, length) in enumerate(found)
    ]
    return lines, errors


def read_line(path: Path, line: Line) -> JSON:
    """The body of one line."""
    with path.open("rb") as file:
        file.seek(line.start)
        return json.loads(file.read(line.length))["body"]


def answered(custom_id: str, status: int, body: JSON) -> JSON:
    """A line of the output or error file."""
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": uuid.uuid4().hex, "body": body},
        "error": None,
    }


def unanswered(custom_id: str, code: str, message: str) -> JSON:
    """A line of the error file for a request that was never sent."""
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }


def _raw_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number from 1, first byte and bytes of each line that is not blank."""
    start = 0
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(LINE_BYTES_MAX):
            number += 1
            if raw.strip():
                yield number, start, raw
            start += len(raw)


class _WrongLine(Exception):
    """What is wrong with a line."""

    def __init__(self, code: str, message: str, param: str | None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def _request(raw: bytes, endpoint: str, seen: set[str]) -> JSON:
    """The line's object. Raises _WrongLine."""
    try:
        request = json.loads(raw)
    except (ValueError, RecursionError) as err:
        raise _WrongLine("invalid_json_line", "not valid JSON", None) from err
    if not isinstance(request, dict):
        raise _WrongLine("invalid_json_line", "not a JSON object", None)
    custom_id = request.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= CUSTOM_ID_CHARS_MAX:
        why = f"custom_id must be a text of 1 to {CUSTOM_ID_CHARS_MAX} characters"
        raise _WrongLine("missing_required_parameter", why, "custom_id")
    if custom_id in seen:
        raise _WrongLine("duplicate_custom_id", f"{custom_id!r} came before", "custom_id")
    seen.add(custom_id)
    if request.get("method") != "POST":
        raise _WrongLine("invalid_method", "method must be POST", "method")
    if request.get("url") != endpoint:
        raise _WrongLine("mismatched_endpoint", f"url must be the batch's: {endpoint}", "url")
    body = request.get("body")
    if not isinstance(body, dict):
        raise _WrongLine("missing_required_parameter", "body must be an object", "body")
    if body.get("stream"):
        raise _WrongLine("invalid_request", "stream is not possible in a batch", "body.stream")
    return request


def _error(code: str, message: str, param: str | None, line: int | None) -> JSON:
    return {"code": code, "message": message, "param": param, "line": line}
