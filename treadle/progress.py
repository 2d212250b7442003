"""How far a run is, while it runs: bars on a terminal, one line per step anywhere else.

Guarantees: nothing is written to stdout; a line is flushed when it is written; numbers that a
step does not have are left out, never invented; nothing here outlives its `with` block.

Takes: events of the loop (kind, data). Gives: text on a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from treadle.config import RunConfig
from treadle.errors import StoreError
from treadle.evals.visible import one_line, visible

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("solved", "reward/solved_frac", ".1%"),
    ("length", "rollout/sampled_tokens_mean", ".1f"),
    ("ce", "loss/ce_nats", ".3f"),
    ("to teacher", "teacher/kl_nats", ".3f"),
    ("entropy", "policy/entropy_nats", ".3f"),
)
"""Word, metric, format: what a line about a step holds."""


def step_line(step: int, steps: int, metrics: Mapping[str, float], skipped: str = "") -> str:
    """One step in words: "step 3/90  reward 0.412  solved 12.5%  ...  dropped 2"."""
    parts = [f"step {step}/{steps}"]
    parts += [f"{word} {metrics[name]:{form}}" for word, name, form in _SHOWN if name in metrics]
    seconds = metrics.get("time/generate_s", 0.0) + metrics.get("time/train_s", 0.0)
    parts.append(f"{seconds:.1f} s")
    if "generate/tokens_per_s" in metrics:
        parts.append(f"{metrics['generate/tokens_per_s']:,.0f} tok/s")
    parts.append(f"dropped {metrics.get('groups/dropped', 0):.0f}")
    if skipped:
        parts.append(f"NOT TRAINED: {skipped}")
    return "  ".join(parts)


class TrainProgress(AbstractContextManager["TrainProgress"]):
    """Observer of a run: `with TrainProgress(config, run_dir, file=sys.stderr) as progress`."""

    def __init__(self, config: RunConfig, run_dir: Path, *, file: TextIO) -> None:
        self._config = config
        self._run_dir = run_dir
        self._file = file
        self._bars = _Bars(config, file) if file.isatty() else None

    def __enter__(self) -> TrainProgress:
        if self._bars is not None:
            self._bars.progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._bars.progress.stop()

    def __call__(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take one event; see `treadle.loop.Observer`."""
        if self._bars is not None:
            self._bars.tell(kind, data)
        if kind == "step":
            if self._bars is None:
                step = int(data["step"])
                line = step_line(step, self._config.steps, data["metrics"], data["skipped"])
                self._line(line)
            elif data["skipped"]:
                self._line(f"step {data['step']} was not trained: {data['skipped']}")
        elif kind == "eval":
            self._line(self._eval(int(data["eval_id"])))
        elif kind == "resume":
            self._line(
                f"resume: {data['step']} steps are done, from the checkpoint of step "
                f"{data['checkpoint']}"
            )
            for reason in data["skipped"]:
                self._line(f"resume: skipped {reason}")
        elif kind == "reapply" and self._bars is None:
            self._line(f"resume: step {data['step']} of {data['last']} re-applied from its samples")

    def _line(self, text: str) -> None:
        text = visible(" ".join(text.splitlines()))  # blanks part its columns
        if self._bars is not None:
            self._bars.progress.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._file, flush=True)

    def _eval(self, eval_id: int) -> str:
        """Rates of an evaluation, as the store has them."""
        from treadle.evals.rates import rates_line
        from treadle.store import Store

        try:
            with Store.open(self._run_dir, readonly=True) as store:
                row = next(row for row in store.evals() if row.id == eval_id)
        except (StoreError, StopIteration) as error:
            return f"eval {eval_id}: its answers cannot be read: {error}"
        return f"eval at step {row.step}  {rates_line(row)}"


class _Bars:
    """Three bars: steps, groups of the step, answers of an evaluation."""

    def __init__(self, config: RunConfig, file: TextIO) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._steps = config.steps
        self._groups = config.rollout.groups_per_step
        self.progress: Progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(),
            console=Console(file=file),
        )
        self._train = self._add("steps", config.steps)
        self._group = self._add("groups of this step", self._groups, visible=False)
        self._answers = self._add("answers", None, visible=False)
        self._dropped = 0

    def _add(self, name: str, total: int | None, *, visible: bool = True) -> TaskID:
        return self.progress.add_task(name, total=total, visible=visible, note="")

    def tell(self, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "group":
            self._dropped += bool(data["dropped"])
            note = f"{self._dropped} dropped" if self._dropped else ""
            done = min(int(data["ready"]), self._groups)
            self.progress.update(self._group, completed=done, visible=True, note=note)
        elif kind == "answers":
            name = one_line(f"answers, {data['taskset']}", 40)
            self.progress.update(
                self._answers,
                completed=data["done"],
                total=data["total"],
                description=name,
                visible=True,
            )
        elif kind == "eval":
            self.progress.reset(self._answers, visible=False)
        elif kind in ("resume", "reapply"):
            self.progress.update(self._train, completed=data["step"], note="restoring")
        elif kind == "step":
            self._dropped = 0
            self.progress.reset(self._group, visible=False, note="")
            note = step_line(data["step"], self._steps, data["metrics"]).partition("  ")[2]
            self.progress.update(self._train, completed=data["step"], note=note)


class StageBar(AbstractContextManager["StageBar"]):
    """Progress of work in stages, e.g. a download: a bar on a terminal, else a line per stage."""

    def __init__(self, *, file: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        self._file = file
        self._stage = ""
        self._progress: Progress | None = None
        if file.isatty():
            self._progress = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                console=Console(file=file),
            )
            self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> StageBar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def tell(self, stage: str, fraction: float | None) -> None:
        """`fraction` of the stage that is done; None = unknown."""
        if self._progress is not None:
            total = None if fraction is None else 1.0
            self._progress.update(
                self._task, description=stage, total=total, completed=fraction or 0.0
            )
        elif stage != self._stage:
            print(stage, file=self._file, flush=True)
        self._stage = stage
