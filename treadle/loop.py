"""The controller: the one file that knows every stage.

           ordinal               Group                 Samples            version
    tasks --------> [generate] --------> ready -----> [learn] --> commit --> publish
                        ^                                            |
                        +---------------- admission <----------------+

    generate   takes: the next ordinal of the task stream. waits for: admission, woken by a group
               that is dropped or a version that is published. gives: a judged group, stored; of
               a task set of demonstrations, one that nothing sampled.
    learn      takes: N ready groups, oldest version first. waits for: groups to finish, woken by
               each; at most as long as a group may take; then for the scores of a teacher, where
               one is distilled. gives: a committed step, a new version.

Synchronous training is this loop with eta = 0. Guarantees:
- every started ordinal ends trained or dropped (with a reason), or stays pending in the ledger;
- a step exists once its one transaction is committed; resume reads the ledger and nothing else:
  the newest complete checkpoint, then later committed steps re-applied from stored samples;
- every wait is bounded and ends with its cause; an error anywhere ends the run with that error.

Takes: `Parts`, built by `api`. Gives: a `Store` that holds everything a user sees.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from treadle.advantage import (
    GROUP_RELATIVE,
    Advantage,
    advantages,
    baseline_metrics,
    distilled,
    group_stats,
    running_baselines,
    teacher_metrics,
    teaches,
    top_spread,
)
from treadle.advantage.credit import credit_metrics, credited, teaches_by_credit
from treadle.batch import demonstrations
from treadle.batch import samples as to_samples
from treadle.config import CreditConfig, RunConfig
from treadle.draws import Draws, Ended
from treadle.errors import ContractError, DataError, HarnessError, first_of
from treadle.evals.answers import gold_of
from treadle.evals.evaluate import ENDING, evaluate, questions
from treadle.evals.visible import one_line, quoted, visible
from treadle.harness import Harness
from treadle.machine import Heap
from treadle.models.policy import Policy
from treadle.render import Renderer
from treadle.rollout import CutShort, alarms, demonstrate, group_metrics, run_group
from treadle.rollout.group import MAX_RETRIES
from treadle.rollout.teacher import Teacher, teacher_logprobs
from treadle.sampler.engine import Engine
from treadle.schedule import Progress, Ready, may_start, next_batch
from treadle.schedule.curriculum import outcome_of
from treadle.store import Span, Store
from treadle.tasks import Demonstrations
from treadle.tasks.mix import Mix
from treadle.threads import within
from treadle.tools import Tools
from treadle.train import StepResult, Trainer
from treadle.types import Group, Party, Reward, Sample, Task, Trajectory
from treadle.weights.publish import Publisher
from treadle.weights.restore import restore_run, save_run

log = logging.getLogger(__name__)

Grade = Callable[[Trajectory], Awaitable[Reward]]
Observer = Callable[[str, Mapping[str, Any]], None]
"""Told of "group", "step", "eval", "checkpoint", "resume"; must not block."""

PATIENCE_S = 120.0
"""Beyond the limits of a group: for queueing and a slow machine."""

DISK_LIMIT_S = 1800.0
"""For a checkpoint, written or read, and for the held-out questions of a task set."""

TASK_LIMIT_S = 300.0
"""For a task source to make one task."""

GUARDED_STEPS = 2
"""Steps of each process whose parity is checked: the first proves the base model (an adapter
begins at zero), the second the publication of an update. With eta > 0 only steps whose samples
are all of the current version count."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything a run is made of; built and closed by the caller."""

    policy: Policy
    engine: Engine
    max_rows: int
    """Turns that the engine decodes at once."""
    renderer: Renderer
    trainer: Trainer
    publisher: Publisher
    mix: Mix
    draws: Draws
    """Which of the mix's tasks comes at an ordinal."""
    harness: Harness
    tools: Tools
    reward: Grade
    """What trains."""
    score: Grade
    """The task sets' own strict scores, which evaluate."""
    teacher: Teacher | None = None
    """Who is distilled, where an algorithm asks for one."""
    task_limit_s: float = TASK_LIMIT_S
    """For the mix to give one task."""


@dataclass
class _State:
    """What the two sides share; touched on the event loop only."""

    progress: Progress = field(default_factory=Progress)
    running: dict[int, Ready] = field(default_factory=dict)
    ready: dict[int, Group] = field(default_factory=dict)
    again: list[int] = field(default_factory=list)
    """Ordinals in flight when an earlier process died: started before new ones."""
    next_ordinal: int = 0
    step: int = 0
    """Committed steps."""
    version: int = 0
    baselines: dict[Party, float] = field(default_factory=dict)
    """Running means of the rewards, as the last step's metrics have them."""
    told_of_pay: bool = False
    """That nothing was paid for."""
    guards: int = 0
    """Parity checks passed by this process."""
    recent: list[tuple[Group, str]] = field(default_factory=list)
    """Groups finished since the last step's metrics were taken, and why each was dropped."""
    finished: int = 0
    """Groups finished by this process."""


class Controller:
    """Runs one RunConfig to its end. One per process and run directory."""

    def __init__(
        self,
        config: RunConfig,
        parts: Parts,
        store: Store,
        observer: Observer = lambda kind, data: None,
    ) -> None:
        self.config = config
        self.parts = parts
        self.store = store
        self.observe = observer
        self._state = _State()
        self._changed = asyncio.Condition()
        self._engine_stats = parts.engine.stats()
        self._heap = Heap()
        self._cut_short = CutShort()
        self._credit: dict[str, float] = {}
        """What credit did in the step that is being made, as metrics."""

    # ------------------------------------------------------------------ life

    async def run(self) -> None:
        """Evaluate, train `config.steps` steps in all, evaluate. Resumes what the ledger holds.

        Raises the first error of any stage after the others have been cancelled.
        """
        await self._restore()
        every, step = self.config.eval.every, self._state.step
        if step == 0 or (every and step % every == 0 and step < self.config.steps):
            await self._evaluate()  # what an earlier process stored is not asked again
        if self._state.step < self.config.steps:
            failed: BaseException | None = None
            try:
                async with asyncio.TaskGroup() as tasks:
                    generate = tasks.create_task(self._generate(tasks))
                    await self._learn()
                    generate.cancel()
            except BaseExceptionGroup as group:
                failed = first_of(group)
            if failed is not None:
                raise failed  # outside of `except`: its cause chain stays its own
        await self._evaluate()

    async def save(self) -> None:
        """A checkpoint of the last committed step, unless it has one; `run` is not running."""
        step = self._state.step
        if step and step % self.config.store.checkpoint_every and step != self.config.steps:
            await self._save(step)

    def standing(self) -> tuple[int, int, tuple[int, ...]]:
        """(committed steps, groups that are ready, ordinals of groups that are running)."""
        state = self._state
        return state.step, len(state.ready), tuple(state.running)

    async def _restore(self) -> None:
        """Weights, optimiser and cursor as the ledger says."""
        state, frontier = self._state, self.store.frontier()
        if frontier.step:
            await self._restore_weights(frontier.step)
            state.baselines = running_baselines(self.store.steps()[-1].metrics)
        state.step, state.version = frontier.step, frontier.version
        state.next_ordinal = frontier.next_ordinal
        state.again = list(frontier.returned)
        state.ready = {g.ordinal: g for g in self.store.groups(state="published")}
        if not self.parts.draws.plain:
            self.parts.draws.replay(self.store.prompts(), self.store.trajectories())
        state.progress = Progress(
            started=frontier.num_started,
            dropped=frontier.num_dropped,
            published=frontier.num_trained,
        )
        if state.version:
            await self._publish(state.version)

    async def _restore_weights(self, last: int) -> None:
        parts = self.parts
        found = await within(
            DISK_LIMIT_S,
            f"restoring step {last}",
            restore_run,
            self.store.run_dir,
            parts.policy,
            parts.trainer,
            committed=last,
        )
        first = 0 if found.checkpoint is None else found.checkpoint.step
        self.observe("resume", {"checkpoint": first, "step": last, "skipped": found.skipped})
        for step in range(first + 1, last + 1):
            samples = self.store.samples_of_step(step)
            await asyncio.to_thread(parts.trainer.step, samples, step=step - 1)
            self.observe("reapply", {"step": step, "last": last})

    # ------------------------------------------------------------------ generate

    async def _generate(self, tasks: asyncio.TaskGroup) -> None:
        config, state = self.config, self._state
        while True:
            async with self._changed:
                await self._changed.wait_for(self._may_start)
            ordinal = self._next_ordinal()
            del state.again[:1]
            state.next_ordinal = max(state.next_ordinal, ordinal + 1)
            task = await within(
                self.parts.task_limit_s, f"task {ordinal}", self.parts.draws.task, ordinal
            )
            self.store.start_group(ordinal, task)
            state.progress = Progress(
                started=state.progress.started + 1,
                dropped=state.progress.dropped,
                published=state.progress.published,
            )
            state.running[ordinal] = Ready(ordinal=ordinal, version=state.version)
            tasks.create_task(self._group(ordinal, task), name=f"group {ordinal}")
            # Groups that start together prefill together: let admission see this one first.
            await asyncio.sleep(0)
            self._check_draws(config)

    def _may_start(self) -> bool:
        """A place is free, and which task comes into it is decided."""
        return may_start(
            self._state.progress,
            groups_per_step=self.config.rollout.groups_per_step,
            eta=self.config.schedule.eta,
            total_steps=self.config.steps,
        ) and self.parts.draws.ready(self._next_ordinal())

    def _next_ordinal(self) -> int:
        state = self._state
        return state.again[0] if state.again else state.next_ordinal

    async def _group(self, ordinal: int, task: Task) -> None:
        """Generate, judge and file one group."""
        parts, state = self.parts, self._state
        if self._demonstrates(task.taskset):
            group = await within(
                parts.task_limit_s, f"demonstration {ordinal}", self._demonstrate, task, ordinal
            )
        else:
            group = await run_group(
                task,
                ordinal,
                self.config.rollout.group_size,
                sampler=parts.engine,
                renderer=parts.renderer,
                harness=parts.harness,
                tools=parts.tools,
                config=self.config.rollout,
                max_context=parts.policy.shape.max_context,
                seed=self.config.seed,
                grade=parts.reward,
            )
        reason = self._drop_reason(group)
        if reason:
            self.store.drop_group(ordinal, reason, group)
            state.progress = Progress(
                started=state.progress.started,
                dropped=state.progress.dropped + 1,
                published=state.progress.published,
            )
        else:
            self.store.publish_group(group)
            state.ready[ordinal] = group
        judged = outcome_of(group, 0)
        how = Ended(dropped=bool(reason), passed=judged.passed, scored=judged.scored)
        parts.draws.ended(ordinal, how)
        del state.running[ordinal]
        state.finished += 1
        state.recent.append((group, reason))
        self.observe("group", {"group": group, "dropped": reason, "ready": len(state.ready)})
        async with self._changed:
            self._changed.notify_all()

    def _demonstrates(self, taskset: str) -> bool:
        """The task set's groups are made from demonstrations, not sampled."""
        return self.parts.trainer.algorithm_of(taskset).term == "ce" and isinstance(
            self.parts.mix[taskset], Demonstrations
        )

    def _demonstrate(self, task: Task, ordinal: int) -> Group:
        taskset = self.parts.mix[task.taskset]
        assert isinstance(taskset, Demonstrations)
        return demonstrate(
            task,
            ordinal,
            taskset.demonstration(task),
            renderer=self.parts.renderer,
            max_context=self.parts.policy.shape.max_context,
            version=self._state.version,
        )

    def _drop_reason(self, group: Group) -> str:
        """Why a group teaches nothing; each cause has its own words (B142)."""
        if group.demonstrated:
            return ""
        if not group.scored:
            errors = [t.error for t in group.trajectories if t.error]
            if len(errors) == len(group.trajectories):
                causes = {f"{e.kind}: {e.message}" for e in errors}
                kinds = causes if len(causes) == 1 else sorted({e.kind for e in errors})
                return f"every trajectory failed: {', '.join(kinds)}"
            if not any(t.num_trained_tokens for t in group.trajectories):
                return "no trajectory has a trained token"
            return "no trajectory was scored"
        learn, estimator = self.config.learn, self._estimator(group)
        if not estimator or self._distils(group):
            return ""
        credit = self.parts.trainer.algorithm_of(group.task.taskset).credit
        if len(group.scored) == 1 and estimator in GROUP_RELATIVE:
            return "only one trajectory was scored"
        if learn.zero_variance == "keep" or teaches_by_credit(group, credit):
            return ""
        return "" if teaches(group, estimator, learn.reward_weights) else "all rewards are equal"

    def _estimator(self, group: Group) -> str:
        return self.parts.trainer.algorithm_of(group.task.taskset).advantage

    def _distils(self, group: Group) -> bool:
        return self.parts.trainer.algorithm_of(group.task.taskset).distils

    def _check_draws(self, config: RunConfig) -> None:
        """B094: refills are bounded, and the end says what the rewards were.

        Where not one trajectory is scored, waiting helps nobody: the bound is two steps' worth.
        """
        state, wanted = self._state, config.rollout.groups_per_step
        if len(state.ready) >= wanted:
            return
        latest = [group for group, _ in state.recent[-2 * wanted :]]
        if len(latest) == 2 * wanted and not any(
            group.scored or group.demonstrated for group in latest
        ):
            self._nothing_is_scored(latest)
        self._check_pay(latest)
        if len(state.recent) < config.rollout.max_draws * wanted:
            return
        values = [t.reward.value for group, _ in state.recent for t in group.scored]
        known = [v for v in values if v is not None]
        mean = f"mean reward {sum(known) / len(known):.3f}" if known else "none was scored"
        reasons = Counter(reason for _, reason in state.recent if reason)
        failed = [e for group, _ in state.recent for t in group.trajectories if (e := t.error)]
        raise DataError(
            f"step {state.step + 1} drew {len(state.recent)} groups and only {len(state.ready)} "
            f"of the {wanted} it needs can teach "
            f"({', '.join(f'{n} x {reason}' for reason, n in reasons.most_common(3))}; {mean})"
            + _said([group for group, _ in state.recent]),
            hint=(failed[0].hint if len(failed) > 2 * len(values) else "")
            or "make the tasks easier or harder or the reward finer, or raise "
            "rollout.group_size; `treadle tasks validate` shows what a task set pays",
        )

    def _check_pay(self, groups: Sequence[Group]) -> None:
        """Warn, once in a process, when everything that a step's worth of groups did paid 0."""
        values = [t.reward.earned for group in groups for t in group.scored]
        enough = len(groups) >= self.config.rollout.groups_per_step
        if self._state.told_of_pay or not enough or not values or any(values):
            return
        self._state.told_of_pay = True
        message = (
            f"the mean reward of the last {len(groups)} groups is exactly 0: {len(values)} scored "
            f"trajectories, and not one was paid for{_said(groups)}"
        )
        log.warning("step %d: %s", self._state.step + 1, visible(message))
        self.store.add_event("alarm", {"step": self._state.step + 1, "message": message})

    def _nothing_is_scored(self, groups: Sequence[Group]) -> None:
        """Raise the first error of the latest groups: it is the cause, whatever came before."""
        trajectories = [t for group in groups for t in group.trajectories]
        errors = [error for t in trajectories if (error := t.error or t.reward.error)]
        if errors:
            raise ENDING.get(errors[0].kind, HarnessError)(
                f"step {self._state.step + 1}: none of the last {len(trajectories)} trajectories "
                f"was scored, and {len(errors)} have an error, the first: {errors[0].message}",
                hint=errors[0].hint or "`treadle runs why` counts the errors by kind",
            )

    # ------------------------------------------------------------------ learn

    async def _learn(self) -> None:
        state, every = self._state, self.config.eval.every
        while state.step < self.config.steps:
            started = time.time()
            ordinals = await self._next_batch()
            left_out = self._left_out([state.ready[o] for o in ordinals])
            groups = [state.ready[o] for o in ordinals if o not in left_out]
            generated = time.time()
            result, samples = await self._train(groups)
            trained = time.time()
            step = state.step + 1
            # Taken at once: groups that finish from here on belong to the next step.
            recent, state.recent = state.recent, []
            self._check_pay([group for group, _ in recent])
            metrics = self._metrics(result, groups, recent, (started, generated, trained))
            if self.config.learn.spread_keep:
                metrics["groups/left_out"] = float(len(left_out))
            self.store.commit_step(
                step,
                version=step,
                ordinals=ordinals,
                samples=samples,
                metrics=metrics,
                skipped=result.skipped,
                reason=result.reason,
                left_out=left_out,
            )
            for ordinal in ordinals:
                del state.ready[ordinal]
            state.step, state.baselines = step, running_baselines(metrics)
            if step % self.config.store.checkpoint_every == 0 or step == self.config.steps:
                await self._save(step)
            await self._publish(step)
            await asyncio.to_thread(self._heap.release)
            state.version = step
            self._spans(step, generate=started, train=generated, commit=trained)
            made = [group for group, _ in recent]
            told = (*alarms(made), *result.alarms, *self._credit_alarms())
            for alarm in (*told, *filter(None, [self._cut_short.alarm(made)])):
                log.warning("step %d: %s", step, one_line(alarm))
                self.store.add_event("alarm", {"step": step, "message": alarm})
            self.observe("step", {"step": step, "metrics": metrics, "skipped": result.reason})
            if every and step % every == 0 and step < self.config.steps:
                await self._evaluate()
            state.progress = Progress(
                started=state.progress.started,
                dropped=state.progress.dropped,
                published=state.progress.published + len(ordinals),
            )
            async with self._changed:
                self._changed.notify_all()

    async def _next_batch(self) -> tuple[int, ...]:
        """Wait for N groups; at most as long as one group may take since the last event."""
        state, rollout = self._state, self.config.rollout
        tries = (1 + MAX_RETRIES) * rollout.time_limit_s
        limit = tries + rollout.reward_limit_s * rollout.group_size + PATIENCE_S

        def batch() -> tuple[int, ...] | None:
            return next_batch(
                [Ready(ordinal=g.ordinal, version=g.version) for g in state.ready.values()],
                state.running.values(),
                groups_per_step=rollout.groups_per_step,
                version=state.version,
                max_lag=self.config.schedule.max_lag,
            )

        while (found := batch()) is None:
            finished = state.finished

            def news(finished: int = finished) -> bool:
                return state.finished != finished

            try:
                async with self._changed, asyncio.timeout(limit):
                    await self._changed.wait_for(news)
            except TimeoutError:
                raise ContractError(
                    f"step {state.step + 1}: no group finished for {limit:.0f} s; running: "
                    f"{sorted(state.running) or 'none'}, ready: {len(state.ready)} of "
                    f"{rollout.groups_per_step}",
                    hint="an engine or a grader is stuck beyond its own limits",
                ) from None
        return found

    def _left_out(self, groups: Sequence[Group]) -> dict[int, str]:
        """Groups of a step that are not worth training, and why; compared within a task set.

        The step consumes them: their places are given back with its own. At once would start the
        next step's groups while this one trains, by weights that are about to change.
        """
        keep = self.config.learn.spread_keep
        by_set: dict[str, list[Group]] = {}
        for group in groups if keep else ():
            if group.demonstrated or self._distils(group):  # rewards are not what teaches
                continue
            by_set.setdefault(group.task.taskset, []).append(group)
        out: dict[int, str] = {}
        for name, of_set in by_set.items():
            kept = top_spread(of_set, keep, least=max(1, self.parts.draws.minimum(name))).indices
            reason = f"its rewards spread least; the others have {keep:.0%} of the spread"
            out |= {g.ordinal: reason for i, g in enumerate(of_set) if i not in kept}
        return out

    async def _train(self, groups: Sequence[Group]) -> tuple[StepResult, list[Any]]:
        state, step = self._state, self._state.step
        samples, taught = await self._samples(groups)
        samples, timed = await asyncio.to_thread(
            self.parts.trainer.measured, samples, version=state.version
        )
        # A turn that an update overtook has KV of older weights: it differs rightly.
        versions = {v for sample in samples for v in sample.versions if v >= 0}
        current = versions == {state.version}
        result = await asyncio.to_thread(
            self.parts.trainer.step,
            samples,
            step=step,
            version=state.version,
            guard=current and state.guards < GUARDED_STEPS,
        )
        state.guards += result.parity is not None
        result = replace(result, metrics=result.metrics | taught | timed)
        if result.skipped:
            self.store.add_event("skipped step", {"step": step + 1, "reason": result.reason})
            log.warning("step %d was skipped: %s", step + 1, result.reason)
        return result, samples

    async def _samples(self, groups: Sequence[Group]) -> tuple[list[Sample], dict[str, float]]:
        """Rows in the order of the groups, and metrics of the teacher where one was asked."""
        rollouts = [group for group in groups if not group.demonstrated]
        values, self._credit = self._advantages(rollouts)
        taught: dict[str, float] = {}
        asked = [group for group in rollouts if self._distils(group)]
        if asked:
            taught = await self._distill(asked, values)
        rows = [demonstrations([g]) if g.demonstrated else to_samples([g], values) for g in groups]
        return list(itertools.chain.from_iterable(rows)), taught

    async def _distill(
        self, groups: Sequence[Group], values: dict[str, Advantage]
    ) -> dict[str, float]:
        """Add what the teacher says to the advantages, in place."""
        parts, started = self.parts, time.perf_counter()
        assert parts.teacher is not None, "resolve_run demands a teacher where one is asked"
        found = await teacher_logprobs(
            groups, parts.teacher, renderer=parts.renderer, tools=parts.tools.schemas
        )
        trajectories = [t for group in groups for t in group.scored]
        for t in trajectories:
            values[t.id] = distilled(
                t,
                values.get(t.id, 0.0),
                found[t.id],
                coef=parts.teacher.coef,
                noise_nats=parts.teacher.noise_nats,
            )
        seconds = time.perf_counter() - started
        return teacher_metrics(trajectories, found) | {"time/teacher_s": seconds}

    def _advantages(self, groups: Sequence[Group]) -> tuple[dict[str, Advantage], dict[str, float]]:
        """Each task set's groups by the estimator and then by the credit of its algorithm, together
        where it is one; and what credit did, as metrics."""
        by_estimator: dict[str, list[Group]] = {}
        for group in groups:
            by_estimator.setdefault(self._estimator(group), []).append(group)
        values: dict[str, Advantage] = {}
        for estimator, compared in by_estimator.items():
            if not estimator:  # rewards are not looked at
                values |= {t.id: 0.0 for group in compared for t in group.scored}
                continue
            values |= advantages(
                compared,
                estimator,
                baseline=self._state.baselines,
                weights=self.config.learn.reward_weights,
            )
        by_credit: dict[CreditConfig, list[Group]] = {}
        for group in groups:
            credit = self.parts.trainer.algorithm_of(group.task.taskset).credit
            by_credit.setdefault(credit, []).append(group)
        did: Counter[str] = Counter()
        for credit, of in by_credit.items():
            given = {t.id: values[t.id] for group in of for t in group.scored}
            values |= (found := credited(of, given, credit))
            did.update(credit_metrics(of, found, credit))
        return values, dict(did)

    def _metrics(
        self,
        result: StepResult,
        groups: Sequence[Group],
        recent: Sequence[tuple[Group, str]],
        times: tuple[float, float, float],
    ) -> dict[str, float]:
        """Of the step, and of everything that finished since the last one, dropped or not."""
        started, generated, trained = times
        rollouts = [group for group in groups if not group.demonstrated]
        finished = [group for group, _ in recent if not self._demonstrates(group.task.taskset)]
        everything = finished or rollouts
        running = [g for g in rollouts if self._estimator(g) == "reinforce_running"]
        stats = self.parts.engine.stats()
        tokens = stats.decoded_tokens - self._engine_stats.decoded_tokens
        busy_s = stats.busy_s - self._engine_stats.busy_s
        self._engine_stats = stats
        return (
            dict(result.metrics)
            | (group_metrics(everything) if everything else {})
            | (group_stats(rollouts) if rollouts else {})
            | baseline_metrics(running, self._state.baselines)
            | self._credit
            | self._by_taskset(everything, groups)
            | {
                "groups/trained": float(len(groups)),
                "groups/dropped": float(sum(bool(reason) for _, reason in recent)),
                "time/generate_s": generated - started,
                "time/train_s": trained - generated,
            }
            | ({"generate/tokens_per_s": tokens / busy_s} if busy_s > 0 else {})
        )

    def _credit_alarms(self) -> list[str]:
        if self._credit.get("credit/judged_groups") != 0:
            return []
        return [
            "learn.credit.quality names a part that the rewards of no group have in all of their "
            "rollouts: advantages are as without it"
        ]

    def _by_taskset(self, finished: Sequence[Group], trained: Sequence[Group]) -> dict[str, float]:
        """Where there are several task sets, or a curriculum: what became of each."""
        names, retired = [t.name for t in self.parts.mix.tasksets], self.parts.draws.retired()
        out: dict[str, float] = {f"tasks/{n}_retired": float(x) for n, x in retired.items()}
        for name in names if len(names) > 1 or retired else ():
            judged = [outcome_of(g, 0) for g in finished if g.task.taskset == name]
            if scored := sum(one.scored for one in judged):
                out[f"tasks/{name}_solved_frac"] = sum(one.passed for one in judged) / scored
            of_step = sum(g.task.taskset == name for g in trained)
            out[f"tasks/{name}_trained_groups"] = float(of_step)
        return out

    async def _publish(self, version: int) -> None:
        await asyncio.to_thread(
            self.parts.publisher.publish, self.parts.policy, self.parts.engine, version
        )

    async def _save(self, step: int) -> None:
        saved = await within(
            DISK_LIMIT_S,
            f"saving step {step}",
            save_run,
            self.store.run_dir,
            step,
            self.parts.policy,
            self.parts.trainer,
            keep=self.config.store.keep_checkpoints,
            max_gib=self.config.store.max_gib,
        )
        self.store.add_checkpoint(saved.record)
        self.observe("checkpoint", {"step": step, "path": saved.record.path})

    def _spans(self, step: int, **started_at: float) -> None:
        """Store consecutive stages by their start; the last one ends now."""
        starts = [*started_at.items(), ("", time.time())]
        self.store.add_spans(
            [
                Span(step=step, stage=stage, started_at=start, duration_s=end - start)
                for (stage, start), (_, end) in itertools.pairwise(starts)
            ]
        )

    # ------------------------------------------------------------------ evaluate

    async def _evaluate(self) -> None:
        """All task sets, at the served version; answers that are stored are not made again."""
        config, parts, state = self.config, self.parts, self._state
        if not config.eval.questions:
            return
        for taskset in parts.mix.tasksets:
            if isinstance(taskset, Demonstrations):
                continue
            tasks = await within(
                DISK_LIMIT_S, f"held-out tasks of {taskset.name}", questions, taskset, config.eval
            )
            started = time.time()

            def tell(done: int, total: int, name: str = taskset.name) -> None:
                self.observe(
                    "answers", {"step": state.step, "taskset": name, "done": done, "total": total}
                )

            eval_id = await evaluate(
                taskset,
                tasks,
                store=self.store,
                step=state.step,
                version=state.version,
                config=config.eval,
                rollout=config.rollout,
                sampler=parts.engine,
                renderer=parts.renderer,
                harness=parts.harness,
                tools=parts.tools,
                grade=parts.score,
                max_context=parts.policy.shape.max_context,
                seed=config.seed,
                concurrency=parts.max_rows,
                progress=tell,
            )
            self._spans(state.step, evaluate=started)
            self.observe("eval", {"step": state.step, "taskset": taskset.name, "eval_id": eval_id})


SHOWN_ANSWERS = 3
"""In an error about rewards: most such errors are seen at once in what was answered."""


def _said(groups: Sequence[Group]) -> str:
    """Latest answers beside the right ones, a line each, one of a task; a model's text is data."""
    lines = []
    for group in reversed(groups):
        if not group.scored:
            continue
        trajectory = group.scored[0]
        gold = f", right: {quoted(gold_of(group.task))}" if gold_of(group.task) else ""
        value = trajectory.reward.value
        lines.append(f"\n  answered: {quoted(trajectory.answer)}{gold}, reward {value:g}")
        if len(lines) == SHOWN_ANSWERS:
            break
    return "".join(lines)
