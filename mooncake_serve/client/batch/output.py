"""The output file: one line for each job, in OpenAI's format, appended as answers come.

A line is on the disk before its job counts as done. A file that a killed run left behind is taken
up again: its last line is cut off where it is torn, and jobs that are in it do not run again. Lines
are taken out by writing the others to a new file and renaming it into place, so that a kill leaves
either all of them or the ones to keep. A lock keeps a second run away.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from mooncake_serve.durable import place
from mooncake_serve.errors import BatchError


class Output:
    """An open output file; without a path, a list in memory."""

    def __init__(self, path: Path | None, *, retry_failed: bool = False) -> None:
        """Opens or makes it. Raises BatchError when it is in use or holds something else."""
        self.lines: list[dict[str, Any]] = []
        """Lines of jobs that are done, this run's and earlier ones'."""
        self._file: BinaryIO | None = None
        if path is not None:
            self._file = self._take(path.resolve(), retry_failed)

    @property
    def done(self) -> set[str]:
        """Jobs that have a line."""
        return {line["custom_id"] for line in self.lines}

    def append(self, line: dict[str, Any]) -> None:
        """Add a line; durable on return. Blocking."""
        if self._file is not None:
            self._file.write(_bytes(line))
            self._file.flush()
            os.fdatasync(self._file.fileno())
        self.lines.append(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self, path: Path, retry_failed: bool) -> BinaryIO:
        """The file, locked, with its whole lines read."""
        file = _locked(path)
        try:
            raw = file.read()
            whole = raw.rfind(b"\n") + 1
            lines = [_line(each) for each in raw[:whole].splitlines()]
        except (ValueError, AttributeError) as err:
            file.close()
            raise BatchError(f"{path}: not the output of a batch; give another -o") from err
        self.lines = [line for line in lines if succeeded(line)] if retry_failed else lines
        if len(self.lines) < len(lines):
            return _replace(path, file, b"".join(map(_bytes, self.lines)))
        if whole < len(raw):
            file.truncate(whole)
        return file


def _locked(path: Path) -> BinaryIO:
    """The file at `path`, at its beginning; ours alone until it is closed."""
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A run that replaced the file meanwhile has its lock on the new one.
        ours = os.path.samestat(os.fstat(file.fileno()), path.stat())
    except (BlockingIOError, FileNotFoundError):
        ours = False
    if not ours:
        file.close()
        raise BatchError(f"{path}: another run writes to it")
    file.seek(0)
    return file


def _replace(path: Path, old: BinaryIO, content: bytes) -> BinaryIO:
    """A new file in the old one's place, locked before it has the name; durable on return."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    file = _locked(temporary)
    shutil.copymode(path, temporary)
    file.write(content)
    place(file, path)
    old.close()
    return file


def _bytes(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _line(raw: bytes) -> dict[str, Any]:
    line = json.loads(raw)
    if not {"custom_id", "response", "error"} <= line.keys():
        raise ValueError("not a line of a batch")
    return line


def answered(custom_id: str, status: int, request_id: str | None, body: Any) -> dict[str, Any]:
    """The line of a job that the server answered, well or not."""
    response = {"status_code": status, "request_id": request_id or "", "body": body}
    return {**_head(custom_id), "response": response, "error": None}


def refused(custom_id: str, code: str, message: str) -> dict[str, Any]:
    """The line of a job that was not sent."""
    return {**_head(custom_id), "response": None, "error": {"code": code, "message": message}}


def _head(custom_id: str) -> dict[str, Any]:
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id}


def succeeded(line: dict[str, Any]) -> bool:
    """Whether a line holds an answer."""
    response = line["response"]
    return line["error"] is None and response is not None and response["status_code"] == 200
