"""One SQLite connection: transactions, and failures in our words.

Guarantees: a write is one transaction: all of it or nothing, whenever the process dies, and on
the disk when the block ends unless the caller says that this may wait (WAL); a read sees one
moment of the run, also while it is being written by another process. Threads may share a
Database; a forked child may not.

Takes: the path of run.db. Gives: `read()` and `write()` blocks; StoreError for whatever SQLite
or the disk does, ContractError for rows that contradict others.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from treadle.errors import RESUME, RUN_DIR, ContractError, StoreError
from treadle.store import schema

BUSY_TIMEOUT_S = 30.0
"""How long to wait for another connection of the same run (a reader that recovers the WAL)."""

_FULL = (sqlite3.SQLITE_FULL,)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class Database:
    """An open run.db of this schema."""

    def __init__(self, path: Path, *, readonly: bool) -> None:
        """Raises StoreError: no run there, another program's file, a newer schema."""
        if not path.is_file():
            raise StoreError(
                f"there is no run in {path.parent} ({path.name} is missing)",
                hint="name a run directory; `treadle runs list` shows them",
            )
        self.path = path
        self.readonly = readonly
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._durable = True
        with self._errors("opening"):
            db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={'ro' if readonly else 'rw'}",
                uri=True,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            self._db = db
            try:
                schema.check(db, path)
                if not readonly:
                    self._tune(db)
            except BaseException:
                self.close()
                raise

    def _tune(self, db: sqlite3.Connection) -> None:
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise StoreError(
                f"{self.path}: this file system cannot hold a live ledger (journal mode {mode})",
                hint=f"put the run directory on a local disk with {RUN_DIR}",
            )
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")

    @contextlib.contextmanager
    def write(self, what: str, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """One transaction.

        Args:
            what: names it in errors, e.g. "committing step 3".
            durable: on the disk when the block ends. Otherwise only the end of the process is
                survived, and a power cut once the next durable one has ended: no wait for a disk.
        """
        if self.readonly:
            raise StoreError(
                f"{what}: {self.path} was opened for reading",
                hint="open it with readonly=False; only one process at a time can",
            )
        with self._lock:
            if self._db is not None and not self._db.in_transaction and durable != self._durable:
                self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._durable = durable
            with self._transaction(what, "BEGIN IMMEDIATE") as db:
                yield db

    @contextlib.contextmanager
    def read(self, what: str) -> Iterator[sqlite3.Connection]:
        """A view of one moment. Keep the block short: the WAL grows while it is open."""
        with self._transaction(what, "BEGIN") as db:
            yield db

    @contextlib.contextmanager
    def _transaction(self, what: str, begin: str) -> Iterator[sqlite3.Connection]:
        if os.getpid() != self._pid:
            raise StoreError(
                f"{what}: {self.path} was opened by process {self._pid}, this is {os.getpid()}",
                hint="open the run again in the child, readonly=True",
            )
        with self._lock, self._errors(what):
            db = self._db
            if db is None:
                raise StoreError(f"{what}: {self.path} is closed")
            if db.in_transaction:
                raise StoreError(f"{what}: inside another transaction of the same thread")
            db.execute(begin)
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                # A full disk makes SQLite roll back by itself.
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def verify(self) -> None:
        """Raises StoreError when pages of the file are damaged or rows point nowhere."""
        with self.read("checking") as db:
            faults = [row[0] for row in db.execute("PRAGMA quick_check(5)")]
            if faults != ["ok"]:
                raise self._damaged("checking", "; ".join(faults))
            orphan = db.execute("PRAGMA foreign_key_check").fetchone()
            if orphan is not None:
                raise self._damaged("checking", f"a row of {orphan[0]} names no {orphan[2]}")

    def close(self) -> None:
        """Idempotent. The writer leaves one plain file, if no reader is open."""
        with self._lock:
            db, self._db = self._db, None
            if db is None or os.getpid() != self._pid:
                return
            with contextlib.suppress(sqlite3.Error):
                if not self.readonly:
                    # A finished run can be read from a directory that nobody may write to, which
                    # a WAL forbids. Refused while a reader is open: then it stays a WAL.
                    db.execute("PRAGMA busy_timeout = 0")
                    db.execute("PRAGMA journal_mode = DELETE")
            with contextlib.suppress(sqlite3.Error):
                db.close()

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise ContractError(f"{what}: {self.path}: {error}") from error
        except sqlite3.Error as error:
            # Extended codes keep the primary one in the low byte.
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in _FULL:
                raise StoreError(
                    f"{what}: the disk of {self.path} is full; nothing of this was stored, "
                    "everything before it was",
                    hint=f"free space (`treadle runs gc` lists what can go), then {RESUME}",
                ) from error
            if code in _DAMAGED:
                raise self._damaged(what, str(error)) from error
            if code == sqlite3.SQLITE_BUSY:
                raise StoreError(
                    f"{what}: {self.path} was locked by another program for {BUSY_TIMEOUT_S:g} s",
                    hint="close what has run.db open for writing",
                ) from error
            raise StoreError(
                f"{what}: {self.path}: {error}",
                hint="is the disk there, and may this user write to it?",
            ) from error

    def _damaged(self, what: str, detail: str) -> StoreError:
        return StoreError(
            f"{what}: {self.path} is damaged: {detail}",
            hint="keep a copy, then try `sqlite3 run.db .recover`; checkpoints beside it are "
            "verified on their own",
        )
