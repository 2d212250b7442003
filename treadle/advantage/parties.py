"""Advantages of a batch, each trained party with rewards and a baseline of its own.

Guarantees: where a trajectory has several trained parties (self-play, roles), the tokens of each
carry the advantage of its own reward, compared with the same party in the other rollouts of the
group: a winner's reward never teaches the loser. A party without a reward is not trained.

Takes: Groups with rewards. Gives: advantages by trajectory id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treadle.advantage.estimate import find, of_party
from treadle.advantage.judged import comparable, judged, trained_parties
from treadle.advantage.tokens import Advantage, map_tokens
from treadle.errors import ConfigError, ContractError, setting
from treadle.types import Group, Party, Trajectory

NOT_POLICY = frozenset({Party.FROZEN, Party.ENVIRONMENT})
"""Their tokens are nobody's to train."""


def advantages(
    groups: Sequence[Group],
    estimator: str,
    *,
    baseline: float | Mapping[Party, float] | None = None,
    weights: Mapping[str, float] | None = None,
) -> dict[str, Advantage]:
    """The advantage of each trajectory of `Group.scored`, by trajectory id.

    A trajectory that does not count has no entry, and so no training row: 0 would still weigh in
    the token mean.

    Args:
        groups: of the whole step, over all ranks, each with the rewards judged so far.
        estimator: a key of ESTIMATORS; its file has the formula and the unit.
        baseline: for `reinforce_running`: the mean of earlier steps, in reward units, of the policy
            or by party (`running_baselines`); None before the first step, and then 0.
        weights: for `gdpo`: of each named part of the reward.

    Returns:
        One number for all trained tokens of a trajectory with one trained party; else one per
        token by node id, NaN where the token is not to be trained.

    Raises:
        ConfigError: unknown estimator; no weights for `gdpo`; several trained parties for `gdpo`
            or `gae`; a reward below 0 for `maxrl`.
        ContractError: a reward is not finite or missing, a trajectory comes twice, or a group's
            advantages do not sum to 0 where the estimator promises it.
    """
    find(estimator)
    trained = {t.id: _parties(t) for group in groups for t in group.scored}
    parties = {party for of_one in trained.values() for party in of_one}
    alone = {"gdpo": "reads the parts of one party's reward", "gae": "values one party's tokens"}
    if estimator in alone and parties - {Party.POLICY}:
        raise ConfigError(
            f"advantage `{estimator}` {alone[estimator]}, but {len(parties)} parties "
            f"are trained: {', '.join(sorted(parties))}",
            hint=setting("learn.advantage=group_mean"),
        )
    known = baseline if isinstance(baseline, Mapping) else {Party.POLICY: baseline or 0.0}
    found = {
        party: of_party(groups, estimator, party, known.get(party, 0.0), weights or {})
        for party in parties
    }
    out: dict[str, Advantage] = {}
    for trajectory in (t for group in groups for t in group.scored):
        mine = {p: found[p].get(trajectory.id, math.nan) for p in trained[trajectory.id]}
        values = list(mine.values())
        if len(values) == 1 and not math.isnan(values[0]):
            out[trajectory.id] = values[0]
        else:
            out[trajectory.id] = map_tokens(
                trajectory, 0.0, lambda node, index, x, mine=mine: mine[node.party]
            )
    return out


def teaches(group: Group, estimator: str, weights: Mapping[str, float] | None = None) -> bool:
    """Whether training on the group can move anything, and so whether it is worth a place in the
    step. Where the estimator compares rollouts, two must differ in their rewards; else one that
    was judged is enough, whatever its reward.

    Raises as `advantages` does for the group alone.
    """
    find(estimator)
    for party in {p for t in group.scored for p in _parties(t)}:
        members, view = judged(group, party)
        if comparable(group, members, view, estimator, weights or {}):
            return True
    return False


def _parties(trajectory: Trajectory) -> tuple[Party, ...]:
    parties = trained_parties(trajectory)
    for party in parties:
        if party in NOT_POLICY:
            raise ContractError(
                f"trajectory {trajectory.id} has trained tokens of the party `{party}`",
                hint="a harness marks as trained only what the policy sampled, in whatever role",
            )
    return parties
