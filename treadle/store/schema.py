"""The tables of run.db, and who may open them.

    runs      meta, sessions            what the run is; each process that wrote it
    ledger    prompts -> trajectories   a prompt's life and what was generated for it
              steps -> samples          what each step trained, by reference to trajectories
              checkpoints               complete ones that the ledger trusts
    evals     evals -> eval_tasks, eval_results
    telemetry metrics, spans, events    each source of metrics on its own axis

A prompt's state:

    started ──► published ──► trained          consumed by the step in `prompts.step`
       │  └────────┴────────► dropped          with a reason; its trajectories are kept
       └──► returned ──► started               in flight when the writer died: goes first again

Guarantees: a database of a newer schema, of another program, or half made is refused with the
next step.

Takes: a connection. Gives: tables, or a StoreError.
"""

from __future__ import annotations

import sqlite3

from treadle.errors import StoreError

APPLICATION_ID = 0x54524431
"""SQLite's application id of a run: "TRD1"."""
VERSION = 2
"""Of the schema. +1 with every change of a table or of the meaning of a column."""

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY, pid INTEGER NOT NULL, host TEXT NOT NULL, started_at REAL NOT NULL,
    ended_at REAL, status TEXT NOT NULL, cause TEXT NOT NULL DEFAULT '', facts TEXT NOT NULL
);

CREATE TABLE prompts (
    ordinal INTEGER PRIMARY KEY, taskset TEXT NOT NULL, task_id TEXT NOT NULL,
    split TEXT NOT NULL, task TEXT NOT NULL,
    state TEXT NOT NULL
        CHECK (state IN ('started', 'returned', 'published', 'dropped', 'trained')),
    attempts INTEGER NOT NULL DEFAULT 1, version INTEGER, step INTEGER REFERENCES steps (step),
    reason TEXT NOT NULL DEFAULT '', started_at REAL NOT NULL, ended_at REAL,
    CHECK ((state = 'trained') = (step IS NOT NULL))
);
CREATE INDEX prompts_by_state ON prompts (state);
CREATE INDEX prompts_by_step ON prompts (step) WHERE step IS NOT NULL;
CREATE TABLE trajectories (
    id TEXT PRIMARY KEY, ordinal INTEGER NOT NULL REFERENCES prompts (ordinal),
    sample INTEGER NOT NULL, status TEXT NOT NULL, reward REAL, parts TEXT NOT NULL,
    error TEXT, stop_reason TEXT, num_tokens INTEGER NOT NULL, num_sampled INTEGER NOT NULL,
    num_trained INTEGER NOT NULL, num_turns INTEGER NOT NULL, version_min INTEGER,
    version_max INTEGER, duration_s REAL NOT NULL, tool_calls INTEGER NOT NULL,
    tool_errors INTEGER NOT NULL, stored_at REAL NOT NULL, data BLOB NOT NULL
);
CREATE INDEX trajectories_by_ordinal ON trajectories (ordinal, sample);

CREATE TABLE steps (
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, skipped INTEGER NOT NULL,
    reason TEXT NOT NULL, checkpoint INTEGER, committed_at REAL NOT NULL
);
CREATE TABLE samples (
    step INTEGER NOT NULL REFERENCES steps (step), position INTEGER NOT NULL,
    trajectory_id TEXT NOT NULL REFERENCES trajectories (id), ordinal INTEGER NOT NULL,
    leaf INTEGER, taskset TEXT NOT NULL, advantage REAL NOT NULL, temperature REAL NOT NULL,
    data BLOB,
    PRIMARY KEY (step, position), CHECK (leaf IS NOT NULL OR data IS NOT NULL)
) WITHOUT ROWID;
CREATE INDEX samples_by_trajectory ON samples (trajectory_id);
CREATE TABLE checkpoints (
    step INTEGER PRIMARY KEY, path TEXT NOT NULL, bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL, saved_at REAL NOT NULL
);

CREATE TABLE evals (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, version INTEGER NOT NULL,
    taskset TEXT NOT NULL, split TEXT NOT NULL, temperature REAL NOT NULL,
    data_hash TEXT NOT NULL, settings TEXT NOT NULL, started_at REAL NOT NULL, finished_at REAL,
    UNIQUE (step, version, taskset, split, temperature, data_hash, settings)
);
CREATE TABLE eval_tasks (
    eval_id INTEGER NOT NULL REFERENCES evals (id), task_id TEXT NOT NULL, task TEXT NOT NULL,
    PRIMARY KEY (eval_id, task_id)
) WITHOUT ROWID;
CREATE TABLE eval_results (
    eval_id INTEGER NOT NULL REFERENCES evals (id), task_id TEXT NOT NULL,
    sample INTEGER NOT NULL, score REAL, parts TEXT NOT NULL, error TEXT,
    answer TEXT NOT NULL, num_sampled INTEGER NOT NULL, stored_at REAL NOT NULL, data BLOB,
    PRIMARY KEY (eval_id, task_id, sample)
);

CREATE TABLE metrics (
    axis TEXT NOT NULL, step INTEGER NOT NULL, name TEXT NOT NULL, value REAL, time REAL NOT NULL,
    PRIMARY KEY (axis, name, step)
) WITHOUT ROWID;
CREATE TABLE spans (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, stage TEXT NOT NULL, started_at REAL NOT NULL,
    duration_s REAL NOT NULL
);
CREATE TABLE events (
    id INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, data TEXT NOT NULL
);
"""


def build(db: sqlite3.Connection) -> None:
    """Make the tables of an empty database."""
    db.executescript(
        f"BEGIN; {TABLES} PRAGMA application_id = {APPLICATION_ID};"
        f"PRAGMA user_version = {VERSION}; COMMIT;"
    )


def check(db: sqlite3.Connection, path: object) -> None:
    """Raises StoreError when `db` is not a run of this schema."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise StoreError(
            f"{path} is a database of another program (application id {application:#x})",
            hint="name a run directory made by `treadle train`",
        )
    if version != VERSION:
        newer = version > VERSION
        raise StoreError(
            f"{path} has store schema {version}; this Treadle reads schema {VERSION}",
            hint="install a newer Treadle to read this run"
            if newer
            else "read this run with the Treadle that wrote it (`treadle runs` names the version)",
        )
