"""Writing the ledger: a prompt's life, and the step that consumes it.

Guarantees (contracts 6 and 11):
- a step is done when one transaction says so: prompts consumed, trajectories trained, version
  published, newest complete checkpoint; before it, nothing of the step is there;
- no prompt is skipped or trained twice: ordinals start without gaps, are never reused, and each
  is consumed by at most one step;
- a group is stored whole or not at all, and once: samples refer to its trajectories.

A call out of order is a ContractError and changes nothing.

Takes: what loop did. Gives: rows in run.db; StoreError when the disk refuses.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any

from treadle.errors import ContractError
from treadle.store import encode
from treadle.store.history import History, branch_tokens, branches
from treadle.store.records import CheckpointRecord
from treadle.store.telemetry import put_metrics
from treadle.types import Group, Party, Sample, Source, Task, Trajectory


class Ledger(History):
    """The writing half of the ledger; part of `Store`."""

    # ------------------------------------------------------------------ prompts and groups

    def start_group(self, ordinal: int, task: Task) -> None:
        """A prompt is about to be sampled.

        Args:
            ordinal: a returned one, or the next that was never started.
            task: kept with the prompt; its `data` must be data (JSON values and tuples).

        Raises ContractError: the ordinal was used, or would leave a gap.
        """
        text = encode.dump_task(task)
        with self._db.write(f"starting prompt {ordinal}", durable=False) as db:
            row = db.execute(
                "SELECT state, task_id FROM prompts WHERE ordinal = ?", (ordinal,)
            ).fetchone()
            if row is None:
                (last,) = db.execute("SELECT MAX(ordinal) FROM prompts").fetchone()
                expected = 0 if last is None else last + 1
                if ordinal != expected:
                    raise ContractError(
                        f"prompt {ordinal} was started, but the next is {expected}: "
                        f"{ordinal - expected} prompts would be skipped"
                    )
                db.execute(
                    "INSERT INTO prompts (ordinal, taskset, task_id, split, task, state, "
                    "started_at) VALUES (?, ?, ?, ?, ?, 'started', ?)",
                    (ordinal, task.taskset, task.id, task.split, text, time.time()),
                )
                return
            state, task_id = row
            if state != "returned":
                raise ContractError(f"prompt {ordinal} was started again, but it is {state}")
            if task_id != task.id:
                raise ContractError(
                    f"prompt {ordinal} was task {task_id!r} before the crash and is {task.id!r} "
                    "now: the order of tasks is not a function of (seed, ordinal)",
                    hint="did the task file or the version of its library change?",
                )
            db.execute(
                "UPDATE prompts SET state = 'started', task = ?, attempts = attempts + 1, "
                "started_at = ? WHERE ordinal = ?",
                (text, time.time(), ordinal),
            )

    def publish_group(self, group: Group) -> None:
        """A started group is generated and judged: store it whole."""
        with self._db.write(f"storing group {group.ordinal}") as db:
            _require_state(db, group.ordinal, ("started",), "published")
            _put_group(db, group)
            db.execute(
                "UPDATE prompts SET state = 'published', version = ?, ended_at = ? "
                "WHERE ordinal = ?",
                (group.version, time.time(), group.ordinal),
            )

    def drop_group(self, ordinal: int, reason: str, group: Group | None = None) -> None:
        """A started or published group will not be trained; it gives its place back.

        `group` = what was generated of a group that was not published, kept for reports. A group
        that is judged and found useless is stored and dropped by this one call: publishing it
        first would leave it trainable if the process died in between.
        """
        with self._db.write(f"dropping group {ordinal}") as db:
            state = _require_state(db, ordinal, ("started", "published"), "dropped")
            version = None
            if group is not None:
                if group.ordinal != ordinal or state == "published":
                    raise ContractError(
                        f"group {group.ordinal} was given with the drop of prompt {ordinal}, "
                        f"which is {state}"
                    )
                _put_group(db, group)
                version = group.version
            db.execute(
                "UPDATE prompts SET state = 'dropped', reason = ?, ended_at = ?, "
                "version = COALESCE(?, version) WHERE ordinal = ?",
                (_text(reason), time.time(), version, ordinal),
            )

    def return_started(self) -> tuple[int, ...]:
        """Give prompts in flight back to the front; for a writer that takes over a run."""
        with self._db.write("returning prompts in flight") as db:
            rows = db.execute(
                "SELECT ordinal FROM prompts WHERE state = 'started' ORDER BY ordinal"
            ).fetchall()
            db.execute("UPDATE prompts SET state = 'returned' WHERE state = 'started'")
        return tuple(row[0] for row in rows)

    # ------------------------------------------------------------------ steps

    def commit_step(
        self,
        step: int,
        *,
        version: int,
        ordinals: Sequence[int],
        samples: Sequence[Sample],
        metrics: Mapping[str, float],
        skipped: bool = False,
        reason: str = "",
        left_out: Mapping[int, str] | None = None,
        checkpoint: CheckpointRecord | None = None,
    ) -> None:
        """The one transaction that makes a step done (contract 6).

        Args:
            step: the last committed step + 1.
            version: served from now on; >= the last step's.
            ordinals: published groups that the step consumed, those without samples too.
            samples: in the order that the trainer saw, each of one of these groups.
            metrics: values of the step, on axis "train".
            skipped: the optimiser did not move (non-finite gradient, nothing to train); the
                step still counts, here as everywhere (B153). `reason` says why.
            left_out: of these groups, those that the step consumed and did not train, each with the
                reason; they have no samples.
            checkpoint: a complete one of this step or an earlier one.

        Raises ContractError: out of order, a group that is not published, a sample of another
        group, an advantage that is not finite. StoreError: the disk refused.
        """
        left_out = left_out or {}
        if strange := set(left_out) - set(ordinals) | {s.ordinal for s in samples} & set(left_out):
            raise ContractError(
                f"step {step} leaves out groups that it does not consume, or trains: "
                f"{sorted(strange)}"
            )
        with self._db.write(f"committing step {step}") as db:
            last, served = db.execute(
                "SELECT step, version FROM steps ORDER BY step DESC LIMIT 1"
            ).fetchone() or (0, 0)
            if step != last + 1:
                raise ContractError(f"step {step} was committed after step {last}")
            if version < served:
                raise ContractError(
                    f"step {step} publishes version {version}, but {served} was published before"
                )
            if len(set(ordinals)) != len(ordinals):
                raise ContractError(f"step {step} consumes a group twice: {list(ordinals)}")
            if checkpoint is not None:
                _put_checkpoint(db, checkpoint, step)
            (newest,) = db.execute("SELECT MAX(step) FROM checkpoints").fetchone()
            now = time.time()
            db.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)",
                (step, version, skipped, _text(reason), newest, now),
            )
            for ordinal in ordinals:
                _require_state(db, ordinal, ("published",), "trained")
                db.execute(
                    "UPDATE prompts SET state = 'trained', step = ?, ended_at = ?, reason = ? "
                    "WHERE ordinal = ?",
                    (step, now, _text(left_out.get(ordinal, "")), ordinal),
                )
            _put_samples(db, step, set(ordinals), samples)
            put_metrics(db, "train", step, metrics, now)

    def add_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """A complete checkpoint of a committed step; from now on resume may start there."""
        with self._db.write(f"recording the checkpoint of step {checkpoint.step}") as db:
            (last,) = db.execute("SELECT COALESCE(MAX(step), 0) FROM steps").fetchone()
            _put_checkpoint(db, checkpoint, last)


def _put_checkpoint(db: sqlite3.Connection, checkpoint: CheckpointRecord, last: int) -> None:
    if checkpoint.step > last:
        raise ContractError(
            f"a checkpoint of step {checkpoint.step} was recorded, but the last step is {last}"
        )
    db.execute(
        "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?, ?)",
        (checkpoint.step, checkpoint.path, checkpoint.bytes, checkpoint.sha256, time.time()),
    )


def _put_samples(
    db: sqlite3.Connection, step: int, ordinals: set[int], samples: Sequence[Sample]
) -> None:
    known: dict[str, Trajectory] = {}
    for position, sample in enumerate(samples):
        id = sample.trajectory_id
        if sample.ordinal not in ordinals:
            raise ContractError(
                f"step {step} trains trajectory {id} of group {sample.ordinal}, which it does not "
                f"consume: {sorted(ordinals)}"
            )
        if len(sample.advantages) != len(sample.trained):
            raise ContractError(
                f"a row of trajectory {id} has {len(sample.trained)} tokens and "
                f"{len(sample.advantages)} advantages"
            )
        values = [a for a, t in zip(sample.advantages, sample.trained, strict=True) if t]
        if bad := [a for a in values if not math.isfinite(a)]:
            raise ContractError(f"the advantage of trajectory {id} is {bad[0]}")
        if not values:
            raise ContractError(f"a row of trajectory {id} has no trained token")
        if id not in known:
            row = db.execute(
                "SELECT t.data, p.task FROM trajectories t JOIN prompts p USING (ordinal) "
                "WHERE t.id = ? AND t.ordinal = ?",
                (id, sample.ordinal),
            ).fetchone()
            if row is None:
                raise ContractError(f"group {sample.ordinal} has no stored trajectory {id}")
            known[id] = encode.unpack_trajectory(row[0], encode.load_task(row[1]), id)
        leaf, tokens = _reference(sample, known[id])
        if len(set(values)) > 1:
            tokens["advantages"] = sample.advantages
        if sample.prox_logprobs:
            tokens["prox_logprobs"] = sample.prox_logprobs
        if sample.overtaken:
            tokens["overtaken"] = sample.overtaken
        data = encode.pack_tokens(tokens) if tokens else None
        # One number says it all unless the tokens differ; then it is their mean, for people.
        mean = math.fsum(values) / len(values) if "advantages" in tokens else values[0]
        db.execute(
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(step, position, id, sample.ordinal, leaf, sample.taskset, mean),
                *(sample.temperature, data),
            ),
        )


def _reference(
    sample: Sample, trajectory: Trajectory
) -> tuple[int | None, dict[str, tuple[Any, ...]]]:
    """Leaf and tokens that give the sample back exactly, as small as they can be.

    A branch as it stands is its leaf alone; one whose shared nodes are trained elsewhere adds
    its mask; any other row is kept whole.
    """
    for leaf, branch in branches(trajectory).items():
        if _same(sample, branch_tokens(branch)):
            return leaf, {}
        if len(sample.trained) == sum(len(node.ids) for node in branch) and _same(
            sample, branch_tokens(branch, sample.trained)
        ):
            return leaf, {"trained": sample.trained}
    return None, {n: getattr(sample, n) for n in ("ids", "trained", "logprobs", "versions")}


def _same(sample: Sample, tokens: Mapping[str, tuple]) -> bool:
    return (
        sample.ids == tokens["ids"]
        and sample.trained == tokens["trained"]
        and sample.versions == tokens["versions"]
        and encode.same_floats(sample.logprobs, tokens["logprobs"])
    )


def _require_state(db: sqlite3.Connection, ordinal: int, allowed: tuple[str, ...], to: str) -> str:
    row = db.execute("SELECT state, step FROM prompts WHERE ordinal = ?", (ordinal,)).fetchone()
    if row is None:
        raise ContractError(f"prompt {ordinal} was to be {to}, but it was never started")
    state, step = row
    if state not in allowed:
        by = f" by step {step}" if step is not None else ""
        raise ContractError(f"prompt {ordinal} was to be {to}, but it is {state}{by} already")
    return state


def _put_group(db: sqlite3.Connection, group: Group) -> None:
    (task_id,) = db.execute(
        "SELECT task_id FROM prompts WHERE ordinal = ?", (group.ordinal,)
    ).fetchone()
    if task_id != group.task.id:
        raise ContractError(
            f"group {group.ordinal} is of task {group.task.id!r}, but {task_id!r} was started"
        )
    now = time.time()
    for trajectory in group.trajectories:
        if trajectory.task != group.task:
            raise ContractError(
                f"trajectory {trajectory.id} of group {group.ordinal} has another task"
            )
        db.execute(
            "INSERT INTO trajectories VALUES "
            "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*_columns(trajectory, group.ordinal), now, encode.pack_trajectory(trajectory)),
        )


def _columns(t: Trajectory, ordinal: int) -> tuple:
    turns = [n for n in t.nodes if n.source is Source.SAMPLED and n.party is Party.POLICY]
    versions = [v for n in t.nodes for v in n.versions if v >= 0]
    stop = turns[-1].stop_reason if turns else None
    value = t.reward.value
    return (
        t.id,
        ordinal,
        t.sample,
        str(t.status),
        None if value is None else float(value),
        encode.dumps(dict(t.reward.parts), f"reward parts of {t.id}"),
        encode.dump_error(t.error or t.reward.error),
        None if stop is None else str(stop),
        sum(len(n.ids) for n in t.nodes),
        t.num_sampled_tokens,
        t.num_trained_tokens,
        len(turns),
        min(versions, default=None),
        max(versions, default=None),
        t.duration_s,
        t.tool_calls,
        t.tool_errors,
    )


def _text(text: str) -> str:
    # Messages of the operating system may hold lone surrogates, which SQLite refuses.
    return text.encode("utf-8", "backslashreplace").decode()
