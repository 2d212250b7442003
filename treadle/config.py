"""Run configuration: frozen dataclasses with units, one override path.

Guarantees: an unknown key, a wrong type or a contradiction is a ConfigError that names the key,
the value and the nearest known key; nothing is ignored. The resolved config round-trips
through JSON, so the store holds exactly what ran.

    RunConfig
    |-- model      ModelConfig       what is trained, LoRA or full
    |-- tasks      tuple[TasksConfig]  where problems come from, and in which ratio
    |-- rollout    RolloutConfig     group size, harness, limits, sampling
    |   `-- overlong   OverlongConfig   what an answer costs that comes near its limit
    |-- learn      LearnConfig       algorithm, optimiser, micro-batches
    |   |-- credit     CreditConfig    who of a rollout, and of a group, carries its advantage
    |   |-- entropy    EntropyConfig   what holds the entropy, and where
    |   |-- kl         KLConfig        what holds the policy near its reference
    |   |-- critic     CriticConfig    the value model of PPO
    |   `-- teacher    TeacherConfig   who is distilled
    |-- schedule   ScheduleConfig    eta, max_lag
    |-- eval       EvalConfig        held-out questions and samples
    `-- store      StoreConfig       checkpoints and retention

Takes: a recipe's RunConfig and `--set a.b=c` strings. Gives: a checked RunConfig.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from treadle.errors import ConfigError, did_you_mean, setting
from treadle.types import MIN_TEMPERATURE

T = TypeVar("T")

MAX_INT = 2**63 - 1
"""What the ledger and random generators hold."""

MAX_LEVELS = 32
"""Of JSON in one setting."""


def _typed(section: str) -> Callable[[type[T]], type[T]]:
    """Checks the type of every field when a config is made, before the class's own checks.

    Goes below `@dataclass`, which then calls it from the `__init__` that it makes.
    """

    def decorate(cls: type[T]) -> type[T]:
        own = cls.__dict__.get("__post_init__", lambda self: None)

        def __post_init__(self: Any) -> None:
            for name, kind in _hints(type(self)).items():
                key = f"{section}.{name}" if section else name
                object.__setattr__(self, name, _convert(kind, getattr(self, name), key))
            own(self)

        setattr(cls, "__post_init__", __post_init__)  # noqa: B010 - not a known attribute
        return cls

    return decorate


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("model.lora")
class LoraConfig:
    rank: int = 8
    """1..64 are tested; all linear layers except the head get an adapter."""
    alpha: float = 16.0
    """The update is scaled by alpha / rank."""

    def __post_init__(self) -> None:
        _require(1 <= self.rank <= 512, "model.lora.rank", self.rank, "between 1 and 512")
        _require(self.alpha > 0, "model.lora.alpha", self.alpha, "> 0")


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("model")
class ModelConfig:
    name: str = "smollm2-135m"
    """A known name (`treadle models`), a local Hugging Face directory, or a hub id."""
    lora: LoraConfig | None = field(default_factory=LoraConfig)
    """None trains every parameter."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of forward and backward; weights and updates are kept in float32.
    auto = bfloat16 where this machine runs it faster (`treadle doctor`)."""
    max_context: int = 2048
    """Tokens per sequence, prompt included; bounded by the model's own limit."""

    def __post_init__(self) -> None:
        _require(self.max_context >= 8, "model.max_context", self.max_context, ">= 8")


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("tasks.curriculum")
class CurriculumConfig:
    """Tasks are drawn in proportion to p (1 - p) of their latest pass rate p; see
    schedule/curriculum.py."""

    low: float = 0.05
    high: float = 0.8
    """A task whose pass rate is outside of low..high is drawn with weight `floor`."""
    retire: float = 0.9
    """A task that once passed at this rate or above never comes again."""
    floor: float = 0.01
    """As p (1 - p) is one; 0 = such tasks never come again."""


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("tasks")
class TasksConfig:
    source: str = ""
    """"jsonl:PATH" or "reasoning_gym:FAMILY"; of demonstrations, for an algorithm that learns from
    them (`sft`): "chat:PATH" or "rollouts:RUN_DIR"."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the source, e.g. a reasoning-gym family's difficulty; checked by the source."""
    system: str = ""
    """System message put before each task; empty = none."""
    ratio: float = 1.0
    """Share of the groups relative to the other task sets; 0 = evaluated and never trained on."""
    minimum: int = 0
    """Least groups of this task set in a step, whatever its ratio and however many of its groups
    are dropped; kept exactly while generation does not run ahead (schedule.eta=0)."""
    curriculum: CurriculumConfig | None = None
    """Draw its tasks by pass rate; None = in the set's own order. {} = with the defaults."""
    reward: str = "score"
    """"score" (the task set's strict score), "lenient", or "module:function"."""
    algorithm: str = ""
    """A name in treadle/algorithms/ for the rows of this task set, as it stands there; "" = the
    run's, which is `learn.algorithm` with what `learn` replaces of it."""

    def __post_init__(self) -> None:
        _require(self.ratio >= 0, "tasks.ratio", self.ratio, ">= 0")
        _require(self.minimum >= 0, "tasks.minimum", self.minimum, ">= 0")
        if self.demonstrates and (self.reward != "score" or self.ratio == 0):
            name = "ratio" if self.ratio == 0 else "reward"
            raise ConfigError(
                f"`tasks.{name}` is {_cut(repr(getattr(self, name)))}, but "
                f"`{_cut(self.source)}` holds demonstrations, which are trained on and never "
                "judged or evaluated",
                hint="leave it out",
            )
        if self.ratio == 0 and (self.minimum or self.curriculum is not None or self.algorithm):
            name = "minimum" if self.minimum else "algorithm" if self.algorithm else "curriculum"
            raise ConfigError(
                f"`tasks.{name}` is set for `{_cut(self.source)}`, which is never trained on: its "
                "ratio is 0",
                hint="leave it out, or give the task set a ratio",
            )
        if self.demonstrates and self.curriculum is not None:
            raise ConfigError(
                f"`tasks.curriculum` draws by pass rate, and `{_cut(self.source)}` holds "
                "demonstrations, which have none",
                hint="leave it out",
            )

    @property
    def demonstrates(self) -> bool:
        """The source holds demonstrations: they are learnt as they stand, and never evaluated."""
        return self.source.partition(":")[0] in ("chat", "rollouts")


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("rollout.overlong")
class OverlongConfig:
    """DAPO's soft penalty on long answers, in the reward that trains alone: nothing up to the
    buffer at the end of `rollout.max_new_tokens`, then linearly more; see docs/algorithms.md."""

    buffer_tokens: int | None = None
    """Tokens before `rollout.max_new_tokens` over which the penalty grows. null = a fifth of it."""
    penalty: float = 1.0
    """Reward units that a trajectory loses whose longest turn fills `rollout.max_new_tokens`."""

    def __post_init__(self) -> None:
        tokens = self.buffer_tokens
        _require(tokens is None or tokens >= 1, "rollout.overlong.buffer_tokens", tokens, ">= 1")
        _require(
            self.penalty > 0,
            "rollout.overlong.penalty",
            self.penalty,
            "> 0: it is taken off; leave rollout.overlong out for no penalty",
        )

    def buffer(self, max_new_tokens: int) -> int:
        """Tokens, with the default filled in."""
        return max(1, max_new_tokens // 5) if self.buffer_tokens is None else self.buffer_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("rollout")
class RolloutConfig:
    group_size: int = 8
    """Trajectories per task; the advantage is centred over them."""
    groups_per_step: int = 8
    """Groups that one optimiser step trains on."""
    harness: str = "single_turn"
    """"single_turn", "tool_loop", or "module:function": an agent that is called as
    function(task, base_url, api_key) and talks to the model at that address."""
    tools: tuple[str, ...] = ()
    """"module:function" each; typed signatures become JSON schemas."""
    max_new_tokens: int = 48
    """Per turn."""
    overlong: OverlongConfig | None = None
    """A penalty for coming near `max_new_tokens`; null = none, {} = with the defaults."""
    max_turns: int = 8
    temperature: float = 1.0
    time_limit_s: float = 300.0
    """Wall clock per trajectory, grading not included; then it is ABORTED."""
    reward_limit_s: float = 10.0
    """Wall clock per grading call, counted from the start of the work, not of the queue."""
    max_draws: int = 30
    """A step gives up after drawing max_draws x groups_per_step groups without filling."""

    def __post_init__(self) -> None:
        _require(self.group_size >= 1, "rollout.group_size", self.group_size, ">= 1")
        _require(self.groups_per_step >= 1, "rollout.groups_per_step", self.groups_per_step, ">= 1")
        _require(self.max_new_tokens >= 1, "rollout.max_new_tokens", self.max_new_tokens, ">= 1")
        _require(self.max_turns >= 1, "rollout.max_turns", self.max_turns, ">= 1")
        _require(
            self.harness in ("single_turn", "tool_loop") or ":" in self.harness,
            "rollout.harness",
            self.harness,
            "one of `single_turn`, `tool_loop`, or module:function",
        )
        _require(self.max_draws >= 1, "rollout.max_draws", self.max_draws, ">= 1")
        _require(self.time_limit_s > 0, "rollout.time_limit_s", self.time_limit_s, "> 0")
        _require(self.reward_limit_s > 0, "rollout.reward_limit_s", self.reward_limit_s, "> 0")
        _require(
            MIN_TEMPERATURE <= self.temperature < math.inf,
            "rollout.temperature",
            self.temperature,
            f"finite and >= {MIN_TEMPERATURE:g}: a greedy rollout has no behaviour distribution "
            "to learn from",
        )
        buffer = self.overlong.buffer(self.max_new_tokens) if self.overlong is not None else 0
        if buffer >= self.max_new_tokens:
            raise ConfigError(
                f"`rollout.overlong.buffer_tokens` is {buffer}, but a turn has "
                f"rollout.max_new_tokens = {self.max_new_tokens}: every answer would be punished "
                "for its length",
                hint=f"less than {self.max_new_tokens}; a fifth is usual, and what null takes",
            )


ENTROPY_METHODS: dict[str, dict[str, Any]] = {
    "repo_r": {"strength": 1e-3, "bounds": (1e-4, 0.05)},
    "repo_d": {"strength": 0.01},
    "adapo": {"bounds": (0.05, 1.0), "rate": 0.02},
    "mai": {"strength": 0.0, "bounds": (0.0, 2.5), "rate": 0.25},
    "bonus": {"strength": 0.0, "bounds": (0.0, 0.005), "rate": 1e-4},
    "sac": {"strength": 1e-3, "bounds": (1e-5, 0.05), "rate": 0.05},
    "clip_cov": {"share": 2e-4, "bounds": (1.0, 5.0)},
    "kl_cov": {"share": 2e-3, "strength": 1.0},
}
"""The settings that each method has, with their defaults; see docs/entropy.md."""

ENTROPY_OPEN_LOOP = ("repo_d", "clip_cov", "kl_cov")
"""Methods without a controller: they have no target."""


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("learn.entropy")
class EntropyConfig:
    """Which settings a method has, what they mean and their defaults: docs/entropy.md. None takes
    the method's default; a setting that it does not have is an error."""

    method: Literal["repo_r", "repo_d", "adapo", "mai", "bonus", "sac", "clip_cov", "kl_cov"] = (
        "repo_r"
    )
    target: Literal["initial"] | float | tuple[tuple[int, float], ...] | None = None
    """H* in nats per token: a number, a schedule [[step, nats], ...] (linear in between), or
    "initial", the entropy that the run measures first and the default."""
    strength: float | None = None
    """Where the controller starts, or the fixed strength of a method without one."""
    bounds: tuple[float, float] | None = None
    """Smallest and largest value of the controller (repo_r: of its size, clip_cov: of the
    covariance)."""
    rate: float | None = None
    """Of the controller, per step (sac: per nat and step)."""
    share: float | None = None
    """Of the step's tokens that are chosen."""
    alarm_steps: int = 20
    """Steps in a row at the end of the bounds, short of the target, that raise an alarm."""

    def __post_init__(self) -> None:
        settings = ENTROPY_METHODS[self.method]
        for name in ("strength", "bounds", "rate", "share"):
            if getattr(self, name) is not None and name not in settings:
                raise ConfigError(
                    f"`learn.entropy.{name}` is {getattr(self, name)}, but method `{self.method}` "
                    "has no such setting",
                    hint=f"it has {', '.join(settings)}; see docs/entropy.md",
                )
        if self.method in ENTROPY_OPEN_LOOP and self.target is not None:
            raise ConfigError(
                f"`learn.entropy.target` is {_cut(repr(self.target))}, but method `{self.method}` "
                "has no controller that could hold a target",
                hint="leave the target out, or take repo_r, adapo, mai, bonus or sac",
            )
        _check_target(self.target)
        low, high = self.setting("bounds") or (0.0, 1.0)
        positive = self.method in ("repo_r", "sac")
        _require(
            low < high and (low > 0 if positive else low >= 0),
            "learn.entropy.bounds",
            self.bounds,
            f"rising and {'> 0' if positive else '>= 0'}",
        )
        strength = self.setting("strength")
        if self.method == "repo_r":
            inside = strength == 0 or low <= abs(strength) <= high
        elif "bounds" in settings and "strength" in settings:
            inside = low <= strength <= high
        else:
            inside = strength is None or strength >= 0
        _require(inside, "learn.entropy.strength", strength, f"within the bounds {low}..{high}")
        rate, share = self.setting("rate"), self.setting("share")
        _require(rate is None or rate > 0, "learn.entropy.rate", rate, "> 0")
        _require(share is None or 0 < share <= 1, "learn.entropy.share", share, "in (0, 1]")
        _require(self.alarm_steps >= 1, "learn.entropy.alarm_steps", self.alarm_steps, ">= 1")

    def setting(self, name: str) -> Any:
        """The value of a setting of this method: as set, else the method's default, else None."""
        found = getattr(self, name)
        return ENTROPY_METHODS[self.method].get(name) if found is None else found


def _check_target(target: object) -> None:
    if isinstance(target, tuple):
        steps = [step for step, _ in target]
        _require(
            len(target) > 0 and steps == sorted(set(steps)) and steps[0] >= 0,
            "learn.entropy.target",
            target,
            "[[step, nats], ...] with steps >= 0 that rise",
        )
        _require(all(nats >= 0 for _, nats in target), "learn.entropy.target", target, ">= 0 nats")
    elif isinstance(target, int | float):
        _require(target >= 0, "learn.entropy.target", target, ">= 0 nats")


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("learn.kl")
class KLConfig:
    """A pull towards the reference policy, which the run starts from; see docs/entropy.md."""

    term: Literal["k1_in_reward", "k2_in_loss", "k3_in_loss", "k3+_in_loss"] = "k3+_in_loss"
    """The estimator and where it acts. k1 in a loss has no gradient on average, so it is not
    offered; k3 in the loss is exact with its importance ratio, which is always applied; k3+ has
    the value of k3 and the gradient of k2."""
    beta: float = 1e-3
    """Strength, in units of the advantage per nat; the start of an adaptive one."""
    discount: float = 1.0
    """k1_in_reward: of the later tokens' penalties in a token's return; 0 = its own only."""
    target_nats: float = 0.0
    """KL per row that an adaptive beta holds; 0 = beta is fixed."""
    horizon_rows: int = 10_000
    """Rows over which an adaptive beta moves by a factor of at most e^0.2."""
    bounds: tuple[float, float] = (1e-6, 10.0)
    """Of an adaptive beta."""

    def __post_init__(self) -> None:
        _require(self.beta > 0, "learn.kl.beta", self.beta, "> 0; leave learn.kl out for no KL")
        _require(0 <= self.discount <= 1, "learn.kl.discount", self.discount, "in [0, 1]")
        _require(self.target_nats >= 0, "learn.kl.target_nats", self.target_nats, ">= 0")
        _require(self.horizon_rows >= 1, "learn.kl.horizon_rows", self.horizon_rows, ">= 1")
        low, high = self.bounds
        _require(0 < low < high, "learn.kl.bounds", self.bounds, "rising and > 0")
        if self.target_nats:
            _require(low <= self.beta <= high, "learn.kl.beta", self.beta, "within learn.kl.bounds")
        elif (self.horizon_rows, self.bounds) != (10_000, (1e-6, 10.0)):
            raise ConfigError(
                "`learn.kl.horizon_rows` and `learn.kl.bounds` belong to an adaptive beta, but "
                "`learn.kl.target_nats` is 0",
                hint="set learn.kl.target_nats, the KL per row to hold, or leave them out",
            )
        if self.discount != 1.0 and self.term != "k1_in_reward":
            raise ConfigError(
                f"`learn.kl.discount` is {self.discount}, but `{self.term}` has no returns",
                hint=f"{setting('learn.kl.term=k1_in_reward')}, or leave the discount out",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("learn.teacher")
class TeacherConfig:
    """Who is distilled by an algorithm that asks a teacher (`distill`, `distill_reward`): each
    sampled token's advantage gets coef x (log pi_teacher - log mu). The tokenizer must be the
    model's own; see docs/sft-and-distillation.md."""

    source: str = ""
    """A run directory (its newest checkpoint), a known name, a directory or a hub id; "" = the
    model that the run starts from."""
    system: str = ""
    """System message that the teacher alone is shown, in place of the task's own; "" = the teacher
    sees what the model saw."""
    coef: float = 1.0
    """Advantage per nat."""

    def __post_init__(self) -> None:
        _require(self.coef > 0, "learn.teacher.coef", self.coef, "> 0")
        if not self.source and not self.system:
            raise ConfigError(
                "`learn.teacher` has neither a source nor a system message: the teacher would be "
                "the model that the run starts from, and there would be nothing to learn",
                hint=f"{setting('learn.teacher.source=runs/first-run')}, or a system message that "
                "makes the model better",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("learn.critic")
class CriticConfig:
    """The value model of PPO, for the advantage `gae`; see docs/advantages.md."""

    kind: Literal["head", "model"] = "head"
    """head = a linear layer on the policy's last hidden states; model = the same layer on a model
    of its own, which starts as the run's model and is trained as `model.lora` says."""
    gamma: float = 1.0
    """Discount per trained token."""
    lam: float = 1.0
    """Lambda of GAE: 1 = return minus value, right for short answers of one turn; .95 to .98 for
    long ones, once the values mean something (`warmup_steps`)."""
    value_clip: float = 0.2
    """How far a value may move in one step, in reward units; 0 = off. It acts from the second of
    the `steps` on: before the first, nothing has moved."""
    coef: float = 0.5
    """What the value loss is multiplied by: against the policy's loss where `trunk_gradient` adds
    both, else against `learn.grad_clip` alone, as AdamW does not see a scale."""
    lr_scale: float = 10.0
    """The critic's learning rate over `learn.lr`; constant from the start."""
    warmup_steps: int = 0
    """First steps of the run that train the critic alone."""
    steps: int = 2
    """Updates of the critic per step, each over all rows."""
    trunk_gradient: bool = False
    """head: the value loss trains the policy's weights too. Off: the policy's task is not mixed
    with another, and the hidden states are computed once for all `steps`."""

    def __post_init__(self) -> None:
        _require(0 <= self.gamma <= 1, "learn.critic.gamma", self.gamma, "in [0, 1]")
        _require(0 <= self.lam <= 1, "learn.critic.lam", self.lam, "in [0, 1]")
        _require(self.value_clip >= 0, "learn.critic.value_clip", self.value_clip, ">= 0")
        _require(self.coef > 0, "learn.critic.coef", self.coef, "> 0")
        _require(self.lr_scale > 0, "learn.critic.lr_scale", self.lr_scale, "> 0")
        _require(self.warmup_steps >= 0, "learn.critic.warmup_steps", self.warmup_steps, ">= 0")
        _require(self.steps >= 1, "learn.critic.steps", self.steps, ">= 1")
        if self.trunk_gradient and self.kind == "model":
            raise ConfigError(
                "`learn.critic.trunk_gradient` is true, but a critic of kind `model` shares no "
                "trained weight with the policy",
                hint="leave it out: a model of its own is trained anyway",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("learn.correction")
class CorrectionConfig:
    """What is done where sampler and trainer disagree about the same weights; the default does
    nothing. rho = the trainer's probability of a token, by the weights that sampled it, over the
    sampler's; 0 switches a bound off. See losses/correction.py."""

    weight: Literal["none", "token", "sequence"] = "none"
    """Multiply a token's loss by its rho (TIS), or by the product of its row's (sequence TIS)."""
    weight_max: float = 2.0
    """Cap of that weight; for sequence 5 is usual."""
    keep_low: float = 0.0
    keep_high: float = 0.0
    """Tokens whose rho is outside contribute nothing (MIS; with a weight, IcePop)."""
    mean_low: float = 0.0
    mean_high: float = 0.0
    """Rows whose geometric mean of rho is outside leave the step."""
    k3_max: float = 0.0
    """Nats; rows whose mean rho - 1 - log rho is above leave the step."""
    veto_low: float = 0.0
    veto_high: float = 0.0
    """Rows with one token whose rho is outside leave the step."""

    def __post_init__(self) -> None:
        _require(self.weight_max > 0, "learn.correction.weight_max", self.weight_max, "> 0")
        for name in ("keep", "mean", "veto"):
            low, high = getattr(self, f"{name}_low"), getattr(self, f"{name}_high")
            key = f"learn.correction.{name}_low"
            _require(0 <= low <= 1, key, low, "between 0 and 1: 1 is agreement")
            key = f"learn.correction.{name}_high"
            _require(high == 0 or high >= 1, key, high, "0 or >= 1: 1 is agreement")
        _require(self.k3_max >= 0, "learn.correction.k3_max", self.k3_max, ">= 0")
        if self.weight == "none" and self.weight_max != 2.0:
            raise ConfigError(
                f"`learn.correction.weight_max` is {self.weight_max:g}, but nothing reads it",
                hint=f"{setting('learn.correction.weight=token')}, or leave it out",
            )

    @property
    def reweighs(self) -> bool:
        """Some tokens weigh more or less, or nothing."""
        return self.weight != "none" or self.keep_low > 0 or self.keep_high > 0

    @property
    def rejects(self) -> bool:
        """Some rows leave the step: that takes a forward of its own, before the step is weighed."""
        bounds = (self.mean_low, self.mean_high, self.k3_max, self.veto_low, self.veto_high)
        return any(bound > 0 for bound in bounds)


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("learn.credit")
class CreditConfig:
    """Who carries the advantage of a rollout: its agents, turns and tokens, and its peers in the
    group. The default gives it to all tokens alike; see docs/advantages.md. A number that belongs
    to a way that is off is an error."""

    agents: Literal["all", "root", "recursive"] = "all"
    """root = tokens of sub-agents are not trained; recursive = each agent is paid for its own
    success, the reward's part `agent/0.2`, and a share of its children's, in place of
    `learn.advantage`."""
    agent_share: float | None = None
    """recursive: of the children's mean success. null = 0.4."""
    turn_weight: float = 0.0
    """Of the advantage of a turn among those of its group that answered the same observation
    (GiGPO); 0 = off, 1 is usual."""
    turn_gamma: float | None = None
    """Discount of a turn's return, per turn. null = 0.95."""
    quality: str = ""
    """The part of the reward, in (0, 1] for a rollout that passes and 0 for one that does not, by
    which passing rollouts of a group share their advantage (GAR); "" = off."""
    quality_cap: float | None = None
    """Largest factor by which a passing rollout's advantage grows. null = 2."""
    span_blame: float = 0.0
    """Read the spans that a reward returns as `flagged`: they are not trained where the advantage
    is above 0, and weigh this much more where it is below; 0 = off, 2 is usual."""

    def __post_init__(self) -> None:
        _require(self.turn_weight >= 0, "learn.credit.turn_weight", self.turn_weight, ">= 0")
        ok = self.span_blame == 0 or self.span_blame >= 1
        _require(ok, "learn.credit.span_blame", self.span_blame, "0, or >= 1")
        for name, value, on, way in (
            ("agent_share", self.agent_share, self.agents == "recursive", "agents=recursive"),
            ("turn_gamma", self.turn_gamma, self.turn_weight > 0, "turn_weight=1"),
            ("quality_cap", self.quality_cap, bool(self.quality), "quality=PART"),
        ):
            if value is None:
                continue
            if not on:
                raise ConfigError(
                    f"`learn.credit.{name}` is {value}, but nothing reads it",
                    hint=f"{setting(f'learn.credit.{way}')}, or leave it out",
                )
            low, high = (1, sys.float_info.max) if name == "quality_cap" else (0, 1)
            rule = ">= 1" if name == "quality_cap" else "in [0, 1]"
            _require(low <= value <= high, f"learn.credit.{name}", value, rule)


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("learn")
class LearnConfig:
    algorithm: str = "cispo"
    """A name in treadle/algorithms/: an advantage, a loss, an aggregation and a correction."""
    advantage: str | None = None
    """The estimator; null = the algorithm's. So for the next five."""
    loss: str | None = None
    aggregation: str | None = None
    """What a token weighs in the loss of its step: see batch/weights.py."""
    loss_options: dict[str, float] = field(default_factory=dict)
    """Numbers of the loss, by the names of its arguments; they replace the algorithm's."""
    correction: CorrectionConfig | None = None
    """Of what sampler and trainer disagree on; {} = none, whatever the algorithm has."""
    credit: CreditConfig | None = None
    """Who carries an advantage; null = as the algorithm has it, {} = all tokens alike."""
    reward_weights: dict[str, float] = field(default_factory=dict)
    """Of the named parts of a reward, for the advantage `gdpo`, which compares each on its own."""
    norm_tokens: int = 0
    """The fixed length that `seq_mean_token_sum_norm` divides by; 0 = rollout.max_new_tokens."""
    lr: float = 3e-4
    """Peak learning rate. LoRA wants about 10x the rate of full fine-tuning."""
    warmup_steps: int = 0
    """Linear from lr / warmup_steps; then constant."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Global norm; 0 = off."""
    micro_tokens: int = 2048
    """Tokens of one forward and backward, shared prefixes counted once: bounds memory."""
    entropy: EntropyConfig | None = None
    """What holds the entropy; None = it goes where the loss takes it."""
    kl: KLConfig | None = None
    """A pull towards the reference policy; None = there is no reference."""
    critic: CriticConfig | None = None
    """The value model that the advantage `gae` (algorithm `ppo`) needs; {} = all its defaults."""
    teacher: TeacherConfig | None = None
    """Who is distilled; needed by the algorithms that ask a teacher, and by them alone."""
    zero_variance: Literal["drop", "keep"] = "drop"
    """drop = groups whose rewards are all equal are replaced by fresh ones before the step."""
    spread_keep: float = 0.0
    """Train only the groups of widest reward spread that together have this share of the summed
    deviation of their task set in the step; 0 = all, 0.9 is usual. Needs rewards to be compared."""
    collapse_every: int = 10
    """Steps between measurements of how much outputs depend on their prompts (`collapse/`);
    0 = never. See docs/entropy.md."""
    collapse_pairs: int = 8
    """Prompts of such a measurement: it scores the square of it, one output of each under every
    one; 4 to 64."""
    parity_stop: float = 0.0
    """Mean |trainer - sampler logprob| in nats at step 0 that stops the run.
    0 = the bound of the compute dtype in train/parity.py."""
    mismatch_share: float | None = None
    """Share of the groups of older weights whose mismatch is measured, apart from staleness, by
    scoring them with the weights that sampled them; 0 = none. null = 1/8 with LoRA, and 0 in full
    fine-tuning, where each of schedule.max_lag versions is a copy of the model."""
    max_nan_steps: int = 3
    """Consecutive non-finite steps that end the run."""

    def __post_init__(self) -> None:
        _require(self.lr > 0, "learn.lr", self.lr, "> 0")
        _require(self.norm_tokens >= 0, "learn.norm_tokens", self.norm_tokens, ">= 0")
        _require(self.warmup_steps >= 0, "learn.warmup_steps", self.warmup_steps, ">= 0")
        _require(self.grad_clip >= 0, "learn.grad_clip", self.grad_clip, ">= 0")
        _require(0 <= self.spread_keep <= 1, "learn.spread_keep", self.spread_keep, "in [0, 1]")
        _require(self.micro_tokens >= 16, "learn.micro_tokens", self.micro_tokens, ">= 16")
        _require(self.max_nan_steps >= 1, "learn.max_nan_steps", self.max_nan_steps, ">= 1")
        _require(self.parity_stop >= 0, "learn.parity_stop", self.parity_stop, ">= 0")
        share = self.mismatch_share
        _require(share is None or 0 <= share <= 1, "learn.mismatch_share", share, "in [0, 1]")
        _require(self.collapse_every >= 0, "learn.collapse_every", self.collapse_every, ">= 0")
        pairs = self.collapse_pairs
        _require(4 <= pairs <= 64, "learn.collapse_pairs", pairs, "between 4 and 64")
        _require(self.weight_decay >= 0, "learn.weight_decay", self.weight_decay, ">= 0")
        for part, weight in self.reward_weights.items():
            _require(weight != 0, f"learn.reward_weights.{_cut(part)}", weight, "not 0")
        _require(all(0 <= b < 1 for b in self.betas), "learn.betas", self.betas, "in [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("schedule")
class ScheduleConfig:
    eta: int = 0
    """Steps that generation may run ahead of training: 0 = synchronous."""
    max_lag: int = 0
    """Largest lag of a trained group, in versions; >= eta."""

    def __post_init__(self) -> None:
        _require(self.eta >= 0, "schedule.eta", self.eta, ">= 0")
        _require(self.max_lag >= self.eta, "schedule.max_lag", self.max_lag, f">= eta = {self.eta}")


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("eval")
class EvalConfig:
    questions: int = 64
    """Distinct held-out questions per task set; 0 = no evals."""
    samples: int = 4
    """Samples per question, at the rollout's temperature."""
    split: str = "val"
    every: int = 0
    """Steps between evals during the run; 0 = before and after only."""

    def __post_init__(self) -> None:
        _require(self.questions >= 0, "eval.questions", self.questions, ">= 0")
        _require(self.samples >= 1, "eval.samples", self.samples, ">= 1")
        _require(self.every >= 0, "eval.every", self.every, ">= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("store")
class StoreConfig:
    checkpoint_every: int = 10
    """Steps; later steps are re-applied from their stored samples on resume."""
    keep_checkpoints: int = 2
    max_gib: float = 20.0
    """A run directory larger than this stops the run before the next checkpoint."""

    def __post_init__(self) -> None:
        _require(
            self.checkpoint_every >= 1, "store.checkpoint_every", self.checkpoint_every, ">= 1"
        )
        _require(
            self.keep_checkpoints >= 1, "store.keep_checkpoints", self.keep_checkpoints, ">= 1"
        )
        _require(self.max_gib > 0, "store.max_gib", self.max_gib, "> 0")


@dataclass(frozen=True, kw_only=True, slots=True)
@_typed("")
class RunConfig:
    name: str = "run"
    """The default run directory is runs/{name}."""
    steps: int = 30
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: tuple[TasksConfig, ...] = ()
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learn: LearnConfig = field(default_factory=LearnConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    store: StoreConfig = field(default_factory=StoreConfig)

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "steps", self.steps, ">= 1")
        _require(self.seed >= 0, "seed", self.seed, ">= 0")
        if self.rollout.harness != "tool_loop" and self.rollout.tools:
            agent = ":" in self.rollout.harness
            raise ConfigError(
                f"rollout.tools names {len(self.rollout.tools)} tools, but harness "
                f"`{self.rollout.harness}` " + ("brings its own" if agent else "never calls one"),
                hint=setting("rollout.harness=tool_loop"),
            )
        least, wanted = sum(t.minimum for t in self.tasks), self.rollout.groups_per_step
        if least > wanted:
            raise ConfigError(
                f"the minima of the task sets add up to {least} groups, and a step has {wanted}",
                hint=f"lower tasks.N.minimum, or {setting(f'rollout.groups_per_step={least}')}",
            )
        if least and len(self.tasks) == 1:
            raise ConfigError(
                "`tasks.0.minimum` is set, but there is no other task set to take its places",
                hint="leave it out",
            )


def _require(ok: bool, key: str, value: object, rule: str) -> None:
    if not ok:
        raise ConfigError(
            f"`{key}` must be {rule}, got {_cut(repr(value))}",
            hint=f"{setting(f'{key}=...')} changes it",
        )


# --------------------------------------------------------------------------- override


def override(
    config: RunConfig, assignments: Sequence[str], values: Mapping[str, Any] | None = None
) -> RunConfig:
    """Apply `values` by dotted key, then `a.b=c` strings in order.

    `tasks.0.ratio=2` reaches into a tuple. Strings are read as JSON where they parse as JSON,
    else as text. All is then checked against the field's type. Raises ConfigError naming key,
    value, and the nearest known key. Cross-field checks see all assignments at once, so their
    order does not matter.
    """
    tree = to_dict(config)
    for key, value in (values or {}).items():
        _assign(tree, key, to_dict(value), origin=key)
    for assignment in assignments:
        key, eq, text = assignment.partition("=")
        if not eq:
            raise ConfigError(
                f"`{_cut(assignment)}` is not an assignment",
                hint=f"write it as {setting('rollout.group_size=4')}",
            )
        _assign(tree, key.strip(), _parse(text, assignment), origin=f"`{_cut(assignment)}`")
    return from_dict(tree)


def _parse(text: str, assignment: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {"none": None, "None": None, "True": True, "False": False}.get(text, text)
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise ConfigError(
            f"the value of `{_cut(assignment)}` cannot be read: {_cut(str(error), 120)}",
            hint="a value is a number, text, or JSON of a few levels",
        ) from error
    if _deeper_than(MAX_LEVELS, value):
        raise ConfigError(
            f"the value of `{_cut(assignment)}` has more than {MAX_LEVELS} levels of JSON",
            hint="put what is nested so deep in a file of its own, and name the file",
        )
    return value


def _deeper_than(levels: int, value: Any) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(levels - 1, v) for v in inner)


def _cut(text: str, length: int = 80) -> str:
    """What a message repeats of what it was given."""
    return text if len(text) <= length else f"{text[:length]}..."


def _assign(tree: Any, key: str, value: Any, origin: str) -> None:
    """Put `value` where `key` says. Types are checked afterwards, by `from_dict`: here a part of
    the tree may be anything that an assignment before this one put there."""
    parts = key.split(".")
    node, cls = tree, typing.cast(Any, RunConfig)
    for depth, part in enumerate(parts):
        here = _cut(".".join(parts[: depth + 1]))
        fields = _fields(cls)
        place: Any = part
        if isinstance(node, list):
            places = {str(i): i for i in range(len(node))}
            if part not in places:
                raise ConfigError(
                    f"`{here}` is not an entry of a list of {len(node)} (set by {origin})",
                    hint=f"entries are numbered 0 to {len(node) - 1}"
                    if node
                    else "give the list as a whole, as JSON",
                )
            place, cls = places[part], _element(cls)
        elif not isinstance(node, dict):
            above = _cut(".".join(parts[:depth]))
            raise ConfigError(
                f"`{above}` is {_cut(repr(node))} and has no part `{_cut(part)}` (set by {origin})",
                hint=f"{setting(f'{above}=...')} sets it as a whole",
            )
        elif fields is not None:
            if part not in fields:
                raise ConfigError(
                    f"unknown config key `{here}` (set by {origin})",
                    hint=_suggest(part, ".".join(parts[:depth]), fields),
                )
            cls = fields[part]
        if depth == len(parts) - 1:
            node[place] = value
            return
        if isinstance(node, dict) and node.get(part) is None:
            node[part] = {}  # a section that was null, or an option that was not there
        node = node[place]


def _element(cls: Any) -> Any:
    args = typing.get_args(cls)
    return args[0] if args else Any


def _fields(cls: Any) -> dict[str, Any] | None:
    for option in _options(cls):
        if dataclasses.is_dataclass(option):
            return typing.get_type_hints(option)
    return None


def _options(cls: Any) -> tuple[Any, ...]:
    if typing.get_origin(cls) in (typing.Union, types.UnionType):
        return typing.get_args(cls)
    return (cls,)


def _suggest(part: str, section: str, fields: dict[str, Any]) -> str:
    """The nearest key here, or the section where this very key lives."""
    part = _cut(part)
    elsewhere = [k for k in all_keys() if k.rsplit(".", 1)[-1] == part]
    if elsewhere:
        return "did you mean " + " or ".join(f"`{k}`" for k in elsewhere) + "?"
    prefix = f"{section}." if section else ""
    return did_you_mean(prefix + part, {prefix + f for f in fields} | set(all_keys()))


def all_keys() -> list[str]:
    """Every dotted key of a RunConfig; lists are shown with index 0."""

    def walk(cls: Any, prefix: str) -> list[str]:
        out: list[str] = []
        for name, kind in typing.get_type_hints(cls).items():
            key = f"{prefix}{name}"
            out.append(key)
            inner, suffix = kind, ""
            if typing.get_origin(kind) is tuple:
                inner, suffix = _element(kind), ".0"
            for option in _options(inner):
                if dataclasses.is_dataclass(option):
                    out += walk(option, f"{key}{suffix}.")
        return out

    return walk(RunConfig, "")


# --------------------------------------------------------------------------- JSON


def to_dict(config: Any) -> Any:
    """Plain JSON values; tuples become lists."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, tuple | list):
        return [to_dict(v) for v in config]
    if isinstance(config, dict):
        return {k: to_dict(v) for k, v in config.items()}
    return config


def differences(a: Any, b: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, value in `a`, value in `b`) wherever two trees of JSON values differ."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = sorted({*a, *b})
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{key}{k}.")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [d for i in range(len(a)) for d in differences(a[i], b[i], f"{key}{i}.")]
    return [] if a == b else [(key.rstrip("."), a, b)]


def from_dict(tree: dict[str, Any]) -> RunConfig:
    """The inverse of `to_dict`; missing keys take their defaults, unknown ones raise."""
    return _build(RunConfig, tree, "")


def _build(cls: type[T], tree: Any, key: str) -> T:
    hints = _hints(cls)
    if not isinstance(tree, dict):
        raise ConfigError(
            f"`{key}` must be a section with keys, got {_cut(repr(tree))}",
            hint=f"set its keys one by one, as {key}.KEY",
        )
    for name in tree:
        if name not in hints:
            where = f"{key}.{name}" if key else name
            raise ConfigError(
                f"unknown config key `{_cut(where)}`", hint=_suggest(name, key, hints)
            )
    values = {
        name: _convert(hints[name], value, f"{key}.{name}" if key else name)
        for name, value in tree.items()
    }
    return cls(**values)


def _convert(kind: Any, value: Any, key: str) -> Any:
    """Check `value` against a field's type; ints pass as floats, lists as tuples."""
    for option in _options(kind):
        origin = typing.get_origin(option)
        if option is Any or (option is type(None) and value is None):
            return value
        if dataclasses.is_dataclass(option) and isinstance(value, typing.cast(type, option)):
            return value
        if dataclasses.is_dataclass(option) and isinstance(value, dict):
            return _build(typing.cast(type, option), value, key)
        if origin is Literal and value in typing.get_args(option):
            return value
        if origin is tuple and isinstance(value, list | tuple):
            args = typing.get_args(option)
            if len(args) == 2 and args[1] is Ellipsis:
                return tuple(_convert(args[0], v, f"{key}.{i}") for i, v in enumerate(value))
            if len(args) == len(value):
                pairs = zip(args, value, strict=True)
                return tuple(_convert(a, v, f"{key}.{i}") for i, (a, v) in enumerate(pairs))
        if origin is dict and isinstance(value, dict):
            inner = typing.get_args(option)[1:] or (Any,)
            return {k: _convert(inner[0], v, f"{key}.{_cut(str(k))}") for k, v in value.items()}
        if option is float and isinstance(value, int | float) and not isinstance(value, bool):
            _require(abs(value) <= sys.float_info.max, key, value, "finite")  # False for NaN
            return float(value)
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            _require(abs(value) <= MAX_INT, key, value, f"between -{MAX_INT} and {MAX_INT}")
            return value
        if option in (str, bool) and isinstance(value, option):
            return value
    raise ConfigError(
        f"`{key}` must be {_describe(kind)}, got {_cut(repr(value))}",
        hint=_unquoted(kind, value, key) or f"{setting(f'{key}=...')} sets it",
    )


def _unquoted(kind: Any, value: Any, key: str) -> str:
    """A hint where a text holds what is wanted."""
    if not isinstance(value, str):
        return ""
    with contextlib.suppress(ConfigError):
        meant = _parse(value, value)
        if not isinstance(meant, str):
            _convert(kind, meant, key)
            return f"without the quotes: {value}"
    return ""


_TYPE_NAMES = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def _describe(kind: Any) -> str:
    names = []
    for option in _options(kind):
        if typing.get_origin(option) is Literal:
            names.append("one of " + ", ".join(f"`{v}`" for v in typing.get_args(option)))
        elif dataclasses.is_dataclass(option):
            names.append("a section")
        elif option is type(None):
            names.append("null")
        elif typing.get_origin(option) is tuple:
            names.append("a list")
        else:
            names.append(_TYPE_NAMES.get(option, str(option)))
    return " or ".join(names)
