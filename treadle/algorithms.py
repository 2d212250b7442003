"""The algorithms that a run can name: an advantage, a loss, an aggregation and a correction each.

An algorithm is data: `learn.algorithm` (or `tasks.N.algorithm`, for the rows of one task set) names
an entry of ALGORITHMS, and `learn.advantage`, `learn.loss`, `learn.aggregation`,
`learn.loss_options` and `learn.correction` replace parts of the run's own.

Guarantees: what is returned by `resolve` and `resolve_run` can run: every name is known, every
option is one that the loss takes and under which it is a policy gradient, and of what is set
nothing is without effect.

Takes: LearnConfig or RunConfig. Gives: Algorithms.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from treadle.advantage import ESTIMATORS, GROUP_RELATIVE
from treadle.advantage.credit import check_credit, settings_of
from treadle.batch.weights import check_aggregation
from treadle.config import CorrectionConfig, CreditConfig, LearnConfig, RunConfig
from treadle.errors import ConfigError, did_you_mean, setting
from treadle.losses import LOSSES, Tokens
from treadle.types import OVERLONG

NONE = CorrectionConfig()
ALIKE = CreditConfig()
"""Every token of a rollout carries its advantage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """How rewards become a gradient."""

    name: str
    advantage: str
    """Estimator in `advantage.ESTIMATORS`; "" = rewards are not looked at: it learns from
    demonstrations, or from a teacher alone."""
    loss: str
    """In `losses.LOSSES`."""
    aggregation: str
    """In `batch.AGGREGATIONS`."""
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    """Of the loss, by its keyword; what is absent has the loss's default."""
    correction: CorrectionConfig = NONE
    credit: CreditConfig = ALIKE
    norm_tokens: int = 0
    """L of `seq_mean_token_sum_norm`."""
    distils: bool = False
    """A token's advantage gets learn.teacher.coef x (log pi_teacher - log mu) added."""
    source: str = ""
    """Where the definition comes from, and what was chosen where it is silent."""

    @property
    def term(self) -> str:
        """Rows of one term share their denominators: "rl" or "ce"."""
        return "ce" if self.loss == "cross_entropy" else "rl"


def _table(*entries: Algorithm) -> dict[str, Algorithm]:
    return {entry.name: entry for entry in entries}


ALGORITHMS: dict[str, Algorithm] = _table(
    Algorithm(
        name="cispo",
        advantage="group_mean",
        loss="cispo",
        aggregation="token_mean",
        source="CISPO arXiv:2506.13585 with DPPO's mask arXiv:2602.04879; the default",
    ),
    Algorithm(
        name="grpo",
        advantage="grpo",
        loss="ppo_clip",
        aggregation="seq_mean_token_mean",
        source="arXiv:2402.03300; no KL term",
    ),
    Algorithm(
        name="dr_grpo",
        advantage="group_mean",
        loss="ppo_clip",
        aggregation="seq_mean_token_sum_norm",
        source="arXiv:2503.20783",
    ),
    Algorithm(
        name="dapo",
        advantage="grpo",
        loss="ppo_clip",
        aggregation="token_mean",
        options={"clip_high": 0.28},
        source="arXiv:2503.14476; dynamic sampling is learn.zero_variance, the overlong penalty "
        "rollout.overlong",
    ),
    Algorithm(
        name="gspo",
        advantage="grpo",
        loss="gspo",
        aggregation="seq_mean_token_mean",
        source="arXiv:2507.18071",
    ),
    Algorithm(
        name="luspo",
        advantage="grpo",
        loss="gspo",
        aggregation="seq_mean_token_sum",
        options={"clip_low": 2e-3, "clip_high": 2.5e-3},
        source="GSPO's loss times the length of the row",
    ),
    Algorithm(
        name="sapo",
        advantage="grpo",
        loss="sapo",
        aggregation="seq_mean_token_mean",
        source="arXiv:2511.20347",
    ),
    Algorithm(
        name="dppo_tv",
        advantage="group_mean",
        loss="dppo_tv",
        aggregation="token_mean",
        source="arXiv:2602.04879; advantage and aggregation as in the default",
    ),
    Algorithm(
        name="dppo_kl",
        advantage="group_mean",
        loss="dppo_kl",
        aggregation="token_mean",
        source="arXiv:2602.04879; advantage and aggregation as in the default",
    ),
    Algorithm(
        name="decoupled_ppo",
        advantage="grpo",
        loss="ppo_clip",
        aggregation="token_mean",
        correction=CorrectionConfig(weight="token", weight_max=5.0),
        source="AReaL arXiv:2505.24298; the ratio is against the proximal policy",
    ),
    Algorithm(
        name="icepop",
        advantage="grpo",
        loss="ppo_clip",
        aggregation="token_mean",
        options={"clip_high": 0.28},
        correction=CorrectionConfig(weight="token", weight_max=2.0, keep_low=0.5, keep_high=2.0),
        source="Ring-1T and GLM-5 technical reports",
    ),
    Algorithm(
        name="dis",
        advantage="grpo",
        loss="dis",
        aggregation="token_mean",
        source="GLM-5 technical report, agentic training",
    ),
    Algorithm(
        name="mimo",
        advantage="group_mean",
        loss="dis",
        aggregation="prompt_mean",
        options={
            "low_positive": 0.2,
            "high_positive": 5.0,
            "low_negative": 0.2,
            "high_negative": 5.0,
        },
        source="MiMo-V2.6 arXiv:2610.11959, its bounds at their start",
    ),
    Algorithm(
        name="mai",
        advantage="group_mean",
        loss="ppo_clip",
        aggregation="token_mean",
        options={"clip_low": 0.6, "clip_high": 1.5, "dual_clip": 50.0},
        source="MAI-Thinking-1 report: ratios in [.4, 2.5], never beyond 50; its k at 0",
    ),
    Algorithm(
        name="deepseek",
        advantage="grpo",
        loss="sequence_mask",
        aggregation="seq_mean_token_mean",
        source="DeepSeek-V3.2 technical report; no KL term",
    ),
    Algorithm(
        name="kimi_pmd",
        advantage="group_mean",
        loss="kimi_sequence",
        aggregation="seq_mean_token_sum",
        source="Kimi K1.5 arXiv:2501.12599",
    ),
    Algorithm(
        name="kimi_token",
        advantage="group_mean",
        loss="kimi_token",
        aggregation="token_mean",
        source="Kimi K2.5 arXiv:2602.02276",
    ),
    Algorithm(
        name="prime_rl",
        advantage="group_mean",
        loss="prime_rl",
        aggregation="token_mean",
        source="PrimeIntellect-ai/prime-rl, August 2026",
    ),
    Algorithm(
        name="rloo",
        advantage="rloo",
        loss="reinforce",
        aggregation="seq_mean_token_sum",
        source="arXiv:2402.14740; on-policy, no ratio; no KL in the reward",
    ),
    Algorithm(
        name="reinforce",
        advantage="reinforce",
        loss="reinforce",
        aggregation="token_mean",
        source="Williams 1992, Machine Learning 8",
    ),
    Algorithm(
        name="reinforce_pp",
        advantage="reinforce_pp",
        loss="ppo_clip",
        aggregation="token_mean",
        source="arXiv:2501.03262; no KL in the reward",
    ),
    Algorithm(
        name="reinforce_pp_baseline",
        advantage="reinforce_pp_baseline",
        loss="ppo_clip",
        aggregation="token_mean",
        source="arXiv:2501.03262, the variant with a group baseline",
    ),
    Algorithm(
        name="ppo",
        advantage="gae",
        loss="ppo_clip",
        aggregation="token_mean",
        source="arXiv:1707.06347 with GAE arXiv:1506.02438 that skips observations; its critic is "
        "learn.critic",
    ),
    Algorithm(
        name="maxrl",
        advantage="maxrl",
        loss="cispo",
        aggregation="token_mean",
        source="estimator of arXiv:2602.02710; loss and aggregation as in the default",
    ),
    Algorithm(
        name="opo",
        advantage="opo",
        loss="reinforce",
        aggregation="token_mean",
        source="arXiv:2505.23585; exactly on-policy",
    ),
    Algorithm(
        name="gdpo",
        advantage="gdpo",
        loss="ppo_clip",
        aggregation="seq_mean_token_mean",
        source="arXiv:2601.05242; no KL term. The rewards are named in learn.reward_weights",
    ),
    Algorithm(
        name="scale_rl",
        advantage="batch_std",
        loss="cispo",
        aggregation="prompt_mean",
        options={"drop_low": 1.0, "drop_high": 1.0},
        source="arXiv:2510.13786; ratio_max 5, of 4 to 8 that it found alike",
    ),
    Algorithm(
        name="gigpo",
        advantage="group_mean",
        loss="ppo_clip",
        aggregation="seq_mean_token_mean",
        credit=CreditConfig(turn_weight=1.0),
        source="arXiv:2505.10978, without deviations; no KL term",
    ),
    Algorithm(
        name="rao",
        advantage="group_mean",
        loss="cispo",
        aggregation="token_mean",
        credit=CreditConfig(agents="recursive"),
        source="credit of arXiv:2605.06639; loss and aggregation as in the default",
    ),
    Algorithm(
        name="sft",
        advantage="",
        loss="cross_entropy",
        aggregation="token_mean",
        source="maximum likelihood of demonstrations",
    ),
    Algorithm(
        name="distill",
        advantage="",
        loss="prime_rl",
        aggregation="token_mean",
        distils=True,
        source="the on-policy case of arXiv:2306.13649, reverse KL per token as a policy gradient "
        "with discount 0; loss as in prime-rl",
    ),
    Algorithm(
        name="distill_reward",
        advantage="group_mean",
        loss="prime_rl",
        aggregation="token_mean",
        distils=True,
        source="`distill`, its advantages added to those of the reward",
    ),
)
"""By name. A preset that differs in one number from another is a preset too: the numbers are the
point."""


def resolve(learn: LearnConfig, name: str = "", *, norm_tokens: int = 0) -> Algorithm:
    """The run's algorithm, its parts replaced as `learn` says; or another one, as it stands.

    Args:
        learn: `algorithm`, and what replaces parts of it.
        name: of another algorithm, whose rows the replacements do not touch.
        norm_tokens: L where `learn.norm_tokens` leaves it open.

    Raises:
        ConfigError: an unknown algorithm, advantage, loss, aggregation or option of the loss; a
            number under which the loss is no policy gradient; parts that do not go together.
    """
    wanted = name or learn.algorithm
    if wanted not in ALGORITHMS:
        key = "tasks.algorithm" if name else "learn.algorithm"
        raise ConfigError(
            f"unknown algorithm `{wanted}` in {key}", hint=did_you_mean(wanted, ALGORITHMS)
        )
    found = replace(ALGORITHMS[wanted], norm_tokens=learn.norm_tokens or norm_tokens)
    if not name:
        # Another loss has other options.
        loss = found.loss if learn.loss is None else learn.loss
        kept = found.options if loss == found.loss else {}
        found = replace(
            found,
            advantage=found.advantage if learn.advantage is None else learn.advantage,
            loss=loss,
            aggregation=found.aggregation if learn.aggregation is None else learn.aggregation,
            options={**kept, **learn.loss_options},
            correction=found.correction if learn.correction is None else learn.correction,
            credit=found.credit if learn.credit is None else learn.credit,
        )
        if found.credit.agents == "recursive" and learn.advantage is not None:
            raise ConfigError(
                f"`learn.advantage` is `{learn.advantage}`, but with learn.credit.agents=recursive "
                "each agent has an advantage of its own, and nothing reads it",
                hint="leave learn.advantage out",
            )
    _check(found)
    return found


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


def describe(algorithm: Algorithm) -> dict[str, Any]:
    """All that it is, defaults of the loss included, as JSON values."""
    on = {k: v for k, v in asdict(algorithm.correction).items() if v != getattr(NONE, k)}
    credit = settings_of(algorithm.credit)
    out: dict[str, Any] = {
        "name": algorithm.name,
        "advantage": "recursive" if algorithm.credit.agents == "recursive" else algorithm.advantage,
        "loss": algorithm.loss,
        "loss_options": {**loss_options(algorithm.loss), **algorithm.options},
        "aggregation": algorithm.aggregation,
        "correction": on,
    }
    if algorithm.distils:
        out["teacher"] = True
    if credit:
        out["credit"] = credit
    if algorithm.aggregation == "seq_mean_token_sum_norm":
        out["norm_tokens"] = algorithm.norm_tokens
    return out


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


def loss_options(loss: str) -> dict[str, float]:
    """The numbers that a loss takes, with their defaults."""
    parameters = inspect.signature(LOSSES[loss]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _check(algorithm: Algorithm) -> None:
    for what, name, known in (
        ("advantage", algorithm.advantage, ESTIMATORS),
        ("loss", algorithm.loss, LOSSES),
    ):
        open_ = algorithm.term == "ce" or algorithm.distils
        if not name and what == "advantage" and not open_:
            raise ConfigError(
                f"algorithm `{algorithm.name}` with loss `{algorithm.loss}` needs an advantage, "
                "and has none",
                hint=f"{setting('learn.advantage=group_mean')}, or another algorithm",
            )
        if name not in known and not (what == "advantage" and not name and open_):
            raise ConfigError(
                f"algorithm `{algorithm.name}`: unknown {what} `{name}`",
                hint=did_you_mean(name, known),
            )
    check_aggregation(algorithm.aggregation, algorithm.norm_tokens)
    check_credit(algorithm.credit, algorithm.advantage, algorithm.name)
    taken = loss_options(algorithm.loss)
    for option in algorithm.options:
        if option not in taken:
            raise ConfigError(
                f"loss `{algorithm.loss}` has no option `{option}` (set by learn.loss_options)",
                hint=did_you_mean(option, taken) if taken else "it has none at all",
            )
    _check_rewards(algorithm)
    _check_gradient(algorithm)


def _check_rewards(algorithm: Algorithm) -> None:
    """Raises ConfigError: parts that read rewards, or ratios, where nothing else of it does."""
    reads = f"algorithm `{algorithm.name}`: "
    if algorithm.term == "ce":
        if algorithm.advantage or algorithm.distils:
            raise ConfigError(
                reads + "loss `cross_entropy` makes everything that it sees more probable, "
                "whatever its reward, and reads no advantage",
                hint=f"{setting('learn.algorithm=sft')} for demonstrations, good rollouts of an "
                "earlier run (`rollouts:RUN_DIR`) among them, or a loss for rollouts: "
                f"{setting('learn.loss=cispo')}",
            )
        for name, given in (
            ("correction", algorithm.correction != NONE),
            ("credit", algorithm.credit != ALIKE),
        ):
            if given:
                raise ConfigError(
                    f"{reads}learn.{name} is of rollouts, and it learns from demonstrations",
                    hint=f"leave learn.{name} out",
                )
    root = replace(ALIKE, agents="root")
    if not algorithm.advantage and algorithm.credit not in (ALIKE, root):
        raise ConfigError(
            f"{reads}learn.credit shares out what a reward gave, and it looks at none",
            hint=f"{setting('learn.algorithm=distill_reward')}, or leave learn.credit out",
        )


def _check_gradient(algorithm: Algorithm) -> None:
    """Raises ConfigError: with its options the loss has not the gradient -A of log pi where the
    policy is the one that sampled, or pushes tokens without an advantage away from there."""
    if algorithm.term == "ce":
        return
    logp, moved = torch.full((4,), -1.0, requires_grad=True), torch.tensor([0.0, 0.0, 0.1, -0.1])
    advantage, true = torch.tensor([1.0, -1.0, 0.0, 0.0]), torch.ones(4, dtype=torch.bool)
    probe = Tokens(
        logp=logp,
        behaviour_logp=logp.detach() - moved,
        advantage=advantage,
        trained=true,
        weight=torch.ones(4),
        sequence=torch.arange(4),
    )
    loss = LOSSES[algorithm.loss](probe, **algorithm.options).loss
    (gradient,) = torch.autograd.grad(loss, logp)
    if torch.allclose(gradient[:2], -advantage[:2], atol=1e-4) and (gradient * moved >= 0).all():
        return
    given = ", ".join(f"{name} {value:g}" for name, value in algorithm.options.items())
    up, down, *_ = gradient.tolist()
    wrong = "takes tokens without an advantage further away from where they were sampled"
    if not math.isclose(up, -1, abs_tol=1e-4) or not math.isclose(down, 1, abs_tol=1e-4):
        wrong = (
            f"has a gradient of {up:.3g} where the advantage is 1 and of {down:.3g} where it is "
            "-1, by the very policy that sampled; expected -1 and 1"
        )
    raise ConfigError(
        f"loss `{algorithm.loss}` with {given} {wrong}",
        hint="its defaults are "
        + ", ".join(f"{k} {v:g}" for k, v in loss_options(algorithm.loss).items()),
    )
