"""Logs of our processes: one line per event, with the id of the request that it is about, if any.

`configure` gives the package's loggers a handler of their own, as text or as JSON.
`request_context` names the request that the code inside it works for; other processes get its id
with their work and pass it as `extra`. Messages hold ids, counts and times; prompts and answers are
never passed to a logger.

Lines go to the process's own stderr, whatever `sys.stderr` has become: below Ray Serve that is a
logger again, whose file would have ours behind its own prefix, and which walks the caller's stack
for each. They are written at once: waking a thread for a line costs more than the line.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

ROOT = "mooncake_serve"
Style = Literal["text", "json"]

REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Id of the request that this context works for."""


@contextmanager
def request_context(request_id: str) -> Iterator[None]:
    """Lines written inside belong to this request."""
    token = REQUEST.set(request_id)
    try:
        yield
    finally:
        REQUEST.reset(token)


def current_request() -> str:
    """The id of the request that is worked for here, or nothing."""
    return REQUEST.get()


def write_info(logger: logging.Logger, message: str, request_id: str, **fields: Any) -> None:
    """A line that every request writes, at level info: `Logger.info` would look for its caller, and
    Ray adds to each record what is not in our lines."""
    if logger.isEnabledFor(logging.INFO):
        record = logging.LogRecord(logger.name, logging.INFO, "", 0, message, (), None)
        record.request_id, record.fields = request_id, fields
        logger.handle(record)


class _WithRequest(logging.Filter):
    """Adds `request_id`, unless the call brought its own."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = REQUEST.get()
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object per line; keys: at, level, logger, request_id, message, and `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": getattr(record, "request_id", ""),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """A line for a terminal: time, level, request, message, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        request = getattr(record, "request_id", "") or "-"
        fields = getattr(record, "fields", {})
        said = " ".join(
            [record.getMessage(), *(f"{name}={value}" for name, value in fields.items())]
        )
        at = datetime.fromtimestamp(record.created, UTC).isoformat(" ", "milliseconds")[11:23]
        line = f"{at} {record.levelname.lower()} {request} {said}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure(style: Style, level: int = logging.INFO) -> None:
    """Send the package's log to stderr in `style`. Calling it again replaces the handler."""
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    handler.addFilter(_WithRequest())
    logger = logging.getLogger(ROOT)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)
