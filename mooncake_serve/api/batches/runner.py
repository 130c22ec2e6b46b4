"""Runs batches to their end, whatever happens to this process meanwhile.

One runner works on a directory at a time: it holds a file lock, so an ingress that is being
replaced and its successor never run the same line. A batch goes validating → in_progress →
finalizing → completed, or failed, expired, cancelled; each step is recorded before the next, and
each can be done again. Lines that share a document go one first, then together. The server's own
refusals (429, 503) are waited out; any other error is the line's answer.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
import time
import uuid
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from mooncake_serve.api.batches.jsonl import answered, read_line, read_lines, unanswered
from mooncake_serve.api.batches.ledger import Ledger, Line
from mooncake_serve.api.generate import Asked, Generator
from mooncake_serve.api.schemas import ChatBody, CompletionBody
from mooncake_serve.api.stream import until
from mooncake_serve.api.tenancy import Doorkeeper, Tenant
from mooncake_serve.client.batch.pace import Pace, run_groups
from mooncake_serve.config import ApiConfig
from mooncake_serve.errors import EngineFailed, Overloaded, RequestError, Unavailable

KINDS: dict[str, type[ChatBody] | type[CompletionBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}
LOCK_POLL_S = 0.5
RETRY_MAX_S = 30.0
ENGINE_ATTEMPTS = 3
PRIORITY = 1000
"""Behind everybody who waits for an answer."""

JSON = dict[str, Any]

log = logging.getLogger(__name__)


class Runner:
    """The batches of one application."""

    def __init__(
        self, ledger: Ledger, generator: Generator, keeper: Doorkeeper, settings: ApiConfig
    ) -> None:
        self._ledger = ledger
        self._generator = generator
        self._keeper = keeper
        self._settings = settings
        self._pace = Pace(settings.batch_concurrency)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    def wake(self) -> None:
        """A batch was added or cancelled."""
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        lock = await self._locked()
        try:
            while True:
                self._news.clear()
                for tenant, batch_id in await asyncio.to_thread(self._ledger.unfinished):
                    if batch_id not in self._running:
                        self._start(tenant, batch_id)
                await self._news.wait()
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            lock.close()

    async def _locked(self) -> IO[bytes]:
        """The lock's open file, once this process holds it; the kernel frees it with us."""
        lock = Path(self._ledger.lock_path).open("ab")  # noqa: SIM115 - held as long as we run
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
            except BlockingIOError:
                await asyncio.sleep(LOCK_POLL_S)

    def _start(self, tenant: str, batch_id: str) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._running.pop(batch_id, None)
            if not task.cancelled() and task.exception() is not None:
                log.error(
                    "batch %s stopped; it goes on at the next start",
                    batch_id,
                    exc_info=task.exception(),
                )

        task = asyncio.ensure_future(_Batch(self, tenant, batch_id).run())
        self._running[batch_id] = task
        task.add_done_callback(ended)


class _Batch:
    """One batch under way."""

    def __init__(self, runner: Runner, tenant: str, batch_id: str) -> None:
        self._ledger = runner._ledger
        self._generator = runner._generator
        self._settings = runner._settings
        self._pace = runner._pace
        self._name = tenant
        self._tenant: Tenant = runner._keeper.by_name(tenant)
        self._id = batch_id
        self._expires = 0
        self._input = Path()
        self._kind: type[ChatBody] | type[CompletionBody] = ChatBody
        self._stopping = False

    async def run(self) -> None:
        """All steps that are left."""
        batch = await asyncio.to_thread(self._ledger.batch, self._name, self._id)
        assert batch is not None
        self._expires = batch["expires_at"]
        self._input = self._ledger.path(batch["input_file_id"])
        self._kind = KINDS[batch["endpoint"]]
        if batch["status"] == "validating":
            batch = await asyncio.to_thread(self._validate, batch)
        if batch["status"] == "in_progress":
            await self._answer_lines()
        if batch["status"] != "failed":
            await asyncio.to_thread(self._finalize)

    def _validate(self, batch: JSON) -> JSON:
        lines, errors = read_lines(self._input, batch["endpoint"])
        now = int(time.time())
        if errors:
            report = {"object": "list", "data": errors}
            return self._ledger.update(self._id, status="failed", failed_at=now, errors=report)
        return self._ledger.start(self._id, lines, status="in_progress", in_progress_at=now)

    async def _answer_lines(self) -> None:
        lines = await asyncio.to_thread(self._ledger.waiting, self._id)
        groups = [list(members) for _, members in groupby(lines, key=lambda line: line.run)]
        watch = asyncio.ensure_future(self._watch())
        try:
            await run_groups(groups, self._answer, self._settings.batch_concurrency)
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        """Notice that nobody wants the rest any more."""
        while not self._stopping:
            batch = await asyncio.to_thread(self._ledger.batch, self._name, self._id)
            cancelled = batch is None or batch["status"] == "cancelling"
            self._stopping = cancelled or time.time() >= self._expires
            await asyncio.sleep(LOCK_POLL_S)

    async def _answer(self, line: Line) -> None:
        async with self._pace.slot():
            failures = 0
            while not self._stopping:
                started = time.monotonic()
                try:
                    body = await self._generate(line)
                except (Overloaded, Unavailable) as err:
                    self._pace.refused(started)
                    wait_s = getattr(err, "retry_after_s", 1.0)
                    await asyncio.sleep(min(wait_s, RETRY_MAX_S))
                    continue
                except RequestError as err:
                    failures += isinstance(err, EngineFailed)
                    if isinstance(err, EngineFailed) and failures < ENGINE_ATTEMPTS:
                        continue
                    outcome, status, body = "failed", err.status, err.envelope()
                else:
                    self._pace.answered()
                    outcome, status = "completed", 200
                result = answered(line.custom_id, status, body)
                await asyncio.to_thread(self._ledger.record, self._id, line.number, outcome, result)
                return

    async def _generate(self, line: Line) -> JSON:
        body = await asyncio.to_thread(read_line, self._input, line)
        body.setdefault("priority", PRIORITY)
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s
        asked = Asked(self._tenant, deadline)
        raw = json.dumps(body).encode()

        async def work() -> JSON:
            # The pair of types is one of two: checkers cannot follow that through the dictionary.
            kind: Any = self._kind
            return await self._generator.whole(await self._generator.start(raw, kind, asked))

        return await until(deadline, work())

    def _finalize(self) -> None:
        """Write the output files, then say in one transaction that they and the end are there."""
        batch = self._ledger.update(self._id, unless=())
        cancelled = batch["status"] == "cancelling"
        expired = bool(self._ledger.waiting(self._id))
        now = int(time.time())
        if batch["status"] == "in_progress":
            batch = self._ledger.update(
                self._id, unless=("cancelling",), status="finalizing", finalizing_at=now
            )
            cancelled = batch["status"] == "cancelling"
        self._give_up_the_rest("batch_cancelled" if cancelled else "batch_expired")
        files, fields = [], {}
        for name, outcome in (("output_file_id", "completed"), ("error_file_id", "failed")):
            # Named after the batch: doing it again writes the same file.
            file_id = f"file-{self._id.removeprefix('batch_')}-{name.removesuffix('_file_id')}"
            size = _write(self._ledger.path(file_id), self._ledger.results(self._id, outcome))
            if size:
                files.append(file_object(file_id, f"{self._id}_{name}.jsonl", size, "batch_output"))
                fields[name] = file_id
        status = "cancelled" if cancelled else "expired" if expired else "completed"
        self._ledger.end(
            self._name, self._id, files, status=status, **{f"{status}_at": now}, **fields
        )

    def _give_up_the_rest(self, code: str) -> None:
        for line in self._ledger.waiting(self._id):
            result = unanswered(
                line.custom_id, code, "the batch ended before this request was sent"
            )
            self._ledger.record(self._id, line.number, "failed", result)


def file_object(file_id: str, filename: str, size: int, purpose: str) -> JSON:
    """OpenAI's file object."""
    return {
        "id": file_id,
        "object": "file",
        "bytes": size,
        "created_at": int(time.time()),
        "expires_at": None,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def _write(path: Path, lines: Iterable[str]) -> int:
    """Write lines and rename into place: the size, 0 for no line and no file."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with temporary.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(line + "\n")
        file.flush()
        size = file.tell()
    if size == 0:
        temporary.unlink()
        return 0
    sync_and_place(temporary, path)
    return size


def sync_and_place(temporary: Path, path: Path) -> None:
    """Make a written file durable under its final name."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
