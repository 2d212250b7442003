"""Credit as a run has chosen it: from the advantages of rollouts to those of tokens.

Guarantees: the steps run in one order (peers, turns, agents, spans), whatever is on; the default
changes nothing and costs nothing; what a grader did not say changes nothing: a group with a rollout
that has no quality keeps its advantages, one without rewards of steps has its outcome for them.

Takes: Groups, advantages, a CreditConfig. Gives: advantages, and what credit did as metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from treadle.advantage.credit_agents import SHARE, recursive, root_only
from treadle.advantage.credit_peers import CAP, Verdict, peer_credit
from treadle.advantage.credit_spans import span_credit
from treadle.advantage.credit_turns import GAMMA, turn_credit, turns
from treadle.advantage.estimate import ESTIMATORS
from treadle.advantage.tokens import Advantage
from treadle.config import CreditConfig
from treadle.errors import ConfigError, ContractError, setting
from treadle.types import Group

_DEFAULTS = {"agent_share": SHARE, "turn_gamma": GAMMA, "quality_cap": CAP}


def credited(
    groups: Sequence[Group], values: Mapping[str, Advantage], credit: CreditConfig
) -> dict[str, Advantage]:
    """The advantages of the groups' rollouts, shared out as `credit` says.

    Args:
        groups: all of the step that this credit is for.
        values: what `advantages` made of them; not read where agents are recursive.

    Raises ContractError: a quality outside of [0, 1], a reward of a turn or of an agent that is not
        finite, or qualities where the advantage is per token already.
    """
    out: dict[str, Advantage] = dict(values)
    if credit.agents == "recursive":
        out = dict(recursive(groups, share=_number(credit, "agent_share")))
    if credit.quality:
        cap = _number(credit, "quality_cap")
        out = peer_credit(groups, out, verdicts(groups, credit.quality), cap=cap)
    if credit.turn_weight:
        rewards = turn_rewards(groups)
        gamma = _number(credit, "turn_gamma")
        out |= turn_credit(groups, out, rewards=rewards, gamma=gamma, weight=credit.turn_weight)
    if credit.agents == "root":
        out |= root_only(groups, out)
    if credit.span_blame:
        flagged = {t.id: t.reward.flagged for g in groups for t in g.scored if t.reward.flagged}
        out = span_credit(groups, out, flagged, amplify=credit.span_blame)
    return out


def check_credit(credit: CreditConfig, estimator: str, algorithm: str) -> None:
    """Raises ConfigError where the ways cannot work on advantages of this estimator."""
    if not credit.quality:
        return
    known = ESTIMATORS.get(estimator)
    alone = credit.agents == "recursive"
    if alone or known is None or known.balance != "rollouts":
        of = "recursive agents" if alone else f"advantage `{estimator}`"
        raise ConfigError(
            f"`learn.credit.quality` is `{credit.quality}`: it shares out advantages that sum to 0 "
            f"over the rollouts of a group, and those of {of} of algorithm `{algorithm}` do not",
            hint=setting("learn.credit.agents=all" if alone else "learn.advantage=group_mean")
            + ", or leave the quality out",
        )


def teaches_by_credit(group: Group, credit: CreditConfig) -> bool | None:
    """Whether credit within rollouts moves anything in a group, also one of equal rewards; None
    where credit only shares out what the rewards gave, and the rewards decide."""
    if credit.agents != "recursive" and not credit.turn_weight:
        return None
    alone = credited([group], {t.id: 0.0 for t in group.scored}, credit)
    return any(
        math.isfinite(x) and x != 0
        for value in alone.values()
        for x in (
            [value] if not isinstance(value, Mapping) else [x for xs in value.values() for x in xs]
        )
    )


def verdicts(groups: Sequence[Group], part: str) -> dict[int, Verdict]:
    """What the named part of the rewards says of each group, by ordinal.

    A group with a scored rollout that has no such part was not compared and is not in the result;
    0 = the rollout does not pass. Raises ContractError: a value outside of [0, 1].
    """
    out: dict[int, Verdict] = {}
    for group in groups:
        found = {t.id: t.reward.parts.get(part) for t in group.scored}
        known = {id: value for id, value in found.items() if value is not None}
        for id, value in known.items():
            if not 0 <= value <= 1:
                raise ContractError(
                    f"trajectory {id} has `{part}` {value} in its reward, expected a quality in "
                    "[0, 1]",
                    hint="learn.credit.quality names it; 0 is for a rollout that does not pass",
                )
        if known and len(known) == len(found):
            out[group.ordinal] = Verdict(quality={id: v for id, v in known.items() if v > 0})
    return out


def turn_rewards(groups: Sequence[Group]) -> dict[str, Sequence[float]]:
    """What an environment paid for each trained turn (`info["environment_rewards"]`).

    Of groups all of whose rollouts have one reward per turn; a last turn that was cut, and never
    reached the environment, has 0. The others are left out: their turns share the outcome.
    """
    out: dict[str, Sequence[float]] = {}
    for group in groups:
        found: dict[str, Sequence[float]] = {}
        for t in group.scored:
            paid, count = list(t.info.get("environment_rewards", ())), len(turns(t))
            if not paid or not count - 1 <= len(paid) <= count:
                break
            found[t.id] = paid + [0.0] * (count - len(paid))
        else:
            out |= found
    return out


def credit_metrics(
    groups: Sequence[Group], values: Mapping[str, Advantage], credit: CreditConfig
) -> dict[str, float]:
    """`credit/masked_tokens` and, where quality is on, `credit/judged_groups`: sums, so that those
    of several task sets add up; empty where all tokens are alike."""
    if credit == CreditConfig():
        return {}
    masked = 0
    for t in (t for group in groups for t in group.scored):
        if isinstance(value := values[t.id], Mapping):
            marked = (
                (x, on) for n in t.nodes for x, on in zip(value[n.id], n.trained, strict=True)
            )
            masked += sum(on and math.isnan(x) for x, on in marked)
    out = {"credit/masked_tokens": float(masked)}
    if credit.quality:
        out["credit/judged_groups"] = float(len(verdicts(groups, credit.quality)))
    return out


def settings_of(credit: CreditConfig) -> dict[str, Any]:
    """What is on, with every number that it uses."""
    on = {k: v for k, v in asdict(credit).items() if v != getattr(CreditConfig(), k)}
    used = {
        "agent_share": credit.agents == "recursive",
        "turn_gamma": credit.turn_weight > 0,
        "quality_cap": bool(credit.quality),
    }
    return on | {name: _number(credit, name) for name, is_on in used.items() if is_on}


def _number(credit: CreditConfig, name: str) -> float:
    value = getattr(credit, name)
    return _DEFAULTS[name] if value is None else value
