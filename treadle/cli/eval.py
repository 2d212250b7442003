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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli import recipes
from treadle.cli.output import print_json, print_pairs, print_table
from treadle.config import ModelConfig, RunConfig, TasksConfig, override, to_dict
from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.cli.target import Target
    from treadle.evals.statistics import Estimate
    from treadle.store import EvalRow, Store
    from treadle.types import Reward, Trajectory

EXAMPLE = (
    "examples:\n"
    "  treadle eval smollm2-135m --tasks reasoning_gym:gcd --questions 50 --samples 2\n"
    "  treadle eval runs/first-run\n"
    "  treadle eval runs/first-run --tasks jsonl:data/tasks.jsonl --split test\n"
    "  treadle eval smollm2-135m --tasks 10_first_run --compare runs/first-run"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="MODEL_OR_RUN", help="a known name, a directory, a run")
    parser.add_argument(
        "--tasks",
        metavar="SOURCE",
        help='"jsonl:PATH", "reasoning_gym:FAMILY" or a recipe; default: those of the run',
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="e.g. --set tasks.0.options.max_terms=2 --set rollout.temperature=0.7",
    )
    parser.add_argument("--questions", type=int, metavar="N", help="distinct ones per task set")
    parser.add_argument("--samples", type=int, metavar="K", help="answers to each question")
    parser.add_argument("--split", metavar="S", help="train, val or test; default: val")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="RUN",
        help="a run or an evaluation directory whose newest answers to these questions are "
        "compared, question by question",
    )
    parser.add_argument(
        "--run-dir", type=Path, help="where answers are kept; default: runs/eval-NAME-HASH"
    )


def run(args: argparse.Namespace) -> int:
    from treadle import machine

    tuning = machine.tune()
    from treadle.cli import target as targets

    trained = targets.run_config_of(args.what)
    config = _config(args, trained)
    if args.compare is not None and not targets.is_run(args.compare):
        raise ConfigError(f"there is no run {args.compare} to compare with")
    from treadle.tasks import open_mix

    open_mix(config.tasks, config.seed)  # a mistake in a task set shows before minutes of loading
    if trained is None:
        target = targets.open_model(config.model)
    else:
        target = targets.open_run_policy(Path(args.what))
    config = replace(config, name=f"eval-{target.label}")
    facts = asdict(machine.facts()) | {"tuning": asdict(tuning)}
    with _store(args.run_dir, config, target, facts) as store:
        rows = _run(config, target, store)
        compared = _compare(rows, args.compare) if args.compare is not None else None
        _print(args, target, store, rows, compared)
    return 0


# --------------------------------------------------------------------------- what is asked


def _config(args: argparse.Namespace, trained: RunConfig | None) -> RunConfig:
    """The settings of the evaluation: of the run or the recipe, then of this command line."""
    config = trained or RunConfig(model=ModelConfig(name=args.what, lora=None))
    if args.tasks and _is_source(args.tasks):
        config = replace(config, tasks=(TasksConfig(source=args.tasks),))
    elif args.tasks:
        recipe = recipes.load(args.tasks)
        config = replace(recipe, model=replace(config.model, max_context=recipe.model.max_context))
    if not config.tasks:
        raise ConfigError(
            "no task set to evaluate on", hint="name one with --tasks, e.g. reasoning_gym:gcd"
        )
    model = config.model
    given = {"questions": args.questions, "samples": args.samples, "split": args.split}
    settings = [f"eval.{k}={json.dumps(v)}" for k, v in given.items() if v is not None]
    config = override(config, [*args.settings, *settings])
    # How far a run got, how it learnt and what paid are of no matter here.
    plain = RunConfig()
    fixed = replace(config.model, dtype=model.dtype, max_context=model.max_context)
    if fixed != model:
        raise ConfigError(
            f"the model is {args.what}; of `model` only dtype and max_context can be set here"
        )
    if config.eval.questions < 1:
        raise ConfigError("`eval.questions` must be >= 1: there is nothing to ask")
    return replace(
        config,
        steps=1,
        learn=plain.learn,
        schedule=plain.schedule,
        store=plain.store,
        tasks=tuple(replace(t, reward="score", ratio=1.0) for t in config.tasks),
    )


def _is_source(text: str) -> bool:
    """A task source, not a recipe "path.py:function"."""
    return ":" in text and not text.partition(":")[0].endswith(".py")


# --------------------------------------------------------------------------- where it is kept


def _store(run_dir: Path | None, config: RunConfig, target: Target, facts: Mapping) -> Store:
    """The evaluation's directory, begun or gone on with."""
    from treadle.cli.target import is_run
    from treadle.store import Store

    identity = _identity(config, target)
    if run_dir is None:
        digest = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=4)
        run_dir = Path("runs") / f"{config.name}-{digest.hexdigest()}"
    if not is_run(run_dir):
        store = Store.create(run_dir, config, provenance=target.provenance, facts=facts)
        store.add_event("evaluation", {**identity, "target": target.label, "step": target.step})
        return store
    store = Store.open(run_dir, readonly=False, facts=facts)
    try:
        _check_same(store, run_dir, identity)
    except BaseException:
        store.close()
        raise
    return store


def _identity(config: RunConfig, target: Target) -> dict[str, Any]:
    """What must be equal for answers to belong together; how many there are need not be."""
    settings = to_dict(config)
    for part in ("name", "steps", "learn", "schedule", "store"):
        del settings[part]
    for part in ("questions", "samples", "every"):
        del settings["eval"][part]
    weights = {role: p.sha256 or p.source for role, p in target.provenance.items()}
    return {"settings": settings, "weights": weights}


def _check_same(store: Store, run_dir: Path, identity: Mapping[str, Any]) -> None:
    found = store.events(kind="evaluation")
    hint = "name another --run-dir, or leave it out to have one made from the settings"
    if not found:
        raise ConfigError(f"{run_dir} holds a run, not an evaluation", hint=hint)
    then = found[0].data
    if then["weights"] != identity["weights"]:
        raise ConfigError(f"{run_dir} holds an evaluation of other weights", hint=hint)
    now = json.loads(json.dumps(identity["settings"]))
    if differing := _differing(then["settings"], now):
        raise ConfigError(
            f"{run_dir} holds an evaluation with other settings: {', '.join(differing)}", hint=hint
        )


def _differing(a: Any, b: Any, key: str = "") -> list[str]:
    """Dotted keys where two trees of JSON values differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = sorted({*a, *b})
        return [d for k in keys for d in _differing(a.get(k), b.get(k), f"{key}{k}.")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i in range(len(a)) for d in _differing(a[i], b[i], f"{key}{i}.")]
    return [] if a == b else [f"`{key.rstrip('.')}`"]


# --------------------------------------------------------------------------- asking


def _run(config: RunConfig, target: Target, store: Store) -> list[EvalRow]:
    from treadle.cli.progress import StageBar

    try:
        with StageBar(file=sys.stderr) as bar:
            ids = asyncio.run(_evaluate(config, target, store, bar.tell))
    except (KeyboardInterrupt, asyncio.CancelledError, SystemExit):
        store.finish("interrupted")
        raise
    except BaseException as error:
        store.finish("failed", str(error))
        raise
    store.finish("finished")
    rows = {row.id: row for row in store.evals()}
    return [rows[id] for id in ids]


async def _evaluate(config: RunConfig, target: Target, store: Store, tell: Any) -> list[int]:
    from treadle import api
    from treadle.evals.evaluate import evaluate, questions
    from treadle.harness import harness_named
    from treadle.reward import GraderPool, grader_of
    from treadle.sampler.engine import Engine
    from treadle.tasks import open_mix
    from treadle.tools import load_tools

    policy = target.policy
    mix = open_mix(config.tasks, config.seed)
    asked = [(taskset, questions(taskset, config.eval)) for taskset in mix.tasksets]
    grader = grader_of(config.tasks, config.seed)
    renderer = api.renderer_of(policy.loaded, tools=bool(config.rollout.tools))
    tools = load_tools(config.rollout.tools)
    ids = []
    with GraderPool() as pool:

        async def grade(trajectory: Trajectory) -> Reward:
            return await pool.score(grader, trajectory, config.rollout.reward_limit_s)

        async with Engine(policy, version=target.step) as engine:
            for taskset, tasks in asked:

                def told(done: int, total: int, name: str = taskset.name) -> None:
                    tell(f"answers, {name}", done / total)

                ids.append(
                    await evaluate(
                        taskset,
                        tasks,
                        store=store,
                        step=target.step,
                        version=target.step,
                        config=config.eval,
                        rollout=config.rollout,
                        sampler=engine,
                        renderer=renderer,
                        harness=harness_named(config.rollout.harness),
                        tools=tools,
                        grade=grade,
                        max_context=policy.shape.max_context,
                        template=policy.loaded.template_sha256,
                        seed=config.seed,
                        progress=told,
                    )
                )
    return ids


# --------------------------------------------------------------------------- comparing


def _compare(rows: Sequence[EvalRow], other: Path) -> dict[str, Any]:
    """Gains over the newest answers of another directory, per task set and on average."""
    from treadle.cli.rates import parts_of, scores_of
    from treadle.evals.statistics import average, paired_gain
    from treadle.store import Store

    with Store.open(other, readonly=True) as store:
        known = store.evals()
    gains: dict[str, dict[str, Estimate]] = {}
    steps = set()
    for row in rows:
        match = [k for k in known if _comparable(k, row)]
        if not match:
            raise ConfigError(
                f"{other} has no answers to the questions of {row.taskset} (split {row.split}) "
                f"under the same settings: temperature {row.temperature:g}, {dict(row.settings)}",
                hint="evaluate both on the same --tasks, with the same --set",
            )
        before = match[-1]
        steps.add(before.step)
        for part in parts_of(row):
            gain = paired_gain(scores_of(before, part), scores_of(row, part))
            gains.setdefault(part, {})[row.taskset] = gain
    return {
        "run": other,
        "steps": sorted(steps),
        "tasksets": gains,
        **{part: average(by_set.values()) for part, by_set in gains.items()},
    }


def _comparable(a: EvalRow, b: EvalRow) -> bool:
    """Same task set and settings, and at least one question in common."""
    same = (a.taskset, a.split, a.temperature, a.settings) == (
        b.taskset,
        b.split,
        b.temperature,
        b.settings,
    )
    return same and bool({r.task_id for r in a.results} & {r.task_id for r in b.results})


# --------------------------------------------------------------------------- telling


def _print(
    args: argparse.Namespace,
    target: Target,
    store: Store,
    rows: Sequence[EvalRow],
    compared: Mapping[str, Any] | None,
) -> None:
    from treadle.cli.rates import PARTS, parts_of, rates_of, text_of, to_dict
    from treadle.evals.statistics import average

    rates = [rates_of(row) for row in rows]
    means = {p: average(r[p] for r in rates) for p in PARTS if all(p in r for r in rates)}
    if args.json:
        print_json(
            {
                "run_dir": store.run_dir,
                "target": target.label,
                "step": target.step,
                "provenance": target.provenance,
                "tasksets": [to_dict(row) for row in rows],
                **{part: estimate.to_dict() for part, estimate in means.items()},
                "compare": None if compared is None else _jsonable(compared),
            }
        )
        return
    table = [
        (
            row.taskset,
            row.split,
            *(text_of(rates_of(row)[p]) if p in parts_of(row) else "-" for p in PARTS),
            row.n,
            row.k,
            f"{row.error_share:.1%}",
        )
        for row in rows
    ]
    print_table(["task set", "split", *PARTS, "questions", "samples", "unscored"], table)
    print()
    print_pairs(
        [
            ("weights", f"{target.label}, step {target.step}"),
            *((f"{part}, mean of task sets", text_of(e)) for part, e in means.items()),
            *(
                (f"{p} gain over {compared['run']}", text_of(compared[p]))
                for p in PARTS
                if compared is not None and p in compared
            ),
            ("temperature", f"{rows[0].temperature:g}"),
            ("answers", store.run_dir),
        ]
    )


def _jsonable(compared: Mapping[str, Any]) -> dict[str, Any]:
    from treadle.evals.statistics import Estimate

    def walk(value: Any) -> Any:
        if isinstance(value, Estimate):
            return value.to_dict()
        return {k: walk(v) for k, v in value.items()} if isinstance(value, Mapping) else value

    return walk(compared)
