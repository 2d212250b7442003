"""`treadle drift RUN`: what training changed beside the rates that it was for.

Guarantees: the run is only read; start and end answer the same questions with the same draws; task
sets that were trained and those that were never touched are told apart.

Takes: a run, further task sets. Gives: KL to the start model, weight change, accuracy; JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli import recipes
from treadle.cli.arguments import add_set, positive
from treadle.cli.output import print_json, print_pairs, print_table
from treadle.config import RunConfig, TasksConfig, differences, override, to_dict
from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.evals.drift import KindChange, TasksetDrift
    from treadle.models.policy import Policy
    from treadle.types import Group, Reward, Task, Taskset, Trajectory

EXAMPLE = (
    "examples:\n"
    "  treadle drift runs/first-run\n"
    "  treadle drift runs/first-run --tasks reasoning_gym:spell_backward --questions 40 --json"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=Path, metavar="RUN")
    parser.add_argument(
        "--tasks",
        action="append",
        default=[],
        metavar="SOURCE",
        help="a task set that the run never touched, beside its own; may be given several times",
    )
    parser.add_argument(
        "--questions", type=positive, default=40, metavar="N", help="held-out ones per task set"
    )
    parser.add_argument(
        "--samples", type=positive, default=2, metavar="K", help="answers to each question"
    )
    parser.add_argument("--split", metavar="S", help="train, val or test; default: the run's")
    add_set(parser, "rollout.temperature=0.7")


def run(args: argparse.Namespace) -> int:
    from treadle import machine

    machine.tune()
    from treadle.cli import target as targets
    from treadle.evals.drift import weight_change
    from treadle.progress import StageBar

    targets.existing_run(args.run_dir)
    config = targets.run_config_of(str(args.run_dir))
    assert config is not None, "existing_run found it"
    config, trained = _config(args, config)
    end = targets.open_run_policy(args.run_dir)
    start = targets.open_model(config.model).policy
    with StageBar(file=sys.stderr) as bar:
        found = asyncio.run(_measure(config, trained, start, end.policy, bar.tell))
        bar.tell("weights", None)
        weights = weight_change(start, end.policy)
    if args.json:
        print_json(
            {
                "run": args.run_dir,
                "step": end.step,
                "temperature": config.rollout.temperature,
                "split": config.eval.split,
                "samples": config.eval.samples,
                "tasksets": found,
                "weights": weights,
            }
        )
    else:
        _print(end.label, end.step, config, found, weights)
    return 0


def _config(args: argparse.Namespace, config: RunConfig) -> tuple[RunConfig, dict[str, bool]]:
    """The run's settings with all task sets that are asked, and which of them were trained."""
    own = [replace(t, ratio=t.ratio or 1.0) for t in config.tasks if not t.demonstrates]
    touched = {t.source for t in config.tasks if t.ratio > 0}
    for source in args.tasks:
        if not recipes.is_source(source):
            raise ConfigError(
                f"`{source}` is not a task source",
                hint="--tasks jsonl:PATH, or reasoning_gym:FAMILY",
            )
        asked = TasksConfig(source=source)
        if asked.demonstrates:
            raise ConfigError(
                f"`{source}` holds demonstrations: there is nothing to ask",
                hint="name task sets that can be graded: --tasks jsonl:PATH",
            )
        if source not in {t.source for t in own}:
            own.append(asked)
    if not own:
        raise ConfigError(
            f"{args.run_dir} was trained on demonstrations alone: there is nothing to ask",
            hint="name task sets that can be graded: --tasks jsonl:PATH",
        )
    settings = [f"eval.questions={args.questions}", f"eval.samples={args.samples}"]
    settings += [f"eval.split={args.split}"] if args.split else []
    ran = replace(config, tasks=tuple(own))
    config = override(ran, [*args.settings, *settings])
    for key, was, _ in differences(to_dict(ran), to_dict(config)):
        if key.partition(".")[0] not in ("rollout", "eval"):
            raise ConfigError(
                f"`{key}` was {was} in this run: what training did to it is measured from there",
                hint="only settings of rollout and eval can be others here",
            )
    return config, {t.source: t.source in touched for t in own}


async def _measure(
    config: RunConfig,
    trained: dict[str, bool],
    start: Policy,
    end: Policy,
    tell: Callable[[str, float | None], None],
) -> list[TasksetDrift]:
    from treadle import api
    from treadle.evals.drift import drift_of
    from treadle.evals.evaluate import questions
    from treadle.reward import GraderPool, grader_of
    from treadle.tasks import open_mix

    mix = open_mix(config.tasks, config.seed)
    asked = [(s, questions(s, config.eval)) for s in mix.tasksets]
    renderer = api.renderer_of(end.loaded, tools=bool(config.rollout.tools))
    grader = grader_of(config.tasks, config.seed, strict=True)
    answers: list[list[Sequence[Group]]] = []
    with GraderPool() as pool:

        async def grade(trajectory: Trajectory) -> Reward:
            return await pool.score(grader, trajectory, config.rollout.reward_limit_s)

        for side, policy in (("start", start), ("end", end)):

            def told(name: str, side: str = side) -> None:
                tell(f"{side}: answers, {name}", None)

            answers.append(await _answers(config, policy, asked, renderer, grade, told))
    out = []
    for (taskset, _), settings, before, after in zip(asked, config.tasks, *answers, strict=True):
        tell(f"divergence, {taskset.name}", None)
        out.append(
            drift_of(taskset.name, start, end, before, after, trained=trained[settings.source])
        )
    return out


async def _answers(
    config: RunConfig,
    policy: Policy,
    asked: Sequence[tuple[Taskset, Sequence[Task]]],
    renderer: Any,
    grade: Any,
    tell: Callable[[str], None],
) -> list[Sequence[Group]]:
    """Of each task set, one group of answers per question."""
    from treadle.evals.evaluate import EVAL_SEED
    from treadle.harness import harness_named
    from treadle.rollout import derive, run_group
    from treadle.sampler.engine import Engine
    from treadle.tools import load_tools

    tools, harness = load_tools(config.rollout.tools), harness_named(config.rollout.harness)
    out: list[Sequence[Group]] = []
    ordinal = 0
    async with Engine(policy) as engine:
        for taskset, tasks in asked:
            tell(taskset.name)
            room = asyncio.Semaphore(max(1, 64 // config.eval.samples))

            async def answer(ordinal: int, task: Task, room: asyncio.Semaphore = room) -> Group:
                async with room:
                    return await run_group(
                        task,
                        ordinal,
                        config.eval.samples,
                        sampler=engine,
                        renderer=renderer,
                        harness=harness,
                        tools=tools,
                        config=config.rollout,
                        max_context=policy.shape.max_context,
                        seed=derive(config.seed, EVAL_SEED),
                        grade=grade,
                    )

            async with asyncio.TaskGroup() as group:
                found = [
                    group.create_task(answer(ordinal + i, task)) for i, task in enumerate(tasks)
                ]
            ordinal += len(tasks)
            out.append([task.result() for task in found])
    return out


def _print(
    label: str,
    step: int,
    config: RunConfig,
    found: Sequence[TasksetDrift],
    weights: Sequence[KindChange],
) -> None:
    def number(value: float | None, form: str = ".4f") -> str:
        return "-" if value is None else f"{value:{form}}"

    least, most = min(d.questions for d in found), max(d.questions for d in found)
    asked = f"{most}" if least == most else f"{least} to {most}"
    print_table(
        ["task set", "trained", "KL end|start", "k3", "KL start|end", "before", "after", "gain"],
        [
            (
                d.taskset,
                "yes" if d.trained else "no",
                number(d.to_start.kl_nats),
                number(d.to_start.k3_nats),
                number(d.from_start.kl_nats),
                number(d.before.mean, ".3f"),
                number(d.after.mean, ".3f"),
                number(d.gain.mean, "+.3f"),
            )
            for d in found
        ],
        title="nats per sampled token; strict rates",
    )
    print()
    print_table(
        ["weights", "tensors", "norm", "relative", "effective rank", "of", "changed in bf16"],
        [
            (
                k.kind,
                k.tensors,
                number(k.norm, ".3g"),
                number(k.relative_norm, ".2%"),
                number(k.effective_rank, ".1f"),
                number(k.full_rank, ".0f"),
                number(k.changed_frac, ".1%"),
            )
            for k in weights
        ],
    )
    print()
    print_pairs(
        [
            ("weights of", f"{label}, step {step}"),
            ("questions", f"{asked} x {config.eval.samples}, {config.eval.split}"),
            ("temperature", f"{config.rollout.temperature:g}"),
        ]
    )
