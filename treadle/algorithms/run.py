"""The algorithms of a run, by task set, and whether all that is set has an effect there.

Guarantees: a task set's rows are of the kind that its algorithm learns from; teacher, critic and
weights of rewards are there where something asks for them, and nowhere else.

Takes: RunConfig. Gives: Algorithms by task set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from treadle.advantage import GROUP_RELATIVE
from treadle.advantage.credit import settings_of
from treadle.algorithms.presets import ALIKE, Algorithm
from treadle.algorithms.resolve import resolve
from treadle.config import LearnConfig, RunConfig
from treadle.errors import ConfigError, setting
from treadle.types import OVERLONG


def resolve_run(config: RunConfig, names: tuple[str, ...]) -> dict[str, Algorithm]:
    """The algorithm of each task set, by its name; "" is the run's.

    Args:
        names: of the task sets, in the order of `config.tasks`.

    Raises:
        ConfigError: as `resolve`; rollouts under an algorithm for demonstrations, or the reverse;
            a teacher or a critic that is missing, or that nothing asks; groups of one
            where the advantage compares the trajectories of a group; weights of rewards that
            are missing; a setting, or a penalty of the reward, that nothing reads.
    """
    length = config.rollout.max_new_tokens
    out = {"": resolve(config.learn, norm_tokens=length)}
    for name, tasks in zip(names, config.tasks, strict=True):
        out[name] = resolve(config.learn, tasks.algorithm, norm_tokens=length)
    _check_sources(config, names, out)
    sets = zip(names, config.tasks, strict=True)
    trained = {name: out[name] for name, tasks in sets if tasks.ratio > 0} or {"": out[""]}
    _check_read(config, list(trained.values()))
    check_teacher(config.learn, trained)
    for algorithm in trained.values():
        compared = algorithm.advantage in GROUP_RELATIVE or algorithm.credit.agents == "recursive"
        if config.rollout.group_size < 2 and compared:
            raise ConfigError(
                f"rollout.group_size is {config.rollout.group_size}, but advantage "
                f"`{algorithm.advantage}` of algorithm `{algorithm.name}` compares the "
                "trajectories of a group: with one trajectory every advantage is 0 and nothing "
                "is learnt",
                hint=f"2 or more, e.g. {setting('rollout.group_size=8')}",
            )
    _check_spread(config.learn, list(trained.values()))
    check_critic(config.learn, trained)
    several = any(algorithm.advantage == "gdpo" for algorithm in trained.values())
    if several != bool(config.learn.reward_weights):
        raise ConfigError(
            "advantage `gdpo` needs learn.reward_weights: which parts of the reward it compares"
            if several
            else "learn.reward_weights is set, but no algorithm of this run compares parts of the "
            "reward",
            hint=setting('learn.reward_weights={"score": 1, "lenient": 0.5}')
            if several
            else setting("learn.algorithm=gdpo"),
        )
    _check_overlong(config, out)
    return out


def _check_sources(
    config: RunConfig, names: Sequence[str], algorithms: Mapping[str, Algorithm]
) -> None:
    """Raises ConfigError: rollouts under an algorithm for demonstrations, or the reverse."""
    demonstrates = {n: t.demonstrates for n, t in zip(names, config.tasks, strict=True)}
    # The run's own algorithm trains what no task set names: where there are none, rollouts.
    for name in names or ("",):
        algorithm, shown = algorithms[name], demonstrates.get(name, False)
        if shown and algorithm.term != "ce":
            raise ConfigError(
                f"task set `{name}` holds demonstrations, and algorithm `{algorithm.name}` learns "
                "from rollouts",
                hint=f"{setting(f'tasks.{names.index(name)}.algorithm=sft')}, or "
                f"{setting('learn.algorithm=sft')} for all task sets",
            )
        trained = name not in demonstrates or config.tasks[names.index(name)].ratio > 0
        if trained and not shown and not algorithm.advantage and not algorithm.distils:
            raise ConfigError(
                f"algorithm `{algorithm.name}` learns from demonstrations"
                + (f", and task set `{name}` makes rollouts" if name else "")
                + ", and a run makes rollouts: they have no advantage under it",
                hint=f"{setting('learn.algorithm=cispo')}; a task set that is only evaluated has "
                "ratio 0; demonstrations are `chat:PATH` and `rollouts:RUN_DIR`",
            )


def _check_read(config: RunConfig, trained: Sequence[Algorithm]) -> None:
    """Raises ConfigError: a setting of `learn` that no row of the run would feel.

    Args:
        trained: of the task sets that are drawn.
    """
    learn, named = config.learn, {t.algorithm for t in config.tasks if t.ratio > 0}
    unread: list[tuple[str, str]] = []
    if named and "" not in named:
        parts = ("advantage", "loss", "aggregation", "loss_options", "correction", "credit")
        unread += [
            (f"learn.{part}", "every task set that is trained names an algorithm of its own")
            for part in (*parts, *(() if learn.algorithm in named else ("algorithm",)))
            if getattr(learn, part) != getattr(LearnConfig(), part)
        ]
    if all(algorithm.term == "ce" for algorithm in trained):
        unread += [
            (f"learn.{part}", "all that this run learns are demonstrations, which nothing sampled")
            for part in ("entropy", "kl")
            if getattr(learn, part) is not None
        ]
    compared = any(a.advantage in GROUP_RELATIVE and not a.distils for a in trained)
    if learn.zero_variance == "keep" and not compared:
        unread.append(("learn.zero_variance", "no algorithm of this run compares rewards"))
    if learn.norm_tokens and all(a.aggregation != "seq_mean_token_sum_norm" for a in trained):
        unread.append(("learn.norm_tokens", "no aggregation of this run divides by it"))
    if unread:
        key, why = unread[0]
        raise ConfigError(f"`{key}` is set, but nothing reads it: {why}", hint=f"leave {key} out")
    critic = learn.critic
    if critic is not None and critic.warmup_steps >= config.steps:
        raise ConfigError(
            f"learn.critic.warmup_steps is {critic.warmup_steps} and the run has {config.steps} "
            "steps: the policy would never learn",
            hint=setting(f"steps={critic.warmup_steps + config.steps}"),
        )


def _check_spread(learn: LearnConfig, trained: Sequence[Algorithm]) -> None:
    """`learn.spread_keep` keeps what can teach only where the spread of the rewards teaches; what
    learns from demonstrations or from a teacher is left as it is."""
    by_reward = [a for a in trained if a.term != "ce" and not a.distils]
    why = "" if by_reward else "nothing in this run is taught by rewards alone"
    for algorithm in by_reward:
        credit = algorithm.credit
        if algorithm.advantage not in GROUP_RELATIVE - {"gdpo"}:
            why = f"advantage `{algorithm.advantage}` of algorithm `{algorithm.name}` reads more"
        elif credit.agents == "recursive" or credit.turn_weight:
            why = f"the credit of algorithm `{algorithm.name}` reads more"
        elif learn.zero_variance == "keep":
            why = "learn.zero_variance=keep wants groups without any spread"
    if learn.spread_keep and why:
        raise ConfigError(
            f"`learn.spread_keep` is {learn.spread_keep}: it goes by how much the rewards of a "
            f"group differ, but {why}",
            hint="leave learn.spread_keep out",
        )


def _check_overlong(config: RunConfig, algorithms: Mapping[str, Algorithm]) -> None:
    """Raises ConfigError: `rollout.overlong` is set, and the reward's value teaches nothing."""
    if config.rollout.overlong is None:
        return
    reads_value = [
        a
        for a in algorithms.values()
        if a.advantage not in ("", "gdpo") and a.credit.agents != "recursive"
    ]
    if not reads_value and OVERLONG not in config.learn.reward_weights:
        weights = setting('learn.reward_weights={"score": 1, "overlong": 1}')
        raise ConfigError(
            "`rollout.overlong` is set, but no algorithm of this run learns from the value of a "
            f"reward: {', '.join(sorted({a.name for a in algorithms.values()}))}",
            hint=f"leave it out; `gdpo` takes it as a part: {weights}",
        )


def check_critic(learn: LearnConfig, algorithms: Mapping[str, Algorithm]) -> None:
    """Raises ConfigError: `gae` has no critic, or the critic has no `gae`; or a teacher, or credit
    within a rollout, besides."""
    wanted = [a.name for a in algorithms.values() if a.advantage == "gae"]
    for credit in (a.credit for a in algorithms.values() if a.advantage == "gae"):
        if replace(credit, agents="all" if credit.agents == "root" else credit.agents) != ALIKE:
            shared = ", ".join(f"{k} {v}" for k, v in settings_of(credit).items())
            raise ConfigError(
                "advantage `gae` credits every token by itself, and learn.credit shares the "
                f"outcome out before: {shared}",
                hint="with a critic only learn.credit.agents=root, which leaves sub-agents out",
            )
    if any(a.advantage == "gae" and a.distils for a in algorithms.values()):
        raise ConfigError(
            "advantage `gae` takes one outcome per row, and a teacher's advantages differ from "
            "token to token",
            hint=f"{setting('learn.algorithm=distill_reward')} with its own advantage",
        )
    if wanted and learn.critic is None:
        raise ConfigError(
            f"advantage `gae` of algorithm `{wanted[0]}` needs values, and there is no critic: "
            "learn.critic is null",
            hint=f"{setting('learn.critic={}')} takes one with all defaults, "
            f"{setting('learn.critic.kind=model')} a model of its own",
        )
    if learn.critic is not None and not wanted:
        used = sorted({a.advantage for a in algorithms.values() if a.advantage})
        raise ConfigError(
            f"learn.critic is set, but no algorithm of this run asks a critic: the advantages are "
            f"{', '.join(used)}",
            hint=f"{setting('learn.algorithm=ppo')}, or leave learn.critic out",
        )


def check_teacher(learn: LearnConfig, algorithms: Mapping[str, Algorithm]) -> None:
    """Raises ConfigError: an algorithm asks a teacher and there is none, or the reverse."""
    asking = [a.name for a in algorithms.values() if a.distils]
    if asking and learn.teacher is None:
        raise ConfigError(
            f"algorithm `{asking[0]}` learns from a teacher, and there is none: learn.teacher is "
            "null",
            hint=f"{setting('learn.teacher.source=runs/first-run')}: a run, a model, or "
            "learn.teacher.system for the same model under another system message",
        )
    if learn.teacher is not None and not asking:
        raise ConfigError(
            "learn.teacher is set, but no algorithm of this run asks a teacher",
            hint=f"{setting('learn.algorithm=distill')}, or leave learn.teacher out",
        )
