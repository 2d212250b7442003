"""`treadle eval MODEL_OR_RUN`: rates on held-out tasks, through the harness that trains.

Guarantees: every answer is stored when it is made, so the same command after a kill makes what is
missing only, and more samples are added to those there (B148); an evaluation directory holds
one model under one set of settings, and says so instead of mixing two; a comparison pairs answers
to the same questions under the same settings.

Takes: a model or a run, task sets. Gives: an evaluation directory, and rates with intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli import recipes
from treadle.cli.arguments import add_set, positive
from treadle.cli.output import print_json, print_pairs, print_table
from treadle.config import ModelConfig, RunConfig, TasksConfig, differences, override, to_dict
from treadle.errors import ConfigError, first_of
from treadle.evals import EVALUATED
from treadle.evals.visible import one_line

if TYPE_CHECKING:
    from treadle.cli.target import Target
    from treadle.evals.held_out import Measure, Questions
    from treadle.evals.statistics import Estimate
    from treadle.store import EvalRow, RunInfo, Store
    from treadle.tasks import Mix
    from treadle.types import Provenance, Reward, Task, Taskset, Trajectory

    Asked = Sequence[tuple[Taskset, Sequence[Task]]]

SHOWN_CHANGES = 6
"""Questions of a comparison, those that changed most."""

EXAMPLE = (
    "examples:\n"
    "  treadle eval smollm2-135m --tasks reasoning_gym:gcd --questions 50 --samples 2\n"
    "  treadle eval runs/first-run\n"
    "  treadle eval runs/first-run --tasks jsonl:data/tasks.jsonl --split test\n"
    "  treadle eval runs/second --tasks 10_first_run --compare runs/first-run"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="MODEL_OR_RUN", help="a known name, a directory, a run")
    parser.add_argument(
        "--tasks",
        metavar="SOURCE",
        help='"jsonl:PATH", "reasoning_gym:FAMILY" or a recipe; default: those of the run',
    )
    add_set(parser, "tasks.0.options.max_terms=2 --set rollout.temperature=0.7")
    parser.add_argument(
        "--questions", type=positive, metavar="N", help="distinct ones per task set"
    )
    parser.add_argument("--samples", type=positive, metavar="K", help="answers to each question")
    parser.add_argument("--split", metavar="S", help="train, val or test; default: val")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="RUN",
        help="a run or an evaluation directory: its newest answers to these questions are "
        "compared, question by question",
    )
    parser.add_argument(
        "--run-dir", type=Path, help="where answers are kept; default: runs/eval-NAME-HASH"
    )


def run(args: argparse.Namespace) -> int:
    from treadle import machine

    tuning = machine.tune()
    from treadle.cli import target as targets
    from treadle.evals.evaluate import questions
    from treadle.evals.held_out import OVERLAP
    from treadle.reward import require_gradable
    from treadle.tasks import open_mix

    config = _config(args, targets.run_config_of(args.what))
    judged = tuple(replace(t, ratio=t.ratio or 1.0) for t in config.tasks if not t.demonstrates)
    if not judged:
        raise ConfigError(
            "there is nothing to ask: all task sets hold demonstrations",
            hint="name task sets that can be graded: --tasks jsonl:PATH",
        )
    config = replace(config, tasks=judged)
    if args.compare is not None:
        targets.existing_run(args.compare)
    mix = open_mix(config.tasks, config.seed)
    asked = [(taskset, questions(taskset, config.eval)) for taskset in mix.tasksets]
    for settings, (taskset, tasks) in zip(config.tasks, asked, strict=True):
        require_gradable(settings, taskset, tasks)
    if targets.is_run(args.what):
        target = targets.open_run_policy(Path(args.what))
    else:
        target = targets.open_model(config.model)
    config = replace(config, name=f"eval-{target.label}")
    facts = asdict(machine.facts()) | {"tuning": asdict(tuning)}
    with _store(args.run_dir, config, _origin(target, mix), facts) as store:
        if target.config is not None:
            store.add_event(OVERLAP, {"questions": _overlap(asked, Path(args.what))})
        rows = _run(config, target, asked, store)
        compared = None
        if args.compare is not None:
            compared = _compare(rows, store, target.label, args.compare)
        if args.json:
            print_json(_document(target, store, rows, compared))
        else:
            _print(target, store, rows, compared)
    return 0


def _overlap(asked: Asked, run_dir: Path) -> list[str]:
    """Texts of questions that the run evaluated was trained on."""
    from treadle.evals.held_out import overlapping
    from treadle.store import Store
    from treadle.tasks.validate import text_of

    with Store.open(run_dir, readonly=True) as trained:
        return overlapping((text_of(task) for _, tasks in asked for task in tasks), trained)


# --------------------------------------------------------------------------- what is asked


def _config(args: argparse.Namespace, trained: RunConfig | None) -> RunConfig:
    """The settings of the evaluation: of the run or the recipe, then of this command line."""
    config = trained or RunConfig(model=ModelConfig(name=args.what, lora=None))
    model = config.model
    if args.tasks and recipes.is_source(args.tasks):
        config = replace(config, tasks=(TasksConfig(source=args.tasks),))
    elif args.tasks:
        config = replace(recipes.load(args.tasks), model=model)
    if not config.tasks:
        raise ConfigError(
            "no task set to evaluate on", hint="name one with --tasks, e.g. reasoning_gym:gcd"
        )
    given = {"questions": args.questions, "samples": args.samples, "split": args.split}
    settings = [f"eval.{k}={json.dumps(v)}" for k, v in given.items() if v is not None]
    config = override(config, [*args.settings, *settings])
    if trained is None:
        model = replace(model, dtype=config.model.dtype, max_context=config.model.max_context)
    if config.model != model:
        raise ConfigError(
            f"--set cannot change the model, which is {args.what}",
            hint="of `model`, only dtype and max_context can be set, and not for a run",
        )
    if config.eval.questions < 1:
        raise ConfigError("`eval.questions` must be >= 1: there is nothing to ask")
    # How a run learns and how long are of no matter here; what it pays only where its task sets
    # cannot grade.
    plain = RunConfig()
    return replace(
        config,
        steps=1,
        learn=plain.learn,
        schedule=plain.schedule,
        store=plain.store,
        eval=replace(config.eval, every=0),
        tasks=tuple(replace(t, ratio=1.0) for t in config.tasks),
    )


def _origin(target: Target, mix: Mix) -> dict[str, Provenance]:
    """What answers and what is asked, by role."""
    tasks = {f"tasks.{i}": taskset.provenance for i, taskset in enumerate(mix.tasksets)}
    return {"model": target.model, EVALUATED: target.weights, **tasks}


# --------------------------------------------------------------------------- where it is kept


def _store(
    run_dir: Path | None,
    config: RunConfig,
    origin: Mapping[str, Provenance],
    facts: Mapping[str, Any],
) -> Store:
    """The evaluation's directory, begun or gone on with."""
    from treadle.cli.target import is_run
    from treadle.store import Store

    identity = _identity(to_dict(config), origin)
    if run_dir is None:
        text = json.dumps(identity, sort_keys=True).encode()
        digest = hashlib.blake2b(text, digest_size=4).hexdigest()
        run_dir = Path("runs") / f"{config.name}-{digest}"
    if not is_run(run_dir):
        return Store.create(run_dir, config, provenance=origin, facts=facts)
    # Opening a ledger to write in it begins a session: what is refused must leave no trace.
    with Store.open(run_dir, readonly=True) as store:
        _check_same(store.info(), run_dir, identity)
    return Store.open(run_dir, readonly=False, facts=facts)


def _identity(config: Mapping[str, Any], origin: Mapping[str, Provenance]) -> dict[str, Any]:
    """What must be equal for answers to belong together; how many there are need not be."""
    counts = {"questions", "samples"}
    return {
        "seed": config["seed"],
        "model": config["model"],
        "tasks": config["tasks"],
        "rollout": config["rollout"],
        "eval": {k: v for k, v in config["eval"].items() if k not in counts},
        "origin": {role: p.sha256 or p.source for role, p in origin.items()},
    }


def _check_same(info: RunInfo, run_dir: Path, identity: Mapping[str, Any]) -> None:
    hint = "name another --run-dir, or leave it out to have one made from the settings"
    if EVALUATED not in info.provenance:
        raise ConfigError(f"{run_dir} holds a run, not an evaluation", hint=hint)
    if found := differences(_identity(info.config, info.provenance), identity):
        what = ", ".join(f"`{key}`" for key, _, _ in found)
        raise ConfigError(
            f"{run_dir} holds an evaluation of something else; what differs: {what}",
            hint=hint,
        )


# --------------------------------------------------------------------------- asking


def _run(config: RunConfig, target: Target, asked: Asked, store: Store) -> list[EvalRow]:
    from treadle.progress import StageBar

    try:
        with StageBar(file=sys.stderr) as bar:
            ids = asyncio.run(_evaluate(config, target, asked, store, bar.tell))
    except (KeyboardInterrupt, asyncio.CancelledError, SystemExit):
        store.finish("interrupted")
        raise
    except BaseException as error:
        store.finish("failed", str(first_of(error)))
        raise
    store.finish("finished")
    rows = {row.id: row for row in store.evals()}
    return [rows[id] for id in ids]


async def _evaluate(
    config: RunConfig,
    target: Target,
    asked: Asked,
    store: Store,
    tell: Callable[[str, float], None],
) -> list[int]:
    """Ids of the evaluations, one per task set."""
    from treadle import api
    from treadle.evals.evaluate import evaluate
    from treadle.harness import harness_named
    from treadle.reward import GraderPool, grader_of
    from treadle.sampler.engine import Engine
    from treadle.tools import load_tools

    policy, rollout = target.policy, config.rollout
    renderer = api.renderer_of(policy.loaded, tools=bool(rollout.tools))
    tools, grader = load_tools(rollout.tools), grader_of(config.tasks, config.seed, strict=True)

    async def grade(trajectory: Trajectory) -> Reward:
        return await pool.score(grader, trajectory, rollout.reward_limit_s)

    ids = []
    with GraderPool() as pool:
        async with Engine(policy, version=target.step) as engine:
            for taskset, tasks in asked:

                def told(done: int, total: int, name: str = taskset.name) -> None:
                    tell(f"answers, {name}", done / total)

                id = await evaluate(
                    taskset,
                    tasks,
                    store=store,
                    step=target.step,
                    version=target.step,
                    config=config.eval,
                    rollout=rollout,
                    sampler=engine,
                    renderer=renderer,
                    harness=harness_named(rollout.harness),
                    tools=tools,
                    grade=grade,
                    max_context=policy.shape.max_context,
                    seed=config.seed,
                    progress=told,
                )
                ids.append(id)
    return ids


# --------------------------------------------------------------------------- comparing


def _compare(rows: Sequence[EvalRow], store: Store, label: str, other: Path) -> dict[str, Any]:
    """Gains over the newest answers of another directory, per task set and on average, and the
    questions behind them."""
    from treadle.evals.held_out import Questions, differences, scores_of
    from treadle.evals.statistics import average, paired_gain
    from treadle.store import Store

    gains: dict[str, dict[str, Estimate]] = {}
    steps, changed = set(), []
    with Store.open(other, readonly=True) as theirs:
        known, name = theirs.evals(), _name(theirs.info(), other)
        there, here = Questions(theirs, known), Questions(store, rows)
        for row in rows:
            same_set = [k for k in known if k.taskset == row.taskset]
            match = [k for k in same_set if not differences(k, row)]
            if not match:
                last = same_set[-1:]
                texts = there.texts(last), here.texts([row])
                why = "; ".join(d for k in last for d in differences(k, row, texts))
                sets = ", ".join(sorted({k.taskset for k in known})) or "nothing"
                raise ConfigError(
                    f"{name} has no answers to compare with those of {label} on {row.taskset}: "
                    + (f"{why} (first: {name}, second: {label})" if why else f"it has {sets}"),
                    hint="evaluate both on the same --tasks and --questions, with the same --set",
                )
            steps.add(match[-1].step)
            before, after = scores_of(match[-1]), scores_of(row)
            for part in before:
                if part not in after:
                    continue
                gain = paired_gain(before[part], after[part])
                gains.setdefault(part, {})[row.taskset] = gain
            changed += _changed(match[-1], row, here)
    return {
        "run": other,
        "name": name,
        "steps": sorted(steps),
        "tasksets": gains,
        "changed": sorted(changed, key=lambda c: (-abs(c["after"] - c["before"]), c["question"])),
        **{part: average(by_set.values()) for part, by_set in gains.items()},
    }


def _name(info: RunInfo, path: Path) -> str:
    """What somebody calls it: a run by its directory, an evaluation by what it evaluated."""
    if EVALUATED not in info.provenance:
        return path.resolve().name
    return str(info.config["name"]).removeprefix("eval-")


def _changed(before: EvalRow, after: EvalRow, asked: Questions) -> list[dict[str, Any]]:
    """Questions of a task set that were answered better or worse, with their mean scores."""
    from statistics import fmean

    from treadle.evals.held_out import measure_of, scores_of

    measure = measure_of(after)
    if measure_of(before) != measure:
        return []
    pair = [scores_of(row)[measure] for row in (before, after)]
    means = [
        {id: fmean(known) for id, values in scores.items() if (known := _known(values))}
        for scores in pair
    ]
    return [
        {
            "taskset": after.taskset,
            "question": one_line(asked.text(after.taskset, id), 60),
            "measure": measure,
            "before": means[0][id],
            "after": means[1][id],
        }
        for id in means[0]
        if id in means[1] and means[0][id] != means[1][id]
    ]


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


# --------------------------------------------------------------------------- telling


def _means(rows: Sequence[EvalRow]) -> dict[Measure, Estimate | None]:
    """Over the task sets that have such a rate, each weighing the same; None where none has.

    As in the report, a graded set without a lenient reading counts there with its strict rate.
    """
    from treadle.evals.held_out import MEASURES
    from treadle.evals.rates import rates_of
    from treadle.evals.statistics import average

    rates = [rates_of(row) for row in rows]
    means: dict[Measure, Estimate | None] = {}
    for measure in MEASURES:
        other = "strict" if measure == "lenient" else measure
        found = [of.get(measure, of.get(other)) for of in rates]
        there = any(measure in of for of in rates)
        means[measure] = average(e for e in found if e is not None) if there else None
    return means


def _warnings(store: Store, rows: Sequence[EvalRow]) -> list[str]:
    """What a reader should know before believing the rates."""
    from treadle.evals import cautions
    from treadle.evals.held_out import evaluation, measure_of, told_overlap

    texts = told_overlap(store) or []
    out = cautions.overlap(len(texts), texts[:3])
    for row in rows:
        out += cautions.of_evaluation(evaluation(row))
        if measure_of(row) == "reward":
            out.append(f"{row.taskset} cannot grade these questions: what is shown is their reward")
    return out + cautions.rough(min(mean.n for mean in _means(rows).values() if mean is not None))


def _document(
    target: Target, store: Store, rows: Sequence[EvalRow], compared: Mapping[str, Any] | None
) -> dict[str, Any]:
    from treadle.evals.held_out import told_overlap
    from treadle.evals.rates import describe
    from treadle.evals.statistics import Estimate

    overlap = told_overlap(store)

    def values(tree: Any) -> Any:
        if isinstance(tree, Estimate):
            return tree.to_dict()
        return {k: values(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree

    return {
        "run_dir": store.run_dir,
        "target": target.label,
        "step": target.step,
        "provenance": store.info().provenance,
        "tasksets": [describe(row) for row in rows],
        **values(_means(rows)),
        "compare": values(compared),
        "overlap_with_training": None if overlap is None else len(overlap),
        "warnings": _warnings(store, rows),
    }


def _print(
    target: Target, store: Store, rows: Sequence[EvalRow], compared: Mapping[str, Any] | None
) -> None:
    from treadle.evals.rates import rates_of, text_of
    from treadle.evals.terminal import short_name

    means = _means(rows)
    measures: list[Measure] = [measure for measure, mean in means.items() if mean is not None]
    table = []
    for row in rows:
        rates = {part: text_of(part, estimate) for part, estimate in rates_of(row).items()}
        shown = [rates.get(part, "-") for part in measures]
        table.append((row.taskset, row.split, *shown, row.n, row.k, f"{row.error_share:.1%}"))
    print_table(["task set", "split", *measures, "questions", "samples", "unscored"], table)
    print()
    pairs: list[tuple[str, object]] = [("weights", f"{target.label}, step {target.step}")]
    for part in measures:
        if (mean := means[part]) is not None:
            pairs.append((f"{part}, mean of task sets", text_of(part, mean)))
    for part in measures:
        if compared is not None and part in compared:
            against = f"{compared['name']}, step {', '.join(map(str, compared['steps']))}"
            pairs.append((f"{part} gain over {against}", text_of(part, compared[part], gain=True)))
    pairs += [("temperature", f"{rows[0].temperature:g}"), ("answers", store.run_dir)]
    print_pairs(pairs)
    if compared is not None and compared["changed"]:
        print()
        print_table(
            ["task set", f"question, of {len(compared['changed'])} that changed", "then", "now"],
            [
                (short_name(c["taskset"]), c["question"], f"{c['before']:.2f}", f"{c['after']:.2f}")
                for c in compared["changed"][:SHOWN_CHANGES]
            ],
        )
    for warning in _warnings(store, rows):
        print(f"warning: {one_line(warning, 600)}")
