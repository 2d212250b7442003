"""Ask held-out questions through the same sampler, harness and grader as training.

Guarantees: the score is the task set's own strict score, whatever reward training shapes (B053);
each answer is in the store when it is made, so a killed evaluation goes on with what is missing
(B148); every number carries its settings (B155); questions are distinct by text.

Takes: a task set and the parts of a rollout. Gives: an evaluation in the store, by its id.
Waits for: each group at most the time that its trajectories may take.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

from treadle.config import EvalConfig, RolloutConfig
from treadle.errors import (
    ConfigError,
    DataError,
    ErrorRecord,
    HarnessError,
    RewardError,
    TreadleError,
    first_of,
    setting,
)
from treadle.harness import Harness
from treadle.render import Renderer
from treadle.rollout import derive, run_trajectory
from treadle.store import EvalResult, Store
from treadle.tasks.validate import text_of
from treadle.tools import Tools
from treadle.types import Reward, Sampler, Task, Taskset, Trajectory

EVAL_SEED = 0x5EED
"""Mixed into the run's seed: an evaluation never draws the numbers of a training rollout, and
before and after draw the same ones, so that their difference is paired."""

ENDING: dict[str, type[TreadleError]] = {"RewardError": RewardError, "LimitExceeded": DataError}
"""Kind of the first error, what to raise where nothing got a verdict; else HarnessError. A limit
that leaves no room for a single token is a matter of the tasks and the settings."""

_LOOKS = 20
"""Tasks looked at per question wanted, in a split without an end whose texts repeat."""


def questions(taskset: Taskset, config: EvalConfig) -> tuple[Task, ...]:
    """The first `config.questions` tasks of the held-out split, distinct by text.

    Fewer when the split has fewer. Raises ConfigError when it has none.
    """
    size = taskset.size(config.split)
    seen: dict[str, Task] = {}
    for index in range(config.questions * _LOOKS if size is None else size):
        if len(seen) == config.questions:
            break
        task = taskset.task(index, config.split)
        seen.setdefault(text_of(task), task)
    if not seen:
        raise ConfigError(
            f"task set {taskset.name} has no tasks in its split `{config.split}`",
            hint=f"choose another: {setting('eval.split=...')}; or none with eval.questions=0",
        )
    return tuple(seen.values())


def data_hash(tasks: Sequence[Task]) -> str:
    """Of questions and their grading data in order: what makes two numbers comparable."""
    digest = blake2b(digest_size=8)
    for task in tasks:
        known = json.dumps(dict(task.data), sort_keys=True, default=str)
        digest.update(f"{text_of(task)}\0{known}\0".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


async def evaluate(
    taskset: Taskset,
    tasks: Sequence[Task],
    *,
    store: Store,
    step: int,
    version: int,
    config: EvalConfig,
    rollout: RolloutConfig,
    sampler: Sampler,
    renderer: Renderer,
    harness: Harness,
    tools: Tools,
    grade: Callable[[Trajectory], Awaitable[Reward]],
    max_context: int,
    seed: int,
    concurrency: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Sample every question `config.samples` times and store the answers.

    Args:
        tasks: from `questions`.
        step, version: of the weights that answer.
        grade: by the task set's strict score; its value is the score, its parts are kept.
        concurrency: trajectories in flight; more would only queue, and queueing counts
            against their time limit.
        progress: called with (answers stored, answers wanted).

    Returns:
        The evaluation's id in the store. Stored answers of an earlier attempt are kept; what
        ended in an error is asked again.

    Raises what breaks a contract, or the store's own error, as itself.
    """
    eval_seed = derive(seed, EVAL_SEED)
    eval_id = store.begin_eval(
        step=step,
        version=version,
        taskset=taskset.name,
        split=config.split,
        temperature=rollout.temperature,
        data_hash=data_hash(tasks),
        settings={
            "max_new_tokens": rollout.max_new_tokens,
            "harness": rollout.harness,
            "max_turns": rollout.max_turns,
            "top_p": 1.0,
            "seed": seed,
            "template": renderer.template.hash,
        },
    )
    done = _answered(store, step, eval_id)
    wanted = [
        (index, task, sample)
        for index, task in enumerate(tasks)
        for sample in range(config.samples)
        if (task.id, sample) not in done
    ]
    total = len(tasks) * config.samples
    stored = total - len(wanted)
    room = asyncio.Semaphore(concurrency)
    failures: list[ErrorRecord] = []

    async def answer(index: int, task: Task, sample: int) -> None:
        nonlocal stored
        async with room:
            trajectory = await run_trajectory(
                task,
                index,
                sample,
                sampler=sampler,
                renderer=renderer,
                harness=harness,
                tools=tools,
                config=rollout,
                max_context=max_context,
                seed=eval_seed,
                grade=grade,
                scope=f"eval-{eval_id}/",
            )
        store.add_eval_result(eval_id, _result(trajectory))
        if (error := trajectory.error or trajectory.reward.error) is not None:
            failures.append(error)
        stored += 1
        if progress is not None:
            progress(stored, total)

    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for index, task, sample in wanted:
                group.create_task(answer(index, task, sample))
    except BaseExceptionGroup as errors:
        failed = first_of(errors)
    if failed is not None:
        raise failed  # outside of `except`: its cause chain stays its own
    # What no attempt can judge is asked again by each; it must not end one that has verdicts.
    lasting = bool(done) and all(failure.kind in ENDING for failure in failures)
    if wanted and len(failures) == len(wanted) and not lasting:
        raise ENDING.get(failures[0].kind, HarnessError)(
            f"evaluation of {taskset.name} at step {step}: all {len(wanted)} answers lack a "
            f"verdict, the first with {failures[0].kind}: {failures[0].message}",
            hint=failures[0].hint or "what was answered before is kept; run it again",
        )
    store.finish_eval(eval_id)
    return eval_id


def _answered(store: Store, step: int, eval_id: int) -> set[tuple[str, int]]:
    """(task id, sample) of the answers that need not be made again."""
    return {
        (result.task_id, result.sample)
        for row in store.evals(step=step)
        if row.id == eval_id
        for result in row.results
        if result.error is None
    }


def _result(trajectory: Trajectory) -> EvalResult:
    reward = trajectory.reward
    return EvalResult(
        task_id=trajectory.task.id,
        sample=trajectory.sample,
        score=reward.value,
        parts=reward.parts,
        error=trajectory.error or reward.error,
        answer=trajectory.answer,
        num_sampled=trajectory.num_sampled_tokens,
        trajectory=replace(trajectory, id=f"eval-{trajectory.id}"),
    )
