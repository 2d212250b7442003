"""One algorithm from its name and the parts that a config replaces.

Guarantees: names are known, options are the loss's own, and with them its gradient is a policy
gradient where the policy is the one that sampled; parts go together.

Takes: LearnConfig. Gives: an Algorithm.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import asdict, replace
from typing import Any

import torch

from treadle.advantage import ESTIMATORS
from treadle.advantage.credit import check_credit, settings_of
from treadle.algorithms.presets import ALGORITHMS, ALIKE, NONE, Algorithm
from treadle.batch.weights import check_aggregation
from treadle.config import LearnConfig
from treadle.errors import ConfigError, did_you_mean, setting
from treadle.losses import LOSSES, Tokens


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
