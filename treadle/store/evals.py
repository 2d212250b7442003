"""Evaluations in the ledger, answer by answer.

Guarantees: an answer is on the disk when `add_eval_result` returns, so a killed evaluation
goes on with what is missing, and one that is asked for more samples adds them (B148); every
number carries the settings that make it mean something (B155).

Takes: settings and answers. Gives: rows in run.db, and evaluations back.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from treadle.errors import StoreError
from treadle.store import encode
from treadle.store.database import Database
from treadle.store.records import EvalResult, EvalRow
from treadle.types import Trajectory


class Evals:
    """Evaluations; part of `Store`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def begin_eval(
        self,
        *,
        step: int,
        version: int,
        taskset: str,
        split: str,
        temperature: float,
        data_hash: str,
        settings: Mapping[str, Any],
    ) -> int:
        """The id of the evaluation with exactly these settings, begun now or earlier.

        Args:
            step: optimiser steps done by the weights that answer.
            version: policy version that answers.
            data_hash: of the questions, so that two numbers can be compared.
            settings: everything else that shapes an answer (top_p, max_new_tokens, seed, harness,
                template hash, ...). The numbers of questions and samples are results, not settings.
        """
        text = encode.dumps(dict(sorted(settings.items())), "eval settings")
        key = (step, version, taskset, split, float(temperature), data_hash, text)
        with self._db.write(f"beginning the eval of step {step} on {taskset}") as db:
            db.execute(
                "INSERT OR IGNORE INTO evals (step, version, taskset, split, temperature, "
                "data_hash, settings, started_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (*key, time.time()),
            )
            (id,) = db.execute(
                "SELECT id FROM evals WHERE step = ? AND version = ? AND taskset = ? "
                "AND split = ? AND temperature = ? AND data_hash = ? AND settings = ?",
                key,
            ).fetchone()
        return id

    def eval_done(self, eval_id: int) -> frozenset[tuple[str, int]]:
        """(task id, sample) of the answers that are stored."""
        with self._db.read(f"reading eval {eval_id}") as db:
            rows = db.execute(
                "SELECT task_id, sample FROM eval_results WHERE eval_id = ?", (eval_id,)
            ).fetchall()
        return frozenset(rows)

    def add_eval_result(self, eval_id: int, result: EvalResult) -> None:
        """One answer; stored again (after an error, say) it replaces the old one."""
        trajectory = result.trajectory
        with self._db.write(f"storing an answer of eval {eval_id}") as db:
            if trajectory is not None:
                db.execute(
                    "INSERT OR IGNORE INTO eval_tasks VALUES (?, ?, ?)",
                    (eval_id, result.task_id, encode.dump_task(trajectory.task)),
                )
            db.execute(
                "INSERT OR REPLACE INTO eval_results VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    eval_id,
                    result.task_id,
                    result.sample,
                    None if result.score is None else float(result.score),
                    encode.dumps(dict(result.parts), "eval parts"),
                    encode.dump_error(result.error),
                    encode.dumps(result.answer),
                    result.num_sampled,
                    time.time(),
                    None if trajectory is None else encode.pack_trajectory(trajectory),
                ),
            )

    def finish_eval(self, eval_id: int) -> None:
        """All answers asked for are stored; more may be added later."""
        with self._db.write(f"finishing eval {eval_id}") as db:
            db.execute("UPDATE evals SET finished_at = ? WHERE id = ?", (time.time(), eval_id))

    def evals(self, *, step: int | None = None, finished: bool | None = None) -> list[EvalRow]:
        """Evaluations with their results, by (step, id)."""
        with self._db.read("reading evals") as db:
            heads = db.execute(
                "SELECT id, step, version, taskset, split, temperature, data_hash, settings, "
                "finished_at IS NOT NULL FROM evals WHERE (?1 IS NULL OR step = ?1) "
                "AND (?2 IS NULL OR (finished_at IS NOT NULL) = ?2) ORDER BY step, id",
                (step, finished),
            ).fetchall()
            results: dict[int, list[EvalResult]] = {head[0]: [] for head in heads}
            for id, *row in db.execute(
                "SELECT eval_id, task_id, sample, score, parts, error, answer, num_sampled "
                "FROM eval_results ORDER BY eval_id, task_id, sample"
            ):
                if id in results:
                    results[id].append(_result(*row))
        return [
            EvalRow(
                id=id,
                step=at,
                version=version,
                taskset=taskset,
                split=split,
                temperature=temperature,
                data_hash=data_hash,
                settings=encode.loads(settings),
                finished=bool(done),
                results=tuple(results[id]),
            )
            for id, at, version, taskset, split, temperature, data_hash, settings, done in heads
        ]

    def eval_trajectory(self, eval_id: int, task_id: str, sample: int) -> Trajectory:
        """What one answer did, with its tokens: to read, or to score again."""
        where = f"answer {sample} to {task_id!r} of eval {eval_id}"
        with self._db.read(f"reading {where}") as db:
            row = db.execute(
                "SELECT r.data, t.task FROM eval_results r JOIN eval_tasks t "
                "USING (eval_id, task_id) "
                "WHERE r.eval_id = ? AND r.task_id = ? AND r.sample = ? AND r.data IS NOT NULL",
                (eval_id, task_id, sample),
            ).fetchone()
        if row is None:
            raise StoreError(f"there is no stored trajectory of {where}")
        return encode.unpack_trajectory(row[0], encode.load_task(row[1]), where)


def _result(
    task_id: str,
    sample: int,
    score: float | None,
    parts: str,
    error: str | None,
    answer: str,
    num_sampled: int,
) -> EvalResult:
    return EvalResult(
        task_id=task_id,
        sample=sample,
        score=score,
        parts=encode.loads(parts),
        error=encode.load_error(error),
        answer=encode.loads(answer),
        num_sampled=num_sampled,
    )
