"""What is known of files, batches and lines: SQLite in WAL mode, and the files beside it.

Owns the directory. Blocking: call it from a thread; one connection, one lock, so calls are
serialised. Every method is one transaction; a process killed inside one leaves none of it. Rows
hold OpenAI's objects as JSON, so what a client sees is what was stored.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mooncake_serve.api.batches.quota import Quota

BUSY_TIMEOUT_S = 10.0
VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, number INTEGER NOT NULL, document TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, number INTEGER NOT NULL, status TEXT NOT NULL,
  document TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS lines (
  batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, run INTEGER NOT NULL,
  start INTEGER NOT NULL, length INTEGER NOT NULL, outcome TEXT, result TEXT,
  PRIMARY KEY (batch, number)
) WITHOUT ROWID;
"""

JSON = dict[str, Any]
ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch: where its bytes are in the input file, and its group."""

    number: int
    custom_id: str
    run: int
    """Lines of one run share a prompt's beginning."""
    start: int
    length: int


class Ledger:
    """The directory of one application."""

    def __init__(self, folder: Path) -> None:
        """Opens or makes it. Raises OSError or sqlite3.Error."""
        self._files = folder / "files"
        self._files.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.lock_path = folder / "runner.lock"
        self._lock = threading.Lock()
        self._db = sqlite3.connect(
            folder / "batches.sqlite",
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
        )
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise sqlite3.DatabaseError(f"{folder} was written by another version: {version}")
        self._db.executescript(_SCHEMA + f"PRAGMA user_version={VERSION};")

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._db.close()

    def path(self, file_id: str) -> Path:
        """Where a file's bytes are."""
        return self._files / file_id

    def check_room(self, tenant: str, quota: Quota) -> None:
        """Whether the tenant may add a file at all. Raises InvalidRequest."""
        with self._transaction() as db:
            quota.check_file(*_stored(db, tenant), 0)

    def add_file(self, tenant: str, document: JSON, quota: Quota) -> None:
        """A file whose bytes are in place already. Raises InvalidRequest beyond the quota."""
        with self._transaction() as db:
            quota.check_file(*_stored(db, tenant), document["bytes"])
            _add(db, "files", tenant, document)

    def file(self, tenant: str, file_id: str) -> JSON | None:
        """A file's object."""
        return self._one("files", tenant, file_id)

    def drop_file(self, tenant: str, file_id: str) -> bool:
        """Forget a file and its bytes; False when an unfinished batch still reads it."""
        with self._transaction() as db:
            marks = ",".join("?" * len(ENDED))
            used = db.execute(
                f"SELECT 1 FROM batches WHERE status NOT IN ({marks}) "
                "AND json_extract(document, '$.input_file_id') = ?",
                (*ENDED, file_id),
            ).fetchone()
            if used:
                return False
            db.execute("DELETE FROM files WHERE id = ? AND tenant = ?", (file_id, tenant))
        self.path(file_id).unlink(missing_ok=True)
        return True

    def list(
        self,
        table: str,
        tenant: str,
        after: str | None,
        limit: int,
        *,
        newest_first: bool = True,
        purpose: str | None = None,
    ) -> list[JSON]:
        """Objects of "files" or "batches" after the one with id `after`; one more than `limit`.

        With `purpose`, files of that one. After an object that the tenant does not have comes none.
        """
        assert table in {"files", "batches"}
        order, than = ("DESC", "<") if newest_first else ("ASC", ">")
        with self._transaction() as db:
            which, values = "", [tenant]
            if after is not None:
                which = (
                    f"AND number {than} (SELECT number FROM {table} WHERE tenant = ? AND id = ?)"
                )
                values += [tenant, after]
            if purpose is not None:
                which += " AND json_extract(document, '$.purpose') = ?"
                values.append(purpose)
            rows = db.execute(
                f"SELECT document FROM {table} WHERE tenant = ? {which} "
                f"ORDER BY number {order} LIMIT ?",
                (*values, limit + 1),
            ).fetchall()
        return [json.loads(row[0]) for row in rows]

    def add_batch(self, tenant: str, document: JSON, quota: Quota) -> bool:
        """A new batch; False when the tenant has no such input file. Raises RateLimited."""
        with self._transaction() as db:
            marks = ",".join("?" * len(ENDED))
            unfinished = db.execute(
                f"SELECT count(*) FROM batches WHERE tenant = ? AND status NOT IN ({marks})",
                (tenant, *ENDED),
            ).fetchone()
            quota.check_batch(*unfinished)
            owned = db.execute(
                "SELECT 1 FROM files WHERE id = ? AND tenant = ?",
                (document["input_file_id"], tenant),
            ).fetchone()
            if owned:
                _add(db, "batches", tenant, document, status=document["status"])
        return owned is not None

    def batch(self, tenant: str, batch_id: str) -> JSON | None:
        """A batch's object, with its counts of this moment."""
        document = self._one("batches", tenant, batch_id)
        if document is not None:
            document["request_counts"] = self.counts(batch_id)
        return document

    def unfinished(self) -> list[tuple[str, str]]:
        """(tenant, id) of batches that have not ended, oldest first."""
        with self._transaction() as db:
            marks = ",".join("?" * len(ENDED))
            return db.execute(
                f"SELECT tenant, id FROM batches WHERE status NOT IN ({marks}) ORDER BY number",
                ENDED,
            ).fetchall()

    def update(self, batch_id: str, *, unless: Sequence[str] = ENDED, **fields: Any) -> JSON:
        """Set fields of a batch's object, unless its status is one of these: the object."""
        with self._transaction() as db:
            row = db.execute("SELECT document FROM batches WHERE id = ?", (batch_id,)).fetchone()
            document: JSON = json.loads(row[0])
            if document["status"] not in unless:
                document.update(fields)
                db.execute(
                    "UPDATE batches SET status = ?, document = ? WHERE id = ?",
                    (document["status"], json.dumps(document), batch_id),
                )
        return document

    def start(self, batch_id: str, lines: Iterable[Line], **fields: Any) -> JSON:
        """The lines of a batch that was validated; those it had go."""
        with self._transaction() as db:
            db.execute("DELETE FROM lines WHERE batch = ?", (batch_id,))
            db.executemany(
                "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, NULL, NULL)",
                (
                    (batch_id, line.number, line.custom_id, line.run, line.start, line.length)
                    for line in lines
                ),
            )
        return self.update(batch_id, unless=(*ENDED, "cancelling"), **fields)

    def waiting(self, batch_id: str) -> list[Line]:
        """Lines without an answer, runs together, in the order of the file."""
        with self._transaction() as db:
            rows = db.execute(
                "SELECT number, custom_id, run, start, length FROM lines "
                "WHERE batch = ? AND outcome IS NULL ORDER BY run, number",
                (batch_id,),
            ).fetchall()
        return [Line(*row) for row in rows]

    def record(self, batch_id: str, number: int, outcome: str, result: JSON) -> None:
        """A line's answer; the first one counts."""
        with self._transaction() as db:
            db.execute(
                "UPDATE lines SET outcome = ?, result = ? "
                "WHERE batch = ? AND number = ? AND outcome IS NULL",
                (outcome, json.dumps(result), batch_id, number),
            )

    def gave_up(self, batch_id: str, code: str) -> bool:
        """Whether lines of a batch were given up with this error."""
        with self._transaction() as db:
            found = db.execute(
                "SELECT 1 FROM lines WHERE batch = ? AND outcome = 'failed' "
                "AND json_extract(result, '$.error.code') = ? LIMIT 1",
                (batch_id, code),
            ).fetchone()
        return found is not None

    def counts(self, batch_id: str) -> JSON:
        """OpenAI's `request_counts`."""
        with self._transaction() as db:
            total, completed, failed = db.execute(
                "SELECT count(*), count(*) FILTER (WHERE outcome = 'completed'), "
                "count(*) FILTER (WHERE outcome = 'failed') FROM lines WHERE batch = ?",
                (batch_id,),
            ).fetchone()
        return {"total": total, "completed": completed, "failed": failed}

    def results(self, batch_id: str, outcome: str, page: int = 500) -> Iterator[str]:
        """JSON of the answers with this outcome, in the order of the file."""
        last = -1
        while True:
            with self._transaction() as db:
                rows = db.execute(
                    "SELECT number, result FROM lines WHERE batch = ? AND outcome = ? "
                    "AND number > ? ORDER BY number LIMIT ?",
                    (batch_id, outcome, last, page),
                ).fetchall()
            if not rows:
                return
            yield from (row[1] for row in rows)
            last = rows[-1][0]

    def end(self, tenant: str, batch_id: str, files: Sequence[JSON], **fields: Any) -> JSON:
        """A batch's last step: its output files and its final status, together."""
        with self._transaction() as db:
            for document in files:
                _add(db, "files", tenant, document)
            row = db.execute("SELECT document FROM batches WHERE id = ?", (batch_id,)).fetchone()
            document = {**json.loads(row[0]), **fields}
            db.execute(
                "UPDATE batches SET status = ?, document = ? WHERE id = ?",
                (document["status"], json.dumps(document), batch_id),
            )
        return document

    def _one(self, table: str, tenant: str, key: str) -> JSON | None:
        with self._transaction() as db:
            row = db.execute(
                f"SELECT document FROM {table} WHERE id = ? AND tenant = ?", (key, tenant)
            ).fetchone()
        return json.loads(row[0]) if row else None

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")


def _stored(db: sqlite3.Connection, tenant: str) -> tuple[int, int]:
    """A tenant's files, and their bytes."""
    return db.execute(
        "SELECT count(*), coalesce(sum(json_extract(document, '$.bytes')), 0) FROM files "
        "WHERE tenant = ?",
        (tenant,),
    ).fetchone()


def _add(
    db: sqlite3.Connection, table: str, tenant: str, document: JSON, status: str | None = None
) -> None:
    number = db.execute(f"SELECT coalesce(max(number), 0) + 1 FROM {table}").fetchone()[0]
    values = [document["id"], tenant, number, *([status] if status else []), json.dumps(document)]
    marks = ",".join("?" * len(values))
    db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", values)
