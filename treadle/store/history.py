"""Reading the ledger: what was prompted, generated and trained.

Guarantees: what was stored comes back equal (`encode`), also while the run is being written;
`samples_of_step` gives the very samples that the step trained, in its order, so that a step can
be re-applied after a crash (contract 11).

Takes: a Database. Gives: rows, Groups, Trajectories, Samples.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from treadle.errors import StoreError
from treadle.store import encode
from treadle.store.database import Database
from treadle.store.records import (
    CheckpointRecord,
    Frontier,
    PromptRow,
    StepRow,
    TrajectoryRow,
)
from treadle.types import Group, Node, Sample, Task, Trajectory

_ROW_COLUMNS = (
    "t.id, t.ordinal, t.sample, p.taskset, p.task_id, t.status, t.reward, t.parts, t.error, "
    "t.stop_reason, t.num_tokens, t.num_sampled, t.num_trained, t.num_turns, t.version_min, "
    "t.version_max, t.duration_s, t.tool_calls, t.tool_errors, p.state, p.step, "
    "(SELECT s.advantage FROM samples s WHERE s.trajectory_id = t.id LIMIT 1)"
)


class History:
    """The reading half of the ledger; part of `Store`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    # ------------------------------------------------------------------ where the run stands

    def frontier(self) -> Frontier:
        """All that resume and admission need to know."""
        with self._db.read("reading the frontier") as db:
            step, version = db.execute(
                "SELECT step, version FROM steps ORDER BY step DESC LIMIT 1"
            ).fetchone() or (0, 0)
            (last,) = db.execute("SELECT MAX(ordinal) FROM prompts").fetchone()
            counts = dict(
                db.execute(
                    "SELECT state, COUNT(*) FROM prompts WHERE state IN ('dropped', 'trained') "
                    "GROUP BY state"
                )
            )
            published = db.execute(
                "SELECT ordinal FROM prompts WHERE state = 'published' ORDER BY version, ordinal"
            )
            checkpoints = _checkpoints(db)
            return Frontier(
                step=step,
                version=version,
                next_ordinal=0 if last is None else last + 1,
                started=_in_state(db, "started"),
                returned=_in_state(db, "returned"),
                published=tuple(row[0] for row in published),
                num_dropped=counts.get("dropped", 0),
                num_trained=counts.get("trained", 0),
                checkpoint=checkpoints[-1] if checkpoints else None,
            )

    def checkpoints(self) -> tuple[CheckpointRecord, ...]:
        """Complete checkpoints of the ledger, oldest first; retention may have removed some."""
        with self._db.read("reading checkpoints") as db:
            return _checkpoints(db)

    # ------------------------------------------------------------------ prompts and groups

    def prompts(self, *, state: str | None = None) -> tuple[PromptRow, ...]:
        """In order of their ordinals."""
        with self._db.read("reading prompts") as db:
            rows = db.execute(
                "SELECT ordinal, taskset, task_id, split, state, attempts, version, step, reason, "
                "started_at, ended_at FROM prompts WHERE ?1 IS NULL OR state = ?1 "
                "ORDER BY ordinal",
                (state,),
            )
            names = PromptRow.__slots__
            return tuple(PromptRow(**dict(zip(names, row, strict=True))) for row in rows)

    def task(self, ordinal: int) -> Task:
        """The task of a prompt. Raises StoreError when it was never started."""
        with self._db.read(f"reading prompt {ordinal}") as db:
            return _task(db, ordinal)

    def group(self, ordinal: int) -> Group:
        """A stored group. Raises StoreError when nothing was stored for it."""
        with self._db.read(f"reading group {ordinal}") as db:
            task = _task(db, ordinal)
            (version,) = db.execute(
                "SELECT version FROM prompts WHERE ordinal = ?", (ordinal,)
            ).fetchone()
            rows = db.execute(
                "SELECT id, data FROM trajectories WHERE ordinal = ? ORDER BY sample", (ordinal,)
            ).fetchall()
        if version is None:
            raise StoreError(f"nothing was stored for prompt {ordinal}: it has no group")
        return Group(
            ordinal=ordinal,
            task=task,
            version=version,
            trajectories=tuple(
                encode.unpack_trajectory(data, task, f"trajectory {id}") for id, data in rows
            ),
        )

    def groups(self, *, state: str | None = None, step: int | None = None) -> Iterator[Group]:
        """Stored groups by ordinal, one in memory at a time. `step` = those that it trained."""
        with self._db.read("reading groups") as db:
            ordinals = db.execute(
                "SELECT ordinal FROM prompts WHERE version IS NOT NULL "
                "AND (?1 IS NULL OR state = ?1) AND (?2 IS NULL OR step = ?2) ORDER BY ordinal",
                (state, step),
            ).fetchall()
        for (ordinal,) in ordinals:
            yield self.group(ordinal)

    # ------------------------------------------------------------------ trajectories

    def trajectory(self, id: str) -> Trajectory:
        """With its tokens. Raises StoreError for an unknown id."""
        with self._db.read(f"reading trajectory {id}") as db:
            row = db.execute("SELECT ordinal, data FROM trajectories WHERE id = ?", (id,))
            found = row.fetchone()
            if found is None:
                raise StoreError(
                    f"there is no trajectory {id!r} in {self._db.path}",
                    hint='ids are "ORDINAL/SAMPLE", e.g. "12/3"',
                )
            task = _task(db, found[0])
        return encode.unpack_trajectory(found[1], task, f"trajectory {id}")

    def trajectories(
        self, *, step: int | None = None, ordinal: int | None = None
    ) -> tuple[TrajectoryRow, ...]:
        """Rows without tokens, by (ordinal, sample); `step` = those of groups that it trained."""
        with self._db.read("reading trajectories") as db:
            rows = db.execute(
                f"SELECT {_ROW_COLUMNS} FROM trajectories t JOIN prompts p USING (ordinal) "
                "WHERE (?1 IS NULL OR p.step = ?1) AND (?2 IS NULL OR t.ordinal = ?2) "
                "ORDER BY t.ordinal, t.sample",
                (step, ordinal),
            ).fetchall()
        return tuple(_trajectory_row(row) for row in rows)

    # ------------------------------------------------------------------ steps

    def steps(self) -> tuple[StepRow, ...]:
        """Committed steps in order."""
        with self._db.read("reading steps") as db:
            rows = db.execute(
                "SELECT step, version, skipped, reason, checkpoint, committed_at, "
                "(SELECT COUNT(*) FROM samples s WHERE s.step = steps.step) "
                "FROM steps ORDER BY step"
            ).fetchall()
            ordinals: dict[int, list[int]] = {}
            for step, ordinal in db.execute(
                "SELECT step, ordinal FROM prompts WHERE step IS NOT NULL ORDER BY ordinal"
            ):
                ordinals.setdefault(step, []).append(ordinal)
            metrics: dict[int, dict[str, float]] = {}
            for step, name, value in db.execute(
                "SELECT step, name, value FROM metrics WHERE axis = 'train' ORDER BY name"
            ):
                metrics.setdefault(step, {})[name] = float("nan") if value is None else value
        return tuple(
            StepRow(
                step=step,
                version=version,
                skipped=bool(skipped),
                reason=reason,
                ordinals=tuple(ordinals.get(step, ())),
                num_samples=count,
                checkpoint=checkpoint,
                committed_at=at,
                metrics=metrics.get(step, {}),
            )
            for step, version, skipped, reason, checkpoint, at, count in rows
        )

    def samples_of_step(self, step: int) -> list[Sample]:
        """Exactly what `commit_step` was given, in its order. Raises StoreError: no such step."""
        with self._db.read(f"reading the samples of step {step}") as db:
            if db.execute("SELECT 1 FROM steps WHERE step = ?", (step,)).fetchone() is None:
                raise StoreError(f"step {step} was not committed in {self._db.path}")
            rows = db.execute(
                "SELECT s.trajectory_id, s.ordinal, s.leaf, s.taskset, s.advantage, s.temperature, "
                "s.data, t.data FROM samples s JOIN trajectories t ON t.id = s.trajectory_id "
                "WHERE s.step = ? ORDER BY s.position",
                (step,),
            ).fetchall()
            tasks = {row[1]: _task(db, row[1]) for row in rows}
        samples = []
        for id, ordinal, leaf, taskset, advantage, temperature, data, stored in rows:
            where = f"sample of trajectory {id}"
            tokens = {} if data is None else encode.unpack_tokens(data, where)
            if leaf is not None:
                whole = encode.unpack_trajectory(stored, tasks[ordinal], where)
                branch = branch_tokens(branches(whole)[leaf], tokens.get("trained"))
                tokens = tokens | branch
            alike = tuple(advantage if t else math.nan for t in tokens["trained"])
            columns: dict[str, tuple[Any, ...]] = {"advantages": alike, **tokens}
            samples.append(
                Sample(
                    trajectory_id=id,
                    ordinal=ordinal,
                    temperature=temperature,
                    taskset=taskset,
                    **columns,
                )
            )
        return samples


def branches(trajectory: Trajectory) -> dict[int, tuple[Node, ...]]:
    """Branches by the id of their leaf."""
    return {branch[-1].id: branch for branch in trajectory.branches()}


def branch_tokens(
    branch: tuple[Node, ...], trained: tuple[bool, ...] | None = None
) -> dict[str, tuple[Any, ...]]:
    """Fields ids, trained, logprobs and versions of a Sample that is this branch.

    `trained` replaces the nodes' own marks: a node that several branches share is trained in one
    of them. Tokens that are not trained have neither logprob nor version.
    """
    if trained is None:
        trained = tuple(t for node in branch for t in node.trained)
    logprobs = (p for node in branch for p in node.logprobs)
    versions = (v for node in branch for v in node.versions)
    return {
        "ids": tuple(i for node in branch for i in node.ids),
        "trained": trained,
        "logprobs": tuple(p if t else math.nan for p, t in zip(logprobs, trained, strict=True)),
        "versions": tuple(v if t else -1 for v, t in zip(versions, trained, strict=True)),
    }


def _in_state(db: sqlite3.Connection, state: str) -> tuple[int, ...]:
    rows = db.execute("SELECT ordinal FROM prompts WHERE state = ? ORDER BY ordinal", (state,))
    return tuple(row[0] for row in rows)


def _checkpoints(db: sqlite3.Connection) -> tuple[CheckpointRecord, ...]:
    rows = db.execute("SELECT step, path, bytes, sha256 FROM checkpoints ORDER BY step")
    return tuple(CheckpointRecord(step=s, path=p, bytes=b, sha256=h) for s, p, b, h in rows)


def _task(db: sqlite3.Connection, ordinal: int) -> Task:
    row = db.execute("SELECT task FROM prompts WHERE ordinal = ?", (ordinal,)).fetchone()
    if row is None:
        raise StoreError(f"prompt {ordinal} was never started in this run")
    return encode.load_task(row[0])


def _trajectory_row(row: Sequence[Any]) -> TrajectoryRow:
    values = dict(zip(TrajectoryRow.__slots__, row, strict=True))
    values["parts"] = encode.loads(values["parts"])
    values["error"] = encode.load_error(values["error"])
    return TrajectoryRow(**values)
