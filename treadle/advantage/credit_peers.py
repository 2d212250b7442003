"""Credit among the passing rollouts of a group: better ways to pass learn more (GAR).

Guarantees: a rollout that fails keeps its advantage but for one shift of the whole group, which is
0 unless the cap binds; what passing rollouts have together stays the same up to the cap, so quality
moves credit and does not add any; a confirmed hack counts as a reward of 0 from the start; a group
without a verdict (the grader was down) keeps its advantages as they are.

Takes: Groups, advantages, verdicts on groups. Gives: Groups without paid hacks; advantages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from treadle.advantage.tokens import Advantage
from treadle.errors import ContractError
from treadle.types import Group

CAP = 2.0
"""Largest factor by which the credit of a passing rollout grows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What a grader that compared the rollouts of one group said."""

    quality: Mapping[str, float] = field(default_factory=dict[str, float])
    """In (0, 1], by id of each passing trajectory; one that is not here does not pass."""
    hacks: frozenset[str] = frozenset()
    """Trajectories that got their reward by cheating, confirmed."""

    def __post_init__(self) -> None:
        for id, value in self.quality.items():
            if not 0 < value <= 1:
                raise ContractError(
                    f"trajectory {id} has quality {value}, expected a number in (0, 1]",
                    hint="a grader that cannot judge the group gives no verdict at all",
                )


def without_hacks(groups: Sequence[Group], verdicts: Mapping[int, Verdict]) -> list[Group]:
    """The groups with every reward of a confirmed hack set to 0: what `advantages` is to see.

    Args:
        verdicts: by ordinal of the group.
    """
    none = Verdict()
    out = []
    for group in groups:
        hacks = verdicts.get(group.ordinal, none).hacks
        members = tuple(
            replace(
                t, reward=replace(t.reward, value=0.0, parts=dict.fromkeys(t.reward.parts, 0.0))
            )
            if t.id in hacks and t.reward.value is not None
            else t
            for t in group.trajectories
        )
        out.append(replace(group, trajectories=members))
    return out


def peer_credit(
    groups: Sequence[Group],
    values: Mapping[str, Advantage],
    verdicts: Mapping[int, Verdict],
    *,
    cap: float = CAP,
) -> dict[str, Advantage]:
    """The advantages, with the credit of each group that has a verdict shared out by quality.

    Args:
        groups: as `without_hacks` returned them.
        values: what `advantages` made of these groups by an estimator that compares rollouts.
        verdicts: by ordinal of the group.
        cap: see `share_out`.

    Raises ContractError: a verdict names a trajectory that the group has not, or an advantage is
        per token already.
    """
    out = dict(values)
    for group in groups:
        verdict = verdicts.get(group.ordinal)
        if verdict is None:
            continue
        known = {t.id for t in group.trajectories}
        if strange := sorted((set(verdict.quality) | verdict.hacks) - known):
            raise ContractError(
                f"the verdict on group {group.ordinal} names {', '.join(strange)}, which the group "
                "has not"
            )
        ids = [t.id for t in group.scored]
        plain = [value for id in ids if isinstance(value := values[id], int | float)]
        if len(plain) < len(ids):
            raise ContractError(
                f"group {group.ordinal} has advantages per token already: credit among rollouts "
                "comes before credit within one"
            )
        quality = [None if id in verdict.hacks else verdict.quality.get(id) for id in ids]
        out |= dict(zip(ids, share_out(plain, quality, cap), strict=True))
    return out


def share_out(
    values: Sequence[float], quality: Sequence[float | None], cap: float = CAP
) -> list[float]:
    """A'_i = l * f_i * A_i for passing rollouts, l = min(cap, sum A / sum f A) over them; then the
    mean over the group is subtracted.

    Args:
        values: A, one per rollout of the group, summing to 0.
        quality: f in (0, 1]; None = does not pass, and stays. A passing rollout whose A is not
            above 0 stays too: scaled, the worse of two such would be blamed less.
        cap: of l; where it binds, passing rollouts lose credit together.

    Source: group-aware reweighting of MiMo-V2.6 (arXiv:2610.11959).
    """
    pairs = [(a, f) for a, f in zip(values, quality, strict=True) if f is not None and a > 0]
    if not pairs:
        return list(values)
    factor = min(cap, math.fsum(a for a, _ in pairs) / math.fsum(f * a for a, f in pairs))
    scaled = [
        factor * f * a if f is not None and a > 0 else a
        for a, f in zip(values, quality, strict=True)
    ]
    mean = math.fsum(scaled) / len(scaled)
    return [a - mean for a in scaled]
