"""What the store hands out: rows as frozen values.

Step numbers are counts: step s is the s-th optimiser step, step 0 is the state before any, so
"the last committed step is 5" and "5 steps are done" are the same sentence.

Takes: nothing. Gives: the vocabulary of readers of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.errors import ErrorRecord
from treadle.types import Provenance, Status, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One process that wrote the run: the first one, and each that resumed it."""

    pid: int
    host: str
    started_at: float
    """Seconds since the epoch, as every time here."""
    ended_at: float | None
    status: str
    """running | finished | failed | interrupted"""
    cause: str
    """Why it failed; its last lines."""
    facts: Mapping[str, Any]
    """Machine facts and versions as the caller gave them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What the run is."""

    config: Mapping[str, Any]
    """As `config.to_dict` gave it: readable also when today's config has other keys."""
    provenance: Mapping[str, Provenance]
    """By role: "model", "tasks.0", ... (contract 12)."""
    facts: Mapping[str, Any]
    """Machine facts and versions at creation."""
    created_at: float
    sessions: tuple[Session, ...]

    @property
    def status(self) -> str:
        """Of the last session. "running" of a process that was killed reads "interrupted" in
        `retention.list_runs`, which looks at the lock."""
        return self.sessions[-1].status if self.sessions else "interrupted"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRecord:
    """A complete checkpoint: the state after `step`."""

    step: int
    path: str
    """Relative to the run directory, so that a run can be moved."""
    bytes: int
    sha256: str
    """Of its manifest, which holds the sums of its files."""

    def at(self, run_dir: Path) -> Path:
        return run_dir / self.path


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """Where the run stands: all that resume and admission need to know."""

    step: int
    """Last committed step; 0 = none."""
    version: int
    """Published by it; 0 = the weights at the start."""
    next_ordinal: int
    """First that was never started."""
    started: tuple[int, ...]
    """In flight now, ascending."""
    returned: tuple[int, ...]
    """In flight when a writer died, ascending: start these before `next_ordinal`."""
    published: tuple[int, ...]
    """Generated and judged, waiting for a step, oldest version first."""
    num_dropped: int
    num_trained: int
    checkpoint: CheckpointRecord | None
    """Newest one in the ledger; steps after it are re-applied from `samples_of_step`."""

    @property
    def num_started(self) -> int:
        """Groups that hold or held a place, in the sense of `schedule.Progress`: returned ones
        gave theirs back."""
        return self.num_dropped + self.num_trained + len(self.started) + len(self.published)


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptRow:
    """The life of one prompt."""

    ordinal: int
    taskset: str
    task_id: str
    split: str
    state: str
    """started | returned | published | dropped | trained"""
    attempts: int
    version: int | None
    """Oldest policy version in its group."""
    step: int | None
    reason: str
    """Why it was dropped, or left out by the step that consumed it."""
    started_at: float
    ended_at: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryRow:
    """A trajectory without its tokens: enough for tables and curves."""

    id: str
    ordinal: int
    sample: int
    taskset: str
    task_id: str
    status: str
    reward: float | None
    parts: Mapping[str, float]
    error: ErrorRecord | None
    """Of the trajectory, else of its reward."""
    stop_reason: str | None
    """Of the policy's last turn."""
    num_tokens: int
    """All nodes, shared ones once."""
    num_sampled: int
    num_trained: int
    num_turns: int
    """Sampler calls."""
    version_min: int | None
    version_max: int | None
    duration_s: float
    tool_calls: int
    tool_errors: int
    state: str
    """Of its prompt."""
    step: int | None
    """That consumed its group; `advantage` None = this one was left out of it."""
    advantage: float | None

    @property
    def demonstrated(self) -> bool:
        """Nothing was sampled, and there are tokens to learn."""
        return self.num_trained > 0 and self.num_sampled == 0

    @property
    def scored(self) -> bool:
        """It is in its `Group.scored`."""
        judged = self.status in (Status.FINISHED, Status.TRUNCATED)
        return judged and self.reward is not None and self.num_trained > 0

    @property
    def passed(self) -> bool:
        """A full strict score (part `score`, else the reward, >= 1) of a scored one."""
        score = self.parts.get("score", self.reward)
        return self.scored and score is not None and score >= 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """A committed step."""

    step: int
    version: int
    """Published by this step."""
    skipped: bool
    reason: str
    """Why it was skipped."""
    ordinals: tuple[int, ...]
    """Groups it consumed, ascending."""
    num_samples: int
    checkpoint: int | None
    """Step of the newest complete checkpoint when it was committed."""
    committed_at: float
    metrics: Mapping[str, float]
    """The values it was committed with, on axis "train"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalResult:
    """One answer to one held-out question."""

    task_id: str
    sample: int
    score: float | None
    """Strict rate; None = no verdict, which is not 0."""
    parts: Mapping[str, float] = field(default_factory=dict)
    error: ErrorRecord | None = None
    answer: str = ""
    num_sampled: int = 0
    trajectory: Trajectory | None = None
    """Given when it is written; read back with `Store.eval_trajectory`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRow:
    """An evaluation with the settings that make its number mean something (B155)."""

    id: int
    step: int
    version: int
    taskset: str
    split: str
    temperature: float
    data_hash: str
    settings: Mapping[str, Any]
    finished: bool
    results: tuple[EvalResult, ...]
    """In order of (task_id, sample)."""

    @property
    def n(self) -> int:
        """Distinct questions that have an answer or an error."""
        return len({r.task_id for r in self.results})

    @property
    def k(self) -> int:
        """Samples of the question that has the fewest."""
        counts: dict[str, int] = {}
        for result in self.results:
            counts[result.task_id] = counts.get(result.task_id, 0) + 1
        return min(counts.values(), default=0)

    @property
    def error_share(self) -> float:
        """Share of results without a verdict, in [0, 1]."""
        return sum(r.score is None for r in self.results) / max(1, len(self.results))


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something worth telling: an error, an alarm, a resume."""

    time: float
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    axis: str
    """Whose count `step` is: "train", "eval", "engine", ... ; axes never share a counter."""
    step: int
    name: str
    value: float
    time: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Time that a stage spent for a step."""

    step: int
    stage: str
    started_at: float
    duration_s: float
