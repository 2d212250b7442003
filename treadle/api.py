"""The public Python API, and how a config becomes a run.

    import treadle as td

    @td.reward
    def correct(trajectory: td.Trajectory) -> float:
        return float(trajectory.answer.strip() == trajectory.task.data["answer"])

    run = td.train(model="smollm2-135m", tasks="data/tasks.jsonl", reward=correct, steps=60)
    print(run.report())

Guarantees: what is built here is closed here, on every way out; nothing of a run directory is
touched before the config, the model and the task sets have been checked.

Takes: a RunConfig, or the arguments of `train`. Gives: a `Run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from treadle import machine
from treadle.config import (
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TasksConfig,
    differences,
    override,
    to_dict,
)
from treadle.errors import RESUME, RUN_DIR, ConfigError, StoreError, setting
from treadle.evals import EVALUATED, STARTED_BY
from treadle.evals.visible import one_line
from treadle.progress import TrainProgress
from treadle.store import RunInfo, Store
from treadle.store.layout import DATABASE
from treadle.threads import run as run_coroutine
from treadle.types import Provenance, Reward, Task, Taskset, Trajectory

if TYPE_CHECKING:
    from treadle.draws import Draws
    from treadle.harness import Harness
    from treadle.loop import Observer, Parts
    from treadle.models.load import LoadedModel
    from treadle.models.policy import Policy
    from treadle.render import Renderer
    from treadle.reward import GraderPool
    from treadle.rollout.teacher import Teacher
    from treadle.tasks import Mix

log = logging.getLogger(__name__)

_Value = float | Mapping[str, float]

Tasks = str | Path | TasksConfig

_TASKS_HINT = 'a path to a JSONL file, "reasoning_gym:FAMILY", or td.TasksConfig(source=...)'

RewardFunction = Callable[[Trajectory], _Value | Awaitable[_Value]]

Grade = Callable[[Trajectory], Awaitable[Reward]]


def reward(function: RewardFunction) -> RewardFunction:
    """Mark a function of a trajectory as a reward; it runs in a killable worker process.

    It returns a number (finite), or a mapping with "score" and named parts; it may be async.
    Raising, returning None or not finishing leaves the trajectory unscored, which is not 0.
    """
    if not callable(function):
        raise ConfigError(f"@td.reward marks a function, got {function!r}")
    return function


def train(
    *,
    model: str | None = None,
    tasks: Tasks | Sequence[Tasks],
    reward: RewardFunction | str | None = None,
    steps: int | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    config: RunConfig | None = None,
    settings: str | Sequence[str] = (),
    observer: Observer | None = None,
    progress: bool = True,
) -> Run:
    """Train a model on tasks and return the finished run.

    Args:
        model: a known name, a Hugging Face directory, or a hub id; None = as in `config`.
        tasks: a path to a JSONL file, "reasoning_gym:FAMILY", or a TasksConfig; or several.
        reward: what trains; None = the task set's own strict score.
        run_dir: None = runs/{config.name}.
        resume: go on with the run in `run_dir`.
        steps: in all, those of an earlier session included; None = as in `config`.
        config: everything not named here; None = the defaults, or on resume what the run
            began with. `config.model.lora = None` trains every parameter.
        settings: `a.b=c` overrides, one or several, applied last.
        observer: called as (kind, data) on the event loop.
        progress: bars on stderr where it is a terminal, else a line for every step.

    Raises a TreadleError of the stage that failed; the store keeps everything until then.
    """
    _expect("run_dir", run_dir, str | Path | None, "a path, or None for runs/{name}")
    _expect("config", config, RunConfig | None, "e.g. td.RunConfig(steps=3)")
    _expect("progress", progress, bool, "False trains in silence")
    base = config or RunConfig()
    if resume and config is None:
        with Store.open(_directory(run_dir, base), readonly=True) as store:
            base = store.config()
    named = reward if isinstance(reward, str) else None
    sets = [_tasks_config(t, named) for t in _several("tasks", tasks, Tasks, _TASKS_HINT)]
    given = {"steps": steps, "model.name": model, "tasks": tuple(sets)}
    resolved = override(
        base,
        _several("settings", settings, str, 'e.g. settings=["learn.lr=1e-4"]'),
        {key: value for key, value in given.items() if value is not None},
    )
    directory = _directory(run_dir, resolved)
    observers = [observer] if observer else []
    with contextlib.ExitStack() as stack:
        if progress and sys.stderr is not None:  # a program without a console has none
            shown = TrainProgress(resolved, directory, file=sys.stderr)
            observers.append(stack.enter_context(shown))

        def tell(kind: str, data: Mapping[str, Any]) -> None:
            for each in observers:
                each(kind, data)

        run_config(
            resolved,
            directory,
            resume=resume,
            reward=None if isinstance(reward, str) else reward,
            observer=tell,
        )
    return Run(directory)


def _directory(run_dir: str | Path | None, config: RunConfig) -> Path:
    return Path(run_dir) if run_dir is not None else Path("runs") / config.name


def _several(name: str, given: Any, kind: Any, hint: str) -> tuple[Any, ...]:
    """One of a kind or a sequence of them, as a tuple."""
    single = isinstance(given, str | Mapping) or not isinstance(given, Iterable)
    several = (given,) if single else tuple(given)
    for each in several:
        _expect(name, each, kind, hint)
    return several


def _expect(name: str, value: Any, kind: Any, hint: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"`{name}` cannot be {value!r}", hint=hint)


def _tasks_config(tasks: Tasks, reward: str | None) -> TasksConfig:
    if not isinstance(tasks, TasksConfig):
        named = isinstance(tasks, str) and ":" in tasks and not Path(tasks).exists()
        tasks = TasksConfig(source=str(tasks) if named else f"jsonl:{tasks}")
    return tasks if reward is None else replace(tasks, reward=reward)


class Run:
    """A run directory, for reading. Opens its store only while it is asked."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def store(self) -> Store:
        """The ledger, read-only; close it, or use it as a context manager."""
        return Store.open(self.path, readonly=True)

    def results(self) -> dict[str, Any]:
        """The report as JSON values: `eval.before`, `eval.after`, `eval.gain`, curves, costs."""
        from treadle.evals.report import summarise

        with self.store() as store:
            return summarise(store)

    def report(self) -> str:
        """The report as text."""
        from treadle.evals.report import as_text

        return as_text(self.results())

    def export(self, out_dir: str | Path, *, form: Literal["peft", "merged"] | None = None) -> Path:
        """Write the newest checkpoint for others, with a model card.

        Args:
            out_dir: new or empty.
            form: "peft" = an adapter, "merged" = a plain Hugging Face directory, which `model=` of
                another run takes; None = the adapter where the run trained one.

        Raises StoreError, ModelError, WeightsError: see `treadle.weights.export.export_run`.
        """
        from treadle.weights.export import export_run

        return export_run(self.path, out_dir, form=form).path

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"


# --------------------------------------------------------------------------- from config to run


def run_config(
    config: RunConfig,
    run_dir: Path,
    *,
    resume: bool = False,
    reward: RewardFunction | None = None,
    observer: Observer | None = None,
    started_by: str = "td.train",
) -> None:
    """Run a config to its end in `run_dir`. See `train` for errors.

    Args:
        reward: in place of the rewards that the task sets name.
        started_by: kept with the session, so that a report can say how to go on.
    """
    tuning = machine.tune()
    from treadle.loop import Controller
    from treadle.reward.graders import check_reward

    if reward is not None:
        check_reward(reward, "`reward`")

    if not config.tasks:
        raise ConfigError(
            "no task set is configured: `tasks` is empty",
            hint='a recipe names them: tasks=(TasksConfig(source="jsonl:data/tasks.jsonl"),)',
        )
    config = _resolved(config, run_dir, resume)
    _check_place(config, run_dir, resume)

    async def main() -> None:
        async with _parts(config, reward) as (parts, provenance):
            facts = asdict(machine.facts()) | {
                "tuning": asdict(tuning),
                "probe": asdict(machine.probe()),
                STARTED_BY: started_by,
            }
            with _store(config, run_dir, resume, provenance, facts) as store:
                controller = Controller(config, parts, store, observer or (lambda k, d: None))
                try:
                    await _interruptible(controller.run())
                except (KeyboardInterrupt, asyncio.CancelledError):
                    store.finish("interrupted")
                    raise
                except BaseException as error:
                    # On a full disk the ledger refuses too; the cause is what must get out.
                    with contextlib.suppress(StoreError):
                        store.add_event("failed", {"kind": type(error).__name__})
                        store.finish("failed", str(error))
                    raise
                store.finish("finished")

    run_coroutine(main())


async def _interruptible(work: Awaitable[None]) -> None:
    """SIGTERM ends a run like Ctrl-C: everything committed stays, and resuming goes on."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    finally:
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGTERM)


def _resolved(config: RunConfig, run_dir: Path, resume: bool) -> RunConfig:
    """The config with what the machine decides filled in: the store holds what really runs.

    A resumed run goes on in the dtype that it began with, whatever this machine would choose.
    """
    if config.model.dtype != "auto":
        return config
    if resume:
        with Store.open(run_dir, readonly=True) as store:
            dtype = store.config().model.dtype
    else:
        dtype = cast(Literal["float32", "bfloat16"], machine.probe().dtype)
    return replace(config, model=replace(config.model, dtype=dtype))


def _check_place(config: RunConfig, run_dir: Path, resume: bool) -> None:
    """What `_store` will refuse, said before minutes of loading. Raises as it does."""
    if resume:
        with Store.open(run_dir, readonly=True) as store:
            check_is_run(run_dir, store.info())
            check_resumable(store.config(), config, store.frontier().step)
    elif (run_dir / DATABASE).exists():
        with Store.open(run_dir, readonly=True) as store:
            check_is_run(run_dir, store.info())
        raise StoreError(
            f"{run_dir} holds a run already",
            hint=f"go on with it by {RESUME}, or choose another {RUN_DIR}",
        )


def _store(
    config: RunConfig,
    run_dir: Path,
    resume: bool,
    provenance: Mapping[str, Provenance],
    facts: Mapping[str, Any],
) -> Store:
    if not resume:
        return Store.create(run_dir, config, provenance=provenance, facts=facts)
    # Opening a ledger to write in it begins a session: what is refused must leave no trace.
    with Store.open(run_dir, readonly=True) as store:
        check_resumable(store.config(), config, store.frontier().step)
        check_provenance(store.info().provenance, provenance)
    store = Store.open(run_dir, readonly=False, facts=facts)
    try:
        if store.config() != config:
            store.set_config(config)
    except BaseException:
        store.close()
        raise
    return store


def check_is_run(run_dir: Path, info: RunInfo) -> None:
    """Raises ConfigError where `treadle eval` keeps its answers: no run can be there."""
    if EVALUATED in info.provenance:
        raise ConfigError(
            f"{run_dir} holds an evaluation, of {info.provenance[EVALUATED].source}, not a run",
            hint=f"choose another {RUN_DIR}; `treadle runs` says which directories are runs",
        )


def check_resumable(stored: RunConfig, wanted: RunConfig, done: int) -> None:
    """A run goes on with the config that it began with; only its length may change (B079), and
    how much room it may take.

    Raises ConfigError: another setting differs, or the target is already reached.
    """
    if found := [d for d in changes(stored, wanted) if d[0] not in MAY_CHANGE]:
        what = "; ".join(
            f"`{key}` was {_cut(a)}, and {_cut(b)} is asked for" for key, a, b in found
        )
        raise ConfigError(
            "a resumed run keeps its settings; only `steps` may differ "
            f"(and limits of `store`): {what}",
            hint=f"leave these as they were, or begin a new run with another {RUN_DIR}",
        )
    if wanted.steps < done:
        raise ConfigError(
            f"the run has {done} steps already, and {wanted.steps} are asked for",
            hint=f"{setting(f'steps={done + 10}')} trains 10 more",
        )


MAY_CHANGE = ("steps", "store.max_gib", "store.keep_checkpoints")
"""Settings that a resumed run may be given anew; it keeps them from then on."""


def changes(stored: RunConfig, wanted: RunConfig) -> list[tuple[str, Any, Any]]:
    """(key, stored value, wanted value) of the settings that differ.

    A run stores the dtype that "auto" became; "auto" asks for no other.
    """
    if wanted.model.dtype == "auto":
        wanted = replace(wanted, model=replace(wanted.model, dtype=stored.model.dtype))
    return differences(to_dict(stored), to_dict(wanted))


def _cut(value: Any) -> str:
    return one_line(json.dumps(value), 80)


def check_provenance(stored: Mapping[str, Provenance], now: Mapping[str, Provenance]) -> None:
    """A run goes on with the model, task sets, template and reward that it began with.

    Raises ConfigError naming the first that is not what it was.
    """
    for role, began in stored.items():
        here = now.get(role)
        if here is None or (here.sha256, here.sha256 or here.source) != (
            began.sha256,
            began.sha256 or began.source,
        ):
            found = "nothing" if here is None else f"{here.source} {here.sha256[:12]}"
            raise ConfigError(
                f"the run began with {role} {began.source} {began.sha256[:12]}, and now it is "
                f"{found}",
                hint="a resumed run keeps its model, tasks, template and reward; from Python, "
                "pass the same reward function again",
            )


def reward_provenance(reward: RewardFunction | None, config: RunConfig) -> Provenance:
    """Which reward trains: the config's names, or a function by its name and code."""
    from treadle.reward.fingerprint import fingerprint, name_in_module

    if reward is None:
        names = (t.reward for t in evaluated(config.tasks))
        return Provenance(source=", ".join(names), license="")
    return Provenance(source=name_in_module(reward), license="", sha256=fingerprint(reward))


@contextlib.asynccontextmanager
async def _parts(
    config: RunConfig,
    reward: RewardFunction | None,
    *,
    mix: Any = None,
    harness: Harness | None = None,
    grade: Grade | None = None,
) -> AsyncIterator[tuple[Parts, dict[str, Provenance]]]:
    """Build every stage, check what can be checked before a token is sampled, close them all.

    `mix`, `harness` and `grade` take the place of what the config names.
    """
    from treadle.algorithms import resolve_run
    from treadle.draws import Draws
    from treadle.harness import harness_named
    from treadle.loop import Parts
    from treadle.reward import GraderPool
    from treadle.sampler.engine import Engine
    from treadle.tasks.mix import names_of
    from treadle.tools import load_tools
    from treadle.train import Trainer
    from treadle.train.proximal import proximal_of
    from treadle.train.terms import check_terms
    from treadle.weights.publish import Publisher

    algorithms = resolve_run(config, names_of(config.tasks))
    check_terms(config.learn, algorithms[""])
    if mix is None:
        mix = open_tasks(config, reward)
        draws = draws_of(config, mix)
    else:
        draws = Draws(mix)
    loaded = load_model(config.model)
    renderer = renderer_of(loaded, tools=bool(config.rollout.tools))
    tools = load_tools(config.rollout.tools)
    policy = policy_of(loaded, config)
    rows = config.rollout.group_size * config.rollout.groups_per_step * (config.schedule.eta + 1)
    rows = min(rows, 256)
    template = Provenance(
        source="chat template of the model",
        license=loaded.provenance.license,
        sha256=loaded.template_sha256,
    )
    check_tokens(config, loaded)
    provenance = {
        "model": loaded.provenance,
        "template": template,
        "reward": reward_provenance(reward, config),
    } | {f"tasks.{i}": taskset.provenance for i, taskset in enumerate(mix.tasksets)}
    with GraderPool() as pool:
        async with (
            Engine(policy, max_rows=rows) as engine,
            _teacher(config, loaded, policy) as (teacher, taught_by),
        ):
            if taught_by is not None:
                provenance["teacher"] = taught_by
            trains, scores = (grade, grade) if grade else _grades(config, reward, mix, pool)
            yield (
                Parts(
                    policy=policy,
                    engine=engine,
                    max_rows=rows,
                    renderer=renderer,
                    trainer=Trainer(
                        policy,
                        config.learn,
                        seed=config.seed,
                        algorithms=algorithms,
                        value_trunk=value_trunk_of(loaded, config),
                        proximal=proximal_of(policy, config),
                    ),
                    publisher=Publisher(),
                    mix=mix,
                    draws=draws,
                    harness=harness or harness_named(config.rollout.harness),
                    tools=tools,
                    reward=_shaped(trains, config.rollout),
                    score=scores,
                    teacher=teacher,
                ),
                provenance,
            )


@contextlib.asynccontextmanager
async def _teacher(
    config: RunConfig, loaded: LoadedModel, policy: Policy
) -> AsyncIterator[tuple[Teacher | None, Provenance | None]]:
    """Who is distilled, and where its weights come from; (None, None) where nobody is.

    Raises ModelError, WeightsError: it cannot be loaded.
    """
    wanted = config.learn.teacher
    if wanted is None:
        yield None, None
        return
    from treadle.models.policy import Policy
    from treadle.rollout.teacher import Teacher, noise_of
    from treadle.sampler.engine import Engine
    from treadle.weights.restore import open_policy

    told = len(loaded.tokenizer(wanted.system)["input_ids"]) + 16 if wanted.system else 0
    room = config.model.max_context + told
    source = wanted.source or config.model.name
    if (Path(source) / DATABASE).is_file():
        found = open_policy(source, dtype=policy.dtype, device=policy.device, max_context=room)
        teaching = found.policy
        origin = Provenance(
            source=f"run {found.config.name}, step {found.checkpoint.step}",
            license=found.policy.loaded.provenance.license,
            sha256=found.checkpoint.sha256,
        )
    else:
        model = load_model(replace(config.model, name=source, max_context=room))
        teaching = Policy(model, lora=None, dtype=policy.dtype, device=policy.device)
        origin = model.provenance
    async with Engine(teaching, max_rows=1, kv_tokens=16, name="teacher") as engine:
        yield (
            Teacher(
                sampler=engine,
                name=source,
                system=wanted.system,
                coef=wanted.coef,
                noise_nats=noise_of(str(policy.dtype).removeprefix("torch.")),
            ),
            origin,
        )


def check_tokens(config: RunConfig, loaded: LoadedModel) -> None:
    """A teacher scores ids, and rollouts of another run are learnt by theirs.

    Raises ConfigError: ids mean something else there, or there is no such run. ModelError: the
    model that would tell is not on this machine.
    """
    from treadle.models.load import load_tokenizer

    teacher = config.learn.teacher
    if teacher is not None and teacher.source:
        path, name = Path(teacher.source), teacher.source
        if (path / DATABASE).is_file():
            with Store.open(path, readonly=True) as store:
                name = store.config().model.name
        elif path.parts[:1] == ("runs",):
            raise ConfigError(
                f"`learn.teacher.source`: there is no run {path}", hint="`treadle runs` lists them"
            )
        if name != config.model.name:
            _same_tokenizer(loaded, load_tokenizer(name), f"teacher {teacher.source}")
    for tasks in config.tasks:
        kind, _, run_dir = tasks.source.partition(":")
        if kind != "rollouts":
            continue
        with Store.open(run_dir, readonly=True) as store:
            info, name = store.info(), store.config().model.name
        sampled = info.provenance.get("model")
        here = loaded.provenance.sha256
        if sampled is None or not here or sampled.sha256 != here:
            _same_tokenizer(loaded, load_tokenizer(name), f"{name}, which {run_dir} trained,")


def _same_tokenizer(loaded: LoadedModel, other: Any, whose: str) -> None:
    from treadle.models.load import tokenizer_sha256

    ours, theirs = tokenizer_sha256(loaded.tokenizer), tokenizer_sha256(other)
    if ours != theirs:
        raise ConfigError(
            f"{whose} has another tokenizer than the model: {len(other):,} ids "
            f"({theirs[:12]}) and {len(loaded.tokenizer):,} ({ours[:12]}); one id would mean two "
            "things",
            hint="teachers and rollouts must share the model's tokenizer; learn from text with "
            "`chat:PATH` instead",
        )


LOOKED_AT = 64
"""Training tasks of each set that are looked at before a run begins."""


def evaluated(tasks: Sequence[TasksConfig]) -> tuple[TasksConfig, ...]:
    """Those that make rollouts and can be judged: not demonstrations."""
    return tuple(t for t in tasks if not t.demonstrates)


def open_tasks(config: RunConfig, reward: RewardFunction | None = None) -> Mix:
    """The task sets of a config, with all that can be checked without a model.

    Args:
        reward: what trains in place of the rewards that the task sets name.

    Raises ConfigError, DataError: a source, an option, a row, a reward or a tool cannot be used;
    a split that is trained or evaluated is empty, or holds nothing that the reward can judge.
    """
    from treadle.evals.evaluate import questions
    from treadle.harness import harness_named
    from treadle.reward import grader_of, require_gradable
    from treadle.tasks import first, open_mix
    from treadle.tools import load_tools

    grader_of(evaluated(config.tasks), config.seed)
    load_tools(config.rollout.tools)
    harness_named(config.rollout.harness)
    mix = open_mix(config.tasks, config.seed)
    draws_of(config, mix)
    for settings, taskset in zip(config.tasks, mix.tasksets, strict=True):
        if settings.ratio > 0:
            first(taskset, mix.split, 1)
        if settings.demonstrates:
            continue
        asked = questions(taskset, config.eval) if config.eval.questions else ()
        if reward is None:
            if settings.ratio > 0:
                require_gradable(settings, taskset, training_tasks(mix, taskset, LOOKED_AT))
            require_gradable(settings, taskset, asked)
    return mix


def draws_of(config: RunConfig, mix: Mix) -> Draws:
    """The task stream of a config. Raises ConfigError: a curriculum cannot be followed."""
    from treadle.draws import Draws

    return Draws(
        mix,
        config.tasks,
        groups_per_step=config.rollout.groups_per_step,
        eta=config.schedule.eta,
        seed=config.seed,
    )


def training_tasks(mix: Mix, taskset: Taskset, count: int) -> list[Task]:
    """The first tasks that a set gives to training; fewer where it has fewer."""
    tasks: list[Task] = []
    with contextlib.suppress(IndexError):
        for index in range(count):
            tasks.append(taskset.task(index, mix.split))
    return tasks


def load_model(config: ModelConfig) -> LoadedModel:
    """The model of a config; `tiny-pretrained` is trained on first use."""
    from treadle.models import load as loading

    if config.name == "tiny-pretrained":
        from treadle.train.pretrain import install_tiny_pretrained

        install_tiny_pretrained()
    return loading.load(config.name, max_context=config.max_context)


def policy_of(loaded: LoadedModel, config: RunConfig) -> Policy:
    """The policy of a config on this machine's device, in the dtype it runs fastest."""
    import torch

    from treadle.models.policy import Policy

    probe = machine.probe()
    name = probe.dtype if config.model.dtype == "auto" else config.model.dtype
    return Policy(
        loaded,
        lora=config.model.lora,
        dtype=getattr(torch, name),
        device=probe.device,
        seed=config.seed,
    )


def value_trunk_of(loaded: LoadedModel, config: RunConfig) -> Policy | None:
    """The model of its own that the run's critic is, if it is one. With LoRA an adapter of its own
    on the base that is loaded already; in full fine-tuning the model is loaded once more."""
    if config.learn.critic is None or config.learn.critic.kind == "head":
        return None
    base = load_model(config.model) if config.model.lora is None else loaded
    return policy_of(base, replace(config, seed=config.seed + 1))


def renderer_of(loaded: LoadedModel, *, tools: bool = False) -> Renderer:
    """The model's renderer, its chat template checked. Says in the log what it cannot splice."""
    from treadle.render import Renderer

    renderer = Renderer(loaded.tokenizer, loaded.stop_ids)
    report = renderer.check()
    report.require(tools=tools)
    for line in report.lines():
        log.info("chat template of %s: %s", loaded.path, line)
    return renderer


def _shaped(grade: Grade, rollout: RolloutConfig) -> Grade:
    """What trains, with the terms of its length; never what evaluates."""
    from treadle.reward.shaping import shaped

    async def train(trajectory: Trajectory) -> Reward:
        return shaped(await grade(trajectory), trajectory, rollout)

    return train


def _grades(
    config: RunConfig, reward: RewardFunction | None, mix: Mix, pool: GraderPool
) -> tuple[Grade, Grade]:
    """The reward that trains, and the task sets' own strict scores that evaluate (B053).

    A task that its set cannot grade is evaluated by the reward: nothing else judges it.
    """
    from treadle.reward import can_grade, grader_of, without_own

    async def paid(function: RewardFunction, trajectory: Trajectory) -> Reward:
        """By a function that knows no task set: what it calls a score is no strict one."""
        judged = await pool.score(function, trajectory, config.rollout.reward_limit_s)
        return replace(judged, parts=without_own(judged.parts))

    async def train(trajectory: Trajectory) -> Reward:
        if reward is not None:
            return await paid(reward, trajectory)
        return await pool.score(trained, trajectory, config.rollout.reward_limit_s)

    async def evaluate(trajectory: Trajectory) -> Reward:
        task = trajectory.task
        if reward is None or can_grade(mix[task.taskset], task):
            return await pool.score(strict, trajectory, config.rollout.reward_limit_s)
        return await paid(reward, trajectory)

    judged = evaluated(config.tasks)
    trained = grader_of(judged, config.seed)
    strict = grader_of(judged, config.seed, strict=True)
    return train, evaluate


__all__ = ["Run", "check_is_run", "check_resumable", "reward", "run_config", "train"]
