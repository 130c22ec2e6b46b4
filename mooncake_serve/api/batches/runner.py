"""Runs batches to their end, whatever happens to this process meanwhile.

One runner works on a directory at a time: it holds a file lock, so an ingress that is being
replaced and its successor never run the same line. A batch goes validating → in_progress →
finalizing → completed, or failed, expired, cancelled; each step is recorded before the next, and
each can be done again. Lines that share a document go one first, then together, and no more of a
tenant's at once than its limit. The server's own refusals (429, 503) are waited out; any other
error is the line's answer. A disk or database that fails is tried again until it works, at most
`RETRY_MAX_S` apart; whatever else goes wrong fails the batch with its reason.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import sqlite3
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
from mooncake_serve.durable import place
from mooncake_serve.errors import EngineFailed, Overloaded, RequestError, Unavailable

KINDS: dict[str, type[ChatBody] | type[CompletionBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}
LOCK_POLL_S = 0.5
RETRY_S, RETRY_MAX_S = 1.0, 30.0
ENGINE_ATTEMPTS = 3
PRIORITY = 1000
"""Behind everybody who waits for an answer."""
EXPIRED = "batch_expired"
DISK_FAILED = (OSError, sqlite3.Error)

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
        self._places: dict[str, asyncio.Semaphore] = {}
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
                try:
                    unfinished = await asyncio.to_thread(self._ledger.unfinished)
                except DISK_FAILED:
                    log.exception("no batch starts; tried again in %.0f s", RETRY_MAX_S)
                    await asyncio.sleep(RETRY_MAX_S)
                    continue
                for tenant, batch_id in unfinished:
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

    def _start(self, name: str, batch_id: str) -> None:
        tenant = self._keeper.by_name(name)
        most = tenant.limits.concurrency or self._settings.batch_concurrency
        place = self._places.setdefault(name, asyncio.Semaphore(most))
        task = asyncio.ensure_future(_Batch(self, tenant, batch_id, place).run())
        self._running[batch_id] = task
        task.add_done_callback(lambda _: self._running.pop(batch_id, None))


class _Batch:
    """One batch under way."""

    def __init__(
        self, runner: Runner, tenant: Tenant, batch_id: str, place: asyncio.Semaphore
    ) -> None:
        """`place` bounds the lines of the tenant's batches that run at once."""
        self._ledger = runner._ledger
        self._generator = runner._generator
        self._settings = runner._settings
        self._pace = runner._pace
        self._place = place
        self._name = tenant.name
        self._tenant = tenant
        self._id = batch_id
        self._expires = 0
        self._input = Path()
        self._kind: type[ChatBody] | type[CompletionBody] = ChatBody
        self._stopping = False
        self._broken: str | None = None
        """What went wrong that trying again does not help."""

    async def run(self) -> None:
        """All steps that are left, again and again until they are done."""
        pause_s = RETRY_S
        while True:
            try:
                await self._steps()
                return
            except DISK_FAILED:
                log.exception("batch %s goes on in %.0f s", self._id, pause_s)
            except Exception as err:
                log.exception("batch %s fails", self._id)
                self._broken = f"the server failed: {type(err).__name__}; its log has the details"
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def _steps(self) -> None:
        if self._broken is not None:
            report = _errors([{"code": "internal_error", "message": self._broken}])
            await asyncio.to_thread(self._end, "failed", errors=report)
            return
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
            return self._ledger.update(
                self._id, status="failed", failed_at=now, errors=_errors(errors)
            )
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
            try:
                batch = await asyncio.to_thread(self._ledger.batch, self._name, self._id)
                cancelled = batch is None or batch["status"] == "cancelling"
            except DISK_FAILED as err:
                log.warning("batch %s: whether it was cancelled is not known: %s", self._id, err)
                cancelled = False
            self._stopping = cancelled or time.time() >= self._expires
            await asyncio.sleep(LOCK_POLL_S)

    async def _answer(self, line: Line) -> None:
        async with self._place, self._pace.slot():
            if self._stopping:
                return
            asked = await asyncio.to_thread(read_line, self._input, line)
            failures = 0
            while not self._stopping:
                started = time.monotonic()
                try:
                    body = await self._generate(asked)
                except (Overloaded, Unavailable) as err:
                    self._pace.refused(started)
                    wait_s = getattr(err, "retry_after_s", 1.0)
                    await asyncio.sleep(min(wait_s, RETRY_MAX_S))
                    continue
                except Exception as err:  # noqa: BLE001 - it is the line's answer
                    failure = self._known(err)
                    failures += isinstance(failure, EngineFailed)
                    if isinstance(failure, EngineFailed) and failures < ENGINE_ATTEMPTS:
                        continue
                    outcome, status, body = "failed", failure.status, failure.envelope()
                else:
                    self._pace.answered()
                    outcome, status = "completed", 200
                result = answered(line.custom_id, status, body)
                await asyncio.to_thread(self._ledger.record, self._id, line.number, outcome, result)
                return

    def _known(self, error: Exception) -> RequestError:
        """What a caller over HTTP would be told of it."""
        if isinstance(error, RequestError):
            return error
        log.error("a line of batch %s failed", self._id, exc_info=error)
        return EngineFailed("internal error; the server's log has the details")

    async def _generate(self, body: JSON) -> JSON:
        raw = json.dumps({"priority": PRIORITY, **body}).encode()
        deadline = asyncio.get_running_loop().time() + self._settings.request_timeout_s
        asked = Asked(self._tenant, deadline)

        async def work() -> JSON:
            # The pair of types is one of two: checkers cannot follow that through the dictionary.
            kind: Any = self._kind
            return await self._generator.whole(await self._generator.start(raw, kind, asked))

        return await until(deadline, work())

    def _finalize(self) -> None:
        batch = self._ledger.update(self._id, unless=())
        cancelled = batch["status"] == "cancelling"
        expired = bool(self._ledger.waiting(self._id)) or self._ledger.gave_up(self._id, EXPIRED)
        if batch["status"] == "in_progress":
            now = int(time.time())
            batch = self._ledger.update(
                self._id, unless=("cancelling",), status="finalizing", finalizing_at=now
            )
            cancelled = batch["status"] == "cancelling"
        self._end("cancelled" if cancelled else "expired" if expired else "completed")

    def _end(self, status: str, **fields: Any) -> None:
        """Write the output files, then say in one transaction that they and the end are there."""
        for line in self._ledger.waiting(self._id):
            why = "the batch ended before this request was sent"
            result = unanswered(line.custom_id, f"batch_{status}", why)
            self._ledger.record(self._id, line.number, "failed", result)
        files = []
        for name, outcome in (("output_file_id", "completed"), ("error_file_id", "failed")):
            # Named after the batch: doing it again writes the same file.
            file_id = f"file-{self._id.removeprefix('batch_')}-{name.removesuffix('_file_id')}"
            size = _write(self._ledger.path(file_id), self._ledger.results(self._id, outcome))
            if size:
                files.append(file_object(file_id, f"{self._id}_{name}.jsonl", size, "batch_output"))
                fields[name] = file_id
        fields[f"{status}_at"] = int(time.time())
        self._ledger.end(self._name, self._id, files, status=status, **fields)


def _errors(found: list[JSON]) -> JSON:
    """OpenAI's `errors` of a batch."""
    return {"object": "list", "data": [{"param": None, "line": None, **each} for each in found]}


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
        if size:
            place(file, path)
            return size
    temporary.unlink()
    return 0
