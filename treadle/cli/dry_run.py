"""What a run would do and need, without doing it: `treadle train RECIPE --dry-run`.

Guarantees: nothing is trained, sampled or written; every check that a real start makes is made,
and raises as there; estimates say from which numbers they come.

Takes: a RunConfig and a run directory. Gives: JSON values, and the same as text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from treadle import machine
from treadle.cli.output import size
from treadle.config import RunConfig, to_dict

if TYPE_CHECKING:
    from treadle.models.load import LoadedModel
    from treadle.render import Renderer
    from treadle.tasks import Mix
    from treadle.tools import Tools
    from treadle.types import Task

PROMPTS = 16
"""Of each task set, rendered to see how long they are."""

TOKEN_BYTES, TRAJECTORY_BYTES = 10, 1000
"""What the ledger takes, compressed: per token, and per trajectory beside its tokens."""

STATE_BYTES = 12
"""Per trained parameter in a checkpoint: the float32 master and two moments."""


def plan(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Check everything and estimate. Raises what a real start would raise before its first token.

    Returns:
        compute, model, tasks, algorithms, step, evaluation, memory, disk, template, run_dir,
        cautions.
    """
    tuning = machine.tune()
    from treadle import api
    from treadle.tools import load_tools

    algorithms = _algorithms(config)
    mix = api.open_tasks(config)
    loaded = api.load_model(config.model)
    api.check_tokens(config, loaded)
    tools = load_tools(config.rollout.tools)
    renderer = api.renderer_of(loaded, tools=bool(config.rollout.tools))
    probe = machine.probe()
    dtype = probe.dtype if config.model.dtype == "auto" else config.model.dtype
    trained = trained_parameters(config, loaded)
    valued = _critic_parameters(config, loaded)
    limit = loaded.shape.max_context
    tasks = [_taskset(config, mix, i, renderer, tools, limit) for i in range(len(config.tasks))]
    result = {
        "compute": {
            "device": probe.device,
            "dtype": dtype,
            "threads": tuning.threads,
            "why": probe.reason if config.model.dtype == "auto" else "model.dtype says so",
        },
        "model": {
            "path": loaded.path,
            "provenance": asdict(loaded.provenance),
            "shape": asdict(loaded.shape),
            "trained_parameters": trained,
            "critic_parameters": valued,
            "stop_ids": loaded.stop_ids,
        },
        "tasks": tasks,
        "algorithms": algorithms,
        "step": _step(config, tasks),
        "evaluation": _evaluation(config, tasks),
        "memory": _memory(config, loaded, dtype, tasks),
        "disk": _disk(config, run_dir, trained + valued, tasks),
        "template": _template(renderer),
        "run_dir": _run_dir(run_dir),
    }
    result["cautions"] = _cautions(config, result)
    return result


def trained_parameters(config: RunConfig, loaded: LoadedModel) -> int:
    """How many numbers the optimiser owns."""
    from treadle.models.forward import linear_names

    if config.model.lora is None:
        return loaded.shape.parameters
    weights = [loaded.module.get_submodule(n).weight for n in linear_names(loaded.module)]
    return config.model.lora.rank * sum(sum(w.shape) for w in weights)


def _critic_parameters(config: RunConfig, loaded: LoadedModel) -> int:
    """What the critic's optimiser owns; 0 without one."""
    critic = config.learn.critic
    if critic is None:
        return 0
    own = trained_parameters(config, loaded) if critic.kind == "model" else 0
    return own + loaded.shape.hidden + 1


# --------------------------------------------------------------------------- parts


def _taskset(
    config: RunConfig, mix: Mix, index: int, renderer: Renderer, tools: Tools, limit: int
) -> dict[str, Any]:
    """One task set: what it holds, what it pays, how long its prompts are. `limit`: of context."""
    from treadle.api import LOOKED_AT, training_tasks
    from treadle.evals.evaluate import questions
    from treadle.reward import require_gradable
    from treadle.tasks import Demonstrations

    taskset, settings = mix.tasksets[index], config.tasks[index]
    train = taskset.size(mix.split)
    looked_at = training_tasks(mix, taskset, LOOKED_AT) if settings.ratio > 0 else []
    total = sum(t.ratio for t in config.tasks)
    if isinstance(taskset, Demonstrations):
        return _demonstrations(config, taskset, settings.ratio / total, looked_at, renderer, limit)
    asked = questions(taskset, config.eval) if config.eval.questions else ()

    def prompts(tasks: Sequence[Task]) -> list[int]:
        return [len(renderer.prompt(task.messages, tools.schemas)) for task in tasks[:PROMPTS]]

    lengths, asked_lengths = prompts(looked_at), prompts(asked)
    seen = [*lengths, *asked_lengths] if settings.ratio == 0 else lengths
    return {
        "name": taskset.name,
        "kind": "rollouts",
        "provenance": asdict(taskset.provenance),
        "share": settings.ratio / total,
        "minimum": settings.minimum,
        "curriculum": to_dict(settings.curriculum),
        "reward": settings.reward,
        "train_tasks": train,
        "held_out_questions": len(asked),
        "held_out_split": config.eval.split,
        "cannot_be_judged": {
            mix.split: [require_gradable(settings, taskset, looked_at), len(looked_at)],
            config.eval.split: [require_gradable(settings, taskset, asked), len(asked)],
        },
        "prompt_tokens_mean": fmean(seen) if seen else 0.0,
        "prompt_tokens_max": max(seen, default=0),
        "prompts_too_long": {
            # A prompt needs room for one token of an answer.
            split: [sum(n >= limit for n in found), len(found), max(found, default=0)]
            for split, found in ((mix.split, lengths), (config.eval.split, asked_lengths))
        },
    }


def _demonstrations(
    config: RunConfig,
    taskset: Any,
    share: float,
    tasks: Sequence[Task],
    renderer: Renderer,
    limit: int,
) -> dict[str, Any]:
    """A task set of demonstrations: how long they are, and which of them cannot be learnt."""
    from treadle.rollout import demonstrate

    groups = [
        demonstrate(
            task, i, taskset.demonstration(task), renderer=renderer, max_context=limit, version=0
        )
        for i, task in enumerate(tasks)
    ]
    errors = [t.error for g in groups for t in g.trajectories if t.error is not None]
    tokens = [sum(len(n.ids) for n in t.nodes) for g in groups for t in g.trajectories if t.nodes]
    learnt = [t.num_trained_tokens for g in groups for t in g.trajectories if t.nodes]
    return {
        "name": taskset.name,
        "kind": "demonstrations",
        "provenance": asdict(taskset.provenance),
        "share": share,
        "reward": "none: demonstrations",
        "train_tasks": taskset.size("train"),
        "duplicates": taskset.num_duplicates,
        "held_out_questions": 0,
        "held_out_split": config.eval.split,
        "cannot_be_judged": {},
        "prompt_tokens_mean": fmean(tokens) if tokens else 0.0,
        "prompt_tokens_max": max(tokens, default=0),
        "learnt_tokens_mean": fmean(learnt) if learnt else 0.0,
        "prompts_too_long": {},
        "cannot_be_learnt": [len(errors), len(groups), errors[0].message if errors else ""],
    }


def _algorithms(config: RunConfig) -> dict[str, dict[str, Any]]:
    """What trains the rows of each task set, with every number that it uses."""
    from treadle.algorithms import describe, resolve_run
    from treadle.tasks.mix import names_of
    from treadle.train.terms import check_terms

    names = names_of(config.tasks)
    found = resolve_run(config, names)
    check_terms(config.learn, found[""])
    return {name: describe(found[name]) for name in names}


def _step(config: RunConfig, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What one optimiser step generates and trains, dropped groups not counted."""
    rollout = config.rollout
    share = sum(t["share"] for t in tasks if t["kind"] == "rollouts")
    made = round(share * rollout.group_size * rollout.groups_per_step)
    trajectories = made + round((1 - share) * rollout.groups_per_step)
    prompt = sum(t["share"] * t["prompt_tokens_mean"] for t in tasks)
    sampled = rollout.max_new_tokens * (
        1 if rollout.harness == "single_turn" else rollout.max_turns
    )
    return {
        "steps": config.steps,
        "groups": rollout.groups_per_step,
        "trajectories": trajectories,
        "sampled_tokens_max": made * sampled,
        "answer_tokens_max": sampled,
        "prompt_tokens": round(prompt * rollout.groups_per_step),
        "tokens_per_trajectory_max": round(prompt + sampled),
        "micro_tokens": config.learn.micro_tokens,
        "spread_keep": config.learn.spread_keep,
        "overlong": None
        if (overlong := rollout.overlong) is None
        else {
            "free_tokens": rollout.max_new_tokens - overlong.buffer(rollout.max_new_tokens),
            "penalty": overlong.penalty,
        },
    }


def _evaluation(config: RunConfig, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    questions = sum(t["held_out_questions"] for t in tasks)
    between = (config.steps - 1) // config.eval.every if config.eval.every else 0
    times = 2 + between if questions else 0
    return {
        "questions": questions,
        "samples": config.eval.samples,
        "times": times,
        "answers": times * questions * config.eval.samples,
        "reward": "the task set's own strict score, whatever trains",
    }


def _memory(
    config: RunConfig, loaded: LoadedModel, dtype: str, tasks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Bytes at the peak by part; the KV cache holds the rows that are decoded at once."""
    from treadle.train.memory import estimate_memory
    from treadle.train.proximal import kept_versions

    step = _step(config, tasks)
    prompt = max(t["prompt_tokens_max"] for t in tasks)
    answer = min(step["answer_tokens_max"], loaded.shape.max_context - prompt)
    ahead = config.schedule.eta + 1
    rows, prompts = ahead * step["trajectories"], ahead * step["groups"]
    kv_tokens = rows * max(0, answer) + prompts * prompt
    packed = step["sampled_tokens_max"] + step["groups"] * prompt
    estimate = estimate_memory(
        loaded.shape,
        lora=config.model.lora,
        dtype=dtype,
        micro_tokens=min(config.learn.micro_tokens, packed),
        engine_kv_tokens=kv_tokens,
        reference=config.learn.kl is not None,
        critic=config.learn.critic,
        step_tokens=step["sampled_tokens_max"],
        versions=kept_versions(config),
    )
    parts = dict(estimate.parts)
    if config.learn.teacher is not None:  # taken to be as large as the model: masters and copies
        parts["teacher"] = loaded.shape.parameters * (6 if dtype == "bfloat16" else 8)
    return {
        "parts_bytes": parts,
        "total_bytes": estimate.total + parts.get("teacher", 0),
        "available_bytes": machine.facts().memory_available_bytes,
        "kv_tokens": kv_tokens,
    }


def _disk(
    config: RunConfig, run_dir: Path, trained: int, tasks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Upper estimates in bytes: every answer as long as it may be."""
    step, evaluation = _step(config, tasks), _evaluation(config, tasks)
    trajectories = config.steps * step["trajectories"] + evaluation["answers"]
    each = TRAJECTORY_BYTES + TOKEN_BYTES * step["tokens_per_trajectory_max"]
    checkpoints = (config.store.keep_checkpoints + 1) * STATE_BYTES * trained
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    return {
        "ledger_bytes": trajectories * each,
        "checkpoint_bytes": STATE_BYTES * trained,
        "checkpoints_bytes": checkpoints,
        "total_bytes": trajectories * each + checkpoints,
        "free_bytes": shutil.disk_usage(place).free,
        "limit_bytes": int(config.store.max_gib * 2**30),
    }


def _template(renderer: Renderer) -> dict[str, Any]:
    report = renderer.check()
    return {"sha256": report.hash, "lines": report.lines(), "problems": report.problems}


def _run_dir(run_dir: Path) -> dict[str, Any]:
    """Whether a start would find the place free."""
    from treadle.cli.target import is_run
    from treadle.evals import EVALUATED
    from treadle.store import Store

    if is_run(run_dir):
        with Store.open(run_dir, readonly=True) as store:
            done, info = store.frontier().step, store.info()
        status = info.status
        if EVALUATED in info.provenance:
            return {"path": run_dir, "state": "other", "says": "holds an evaluation, not a run"}
        says = f"holds a run: {status}, {done} steps done; --resume goes on with it"
        return {"path": run_dir, "state": "run", "steps_done": done, "says": says}
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        return {"path": run_dir, "state": "other", "says": "exists and holds no run"}
    return {"path": run_dir, "state": "new", "says": "would be made"}


def _cautions(config: RunConfig, result: Mapping[str, Any]) -> list[str]:
    """What does not stop the run and is probably not wanted."""
    out = []
    for taskset in result["tasks"]:
        wanted, found = config.eval.questions, taskset["held_out_questions"]
        if taskset["kind"] == "demonstrations":
            num, of, first = taskset["cannot_be_learnt"]
            if num:
                out.append(
                    f"{taskset['name']}: {num} of {of} demonstrations looked at cannot be learnt "
                    f"and will be dropped, the first: {first}"
                )
            continue
        if found < wanted:
            out.append(
                f"{taskset['name']}: split `{config.eval.split}` has {found} distinct questions, "
                f"{wanted} are asked for"
            )
        out += _unusable(taskset, result["model"]["shape"]["max_context"])
        longest = taskset["prompt_tokens_max"] + config.rollout.max_new_tokens
        limit = result["model"]["shape"]["max_context"]
        if taskset["prompt_tokens_max"] < limit < longest:
            out.append(
                f"{taskset['name']}: a prompt of {taskset['prompt_tokens_max']} tokens and an "
                f"answer of {config.rollout.max_new_tokens} exceed the context of {limit}: "
                "answers will be cut"
            )
    memory = result["memory"]
    if memory["total_bytes"] > memory["available_bytes"]:
        out.append(
            f"about {size(memory['total_bytes'])} of memory, {size(memory['available_bytes'])} "
            "are available: lower learn.micro_tokens or rollout.group_size"
        )
    disk = result["disk"]
    for name, room in (("free", disk["free_bytes"]), ("store.max_gib", disk["limit_bytes"])):
        if disk["total_bytes"] > room:
            out.append(f"about {size(disk['total_bytes'])} of disk, {name} is {size(room)}")
    return out


def _unusable(taskset: Mapping[str, Any], limit: int) -> list[str]:
    """Tasks that will give nothing to learn from and nothing to measure."""
    out = []
    for split, (num, of, longest) in taskset["prompts_too_long"].items():
        if num:
            out.append(
                f"{taskset['name']}: {num} of {of} prompts looked at in split `{split}` do not fit "
                f"(prompt of {longest} tokens, max_context {limit}): they stay unscored; raise "
                "model.max_context or leave them out"
            )
    for split, (num, of) in taskset["cannot_be_judged"].items():
        if num:
            out.append(
                f"{taskset['name']}: {num} of {of} tasks looked at in split `{split}` cannot be "
                f"judged by reward `{taskset['reward']}`: they stay unscored"
            )
    return out


# --------------------------------------------------------------------------- text


def as_text(config: RunConfig, result: Mapping[str, Any]) -> str:
    """The plan for people: the resolved config, then what it means."""
    compute, model, step = result["compute"], result["model"], result["step"]
    shape, evaluation, disk = model["shape"], result["evaluation"], result["disk"]
    lines = ["config", *_config_lines(to_dict(config)), "", "plan"]
    lines += [
        f"  run directory   {result['run_dir']['path']}: {result['run_dir']['says']}",
        f"  compute         {compute['device']}, {compute['dtype']}, {compute['threads']} threads "
        f"({compute['why']})",
        f"  model           {shape['family']}, {shape['parameters'] / 1e6:,.1f} M parameters, "
        f"{shape['layers']} layers x {shape['hidden']}, vocabulary {shape['vocab']:,}, "
        f"{model['provenance']['license']}",
        f"  trained         {model['trained_parameters'] / 1e6:,.2f} M parameters"
        + (f", and a critic of {n:,}" if (n := model["critic_parameters"]) else ""),
    ]
    lines += [f"  tasks           {_tasks_line(t)}" for t in result["tasks"]]
    lines += [
        f"  algorithm       {name}: {_algorithm_line(found)}"
        for name, found in result["algorithms"].items()
    ]
    lines += [
        f"  a step          {step['groups']} groups, {step['trajectories']} trajectories, up to "
        f"{step['sampled_tokens_max']:,} sampled tokens"
        + (
            f", trained on those with {step['spread_keep']:.0%} of the spread of each task set"
            if step["spread_keep"]
            else ""
        )
        + (
            f", turns beyond {overlong['free_tokens']:,} tokens cost up to {overlong['penalty']:g}"
            if (overlong := step["overlong"])
            else ""
        )
        + f"; {step['steps']} steps",
        f"  evaluation      {evaluation['times']} x {evaluation['questions']} questions x "
        f"{evaluation['samples']} samples = {evaluation['answers']:,} answers",
        f"  memory          {_memory_line(result['memory'])}",
        f"  disk            up to {size(disk['total_bytes'])}: ledger {size(disk['ledger_bytes'])},"
        f" checkpoints {size(disk['checkpoints_bytes'])}; {size(disk['free_bytes'])} free",
        f"  chat template   {result['template']['lines'][0]}",
        *(f"                  {line}" for line in result["template"]["lines"][1:]),
        *(f"  caution         {caution}" for caution in result["cautions"]),
    ]
    return "\n".join(lines)


def _tasks_line(t: Mapping[str, Any]) -> str:
    if t["kind"] == "demonstrations":
        return (
            f"{t['name']}: {t['share']:.0%} of groups, {t['train_tasks']} demonstrations of about "
            f"{t['prompt_tokens_mean']:.0f} tokens, {t['learnt_tokens_mean']:.0f} of them learnt"
        )
    share = f"{t['share']:.0%} of groups" if t["share"] else "evaluated only"
    return (
        f"{t['name']}: {share}, reward {t['reward']}, prompts of about "
        f"{t['prompt_tokens_mean']:.0f} tokens, {t['held_out_questions']} held-out questions "
        f"({t['held_out_split']})"
    )


def _algorithm_line(algorithm: Mapping[str, Any]) -> str:
    def numbers(values: Mapping[str, Any]) -> str:
        return f" ({', '.join(f'{k} {v}' for k, v in values.items())})" if values else ""

    correction, advantage = algorithm["correction"], algorithm["advantage"] or "none"
    return (
        f"{algorithm['name']} = advantage {advantage}, loss {algorithm['loss']}"
        f"{numbers(algorithm['loss_options'])}, {algorithm['aggregation']}"
        + (f" (L {algorithm['norm_tokens']})" if "norm_tokens" in algorithm else "")
        + (f", credit{numbers(algorithm['credit'])}" if "credit" in algorithm else "")
        + (f", correction{numbers(correction)}" if correction else "")
        + (", plus the teacher's" if "teacher" in algorithm else "")
    )


def _memory_line(memory: Mapping[str, Any]) -> str:
    parts = sorted(memory["parts_bytes"].items(), key=lambda part: -part[1])
    named = ", ".join(f"{name} {size(num)}" for name, num in parts if num)
    return (
        f"about {size(memory['total_bytes'])} at the peak of {size(memory['available_bytes'])} "
        f"available: {named}"
    )


def _config_lines(tree: Any, prefix: str = "") -> list[str]:
    """`  learn.lr = 0.0003`, one leaf a line, as --set takes them."""
    pairs: list[tuple[str, Any]] = []
    if isinstance(tree, Mapping):
        pairs = list(tree.items())
    elif isinstance(tree, list) and any(isinstance(v, Mapping) for v in tree):
        pairs = [(str(i), v) for i, v in enumerate(tree)]
    if not pairs:
        return [f"  {prefix.rstrip('.')} = {json.dumps(tree)}"]
    return [line for key, value in pairs for line in _config_lines(value, f"{prefix}{key}.")]
