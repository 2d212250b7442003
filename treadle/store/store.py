"""The run's ledger as one object: open it, write what happened, read it back.

Guarantees: one writer per run (`lock`), any number of readers beside it; `create` leaves a
whole ledger or none; opening a run to go on with it checks the file, and gives prompts that
were in flight when the last writer died back to the front, which is counted as an event. The
process environment is never stored.

Takes: a run directory. Gives: a Store; see `Ledger`, `History`, `Evals`, `Telemetry`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from treadle.config import RunConfig, from_dict, to_dict
from treadle.errors import RESUME, RUN_DIR, StoreError
from treadle.store import encode, lock, schema
from treadle.store.database import Database
from treadle.store.evals import Evals
from treadle.store.layout import CHECKPOINTS, DATABASE, TEMPORARY, sync_dir
from treadle.store.ledger import Ledger
from treadle.store.records import RunInfo, Session
from treadle.store.telemetry import Telemetry
from treadle.types import Provenance


class Store(Ledger, Evals, Telemetry):
    """A run's ledger. Use as a context manager, or call `close`."""

    def __init__(self, run_dir: Path, db: Database, held: lock.Lock | None) -> None:
        super().__init__(db)
        self.run_dir = run_dir
        self._held = held
        self._session: int | None = None

    # ------------------------------------------------------------------ life

    @classmethod
    def create(
        cls,
        run_dir: str | Path,
        config: RunConfig,
        *,
        provenance: Mapping[str, Provenance],
        facts: Mapping[str, Any] | None = None,
    ) -> Store:
        """Start a run in a new or empty directory.

        Args:
            config: resolved; comes back with `config()`.
            provenance: source and licence by role: "model", "tasks.0", ... (contract 12).
            facts: of the machine and of package versions; JSON-like values.

        Raises StoreError: a run is there already, another process writes it, the disk refuses.
        """
        run_dir = Path(run_dir)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot make the run directory {run_dir}: {error.strerror}",
                hint=f"choose another place with {RUN_DIR}",
            ) from error
        held = lock.acquire(run_dir)
        try:
            if (run_dir / DATABASE).exists():
                raise StoreError(
                    f"{run_dir} holds a run already",
                    hint=f"go on with it by {RESUME}, or choose another {RUN_DIR}",
                )
            meta = {
                "config": to_dict(config),
                "provenance": {role: asdict(p) for role, p in provenance.items()},
                "facts": dict(facts or {}),
                "created_at": time.time(),
            }
            _build(run_dir / DATABASE, {k: encode.dumps(v, k) for k, v in meta.items()})
            store = cls(run_dir, Database(run_dir / DATABASE, readonly=False), held)
            store._begin_session(facts)
            return store
        except BaseException:
            held.release()
            raise

    @classmethod
    def open(
        cls,
        run_dir: str | Path,
        *,
        readonly: bool,
        facts: Mapping[str, Any] | None = None,
    ) -> Store:
        """Open an existing run, to read it or to go on with it.

        Reading works from any process while the run is written. Going on checks the file, and
        returns prompts in flight (`Frontier.returned`); both leave an event.

        Raises StoreError: no run, another writer, a newer schema, a damaged file.
        """
        run_dir = Path(run_dir)
        path = run_dir / DATABASE
        if readonly:
            return cls(run_dir, Database(path, readonly=True), None)
        if not path.is_file():
            Database(path, readonly=True)  # raises; and no lock file is left in a stray directory
        held = lock.acquire(run_dir)
        try:
            store = cls(run_dir, Database(path, readonly=False), held)
            try:
                store._db.verify()
                store._take_over()
                store._begin_session(facts)
            except BaseException:
                store._db.close()
                raise
            return store
        except BaseException:
            held.release()
            raise

    def _take_over(self) -> None:
        with self._db.write("ending sessions whose process died") as db:
            died = db.execute(
                "UPDATE sessions SET status = 'interrupted', ended_at = ? WHERE status = 'running'",
                (time.time(),),
            ).rowcount
        returned = self.return_started()
        self.add_event("resume", {"killed": bool(died), "returned": list(returned)})

    def _begin_session(self, facts: Mapping[str, Any] | None) -> None:
        text = encode.dumps(dict(facts or {}), "facts")
        with self._db.write("beginning a session") as db:
            self._session = db.execute(
                "INSERT INTO sessions (pid, host, started_at, status, facts) "
                "VALUES (?, ?, ?, 'running', ?)",
                (os.getpid(), socket.gethostname(), time.time(), text),
            ).lastrowid

    def finish(self, status: str, cause: str = "") -> None:
        """How this session ends: "finished", "failed" (with the cause) or "interrupted"."""
        if status not in ("finished", "failed", "interrupted"):
            raise ValueError(f"a session ends finished, failed or interrupted, not {status!r}")
        with self._db.write("ending the session") as db:
            db.execute(
                "UPDATE sessions SET status = ?, cause = ?, ended_at = ? WHERE id = ?",
                (
                    status,
                    cause.encode("utf-8", "backslashreplace").decode(),
                    time.time(),
                    self._session,
                ),
            )

    def close(self) -> None:
        """Idempotent. A writer that closes without `finish` was interrupted."""
        if self._session is not None and not self.readonly:
            with contextlib.suppress(StoreError), self._db.write("closing") as db:
                db.execute(
                    "UPDATE sessions SET status = 'interrupted', ended_at = ? "
                    "WHERE id = ? AND status = 'running'",
                    (time.time(), self._session),
                )
            self._session = None
        self._db.close()
        if self._held is not None:
            self._held.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ------------------------------------------------------------------ what the run is

    @property
    def readonly(self) -> bool:
        return self._db.readonly

    def info(self) -> RunInfo:
        """Config as stored, provenance, facts, sessions."""
        with self._db.read("reading the run") as db:
            meta = {k: encode.loads(v) for k, v in db.execute("SELECT key, value FROM meta")}
            rows = db.execute(
                "SELECT pid, host, started_at, ended_at, status, cause, facts FROM sessions "
                "ORDER BY id"
            ).fetchall()
        return RunInfo(
            config=meta["config"],
            provenance={role: Provenance(**p) for role, p in meta["provenance"].items()},
            facts=meta["facts"],
            created_at=meta["created_at"],
            sessions=tuple(
                Session(
                    pid=pid,
                    host=host,
                    started_at=start,
                    ended_at=end,
                    status=status,
                    cause=cause,
                    facts=encode.loads(facts),
                )
                for pid, host, start, end, status, cause, facts in rows
            ),
        )

    def config(self) -> RunConfig:
        """The config of the run. Raises ConfigError when keys have changed."""
        return from_dict(dict(self.info().config))

    def set_config(self, config: RunConfig) -> None:
        """What a run that goes on was given anew, e.g. more steps; the caller allows it."""
        text = encode.dumps(to_dict(config), "config")
        with self._db.write("storing the config") as db:
            db.execute("UPDATE meta SET value = ? WHERE key = 'config'", (text,))


def _build(path: Path, meta: Mapping[str, str]) -> None:
    """A whole ledger or none: made under another name, then renamed."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        temporary.unlink(missing_ok=True)
        db = sqlite3.connect(temporary, isolation_level=None)
        try:
            schema.build(db)
            db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        finally:
            db.close()
        (path.parent / CHECKPOINTS).mkdir(exist_ok=True)
        os.replace(temporary, path)
        sync_dir(path.parent)
    except (sqlite3.Error, OSError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StoreError(
            f"cannot make the ledger {path}: {error}",
            hint="is there space, and may this user write there?",
        ) from error
