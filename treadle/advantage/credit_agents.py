"""Credit among the agents of a rollout: the root agent, and those that it calls.

An agent is the nodes of one `Node.agent`: () the root, (0,) its first sub-agent, (0, 2) the third
of that one's. All branches of an agent (compaction, a rewritten past) are its own. Three ways:

- all: every agent carries the rollout's advantage, what `advantages` gives as it is;
- root only: sub-agents are taken out of the mask, and the root learns to call them as they are;
- recursive: each agent is paid for its own success and a share of its children's.

Guarantees: statistics are over rollouts, whatever the number of their agents; an agent that was not
judged is not trained and not averaged over: unscored is not 0.

Takes: Groups and advantages, or rewards per agent. Gives: advantages per token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from treadle.advantage.judged import check_finite
from treadle.advantage.tokens import Advantage, map_tokens
from treadle.types import Group, Trajectory

SHARE = 0.4
"""Of the mean success of its immediate children that an agent is paid."""

Agent = tuple[int, ...]


def agent_part(agent: Agent) -> str:
    """The part of the reward that holds a sub-agent's own success, e.g. "agent/0.2"."""
    return "agent/" + ".".join(map(str, agent))


def root_only(
    groups: Sequence[Group], values: Mapping[str, Advantage]
) -> dict[str, dict[int, tuple[float, ...]]]:
    """The advantages, with every token of a sub-agent out of the mask (NaN).

    Source: PARL of Kimi K2.5 (arXiv:2602.02276), its frozen sub-agents.
    """
    return {
        t.id: map_tokens(t, values[t.id], lambda node, i, x: math.nan if node.agent else x)
        for group in groups
        for t in group.scored
    }


def recursive(
    groups: Sequence[Group], *, share: float = SHARE, weigh_depth: bool = True
) -> dict[str, dict[int, tuple[float, ...]]]:
    """A_a = weight(depth of a) * (R_a - b), R_a = own success + share * mean own success of the
    immediate children, b = mean R of the root agents of the *other* rollouts of the group.

    Args:
        groups: of the whole step. The root's own success is the reward's value, a sub-agent's the
            part `agent_part(agent)`; a sub-agent without it was not judged.
        share: of the children's mean; in reward units per reward unit.
        weigh_depth: multiply by `depth_weights` of all trained agents of the step.

    Returns:
        One advantage per token by trajectory and node id; NaN for tokens that are not trained or
        whose agent was not judged; 0 throughout where only one rollout of the task counts.

    Source: RAO (arXiv:2605.06639), node reward, leave-one-out root baseline and depth weights.
    """
    found: list[tuple[Trajectory, dict[Agent, float]]] = []
    for group in groups:
        paid = [agent_rewards(group, t, share) for t in group.scored]
        roots = [rewards[()] for rewards in paid]
        for i, (trajectory, rewards) in enumerate(zip(group.scored, paid, strict=True)):
            others = roots[:i] + roots[i + 1 :]
            baseline = math.fsum(others) / len(others) if others else math.nan
            centred = {a: r - baseline if others else 0.0 for a, r in rewards.items()}
            found.append((trajectory, centred))
    counts = Counter(len(a) for t, values in found for a in _trained(t) if a in values)
    weights = depth_weights(counts) if weigh_depth else dict.fromkeys(counts, 1.0)
    return {
        trajectory.id: map_tokens(
            trajectory,
            0.0,
            lambda node, i, x, values=values: (
                values[node.agent] * weights[len(node.agent)] if node.agent in values else math.nan
            ),
        )
        for trajectory, values in found
    }


def agent_rewards(group: Group, trajectory: Trajectory, share: float = SHARE) -> dict[Agent, float]:
    """R of every judged agent of a rollout: own success + share * mean of its children's.

    Raises ContractError: a success is not finite.
    """
    agents = {node.agent for node in trajectory.nodes if node.agent}
    own: dict[Agent, float] = {(): float(trajectory.reward.value or 0.0)}
    for agent in sorted(agents):
        if (success := trajectory.reward.parts.get(agent_part(agent))) is not None:
            own[agent] = float(success)
    out = {}
    for agent, success in own.items():
        check_finite(group, trajectory, success, agent_part(agent) if agent else "")
        children = [s for a, s in own.items() if a and a[:-1] == agent]
        bonus = share * math.fsum(children) / len(children) if children else 0.0
        out[agent] = success + bonus
    return out


def depth_weights(counts: Mapping[int, int]) -> dict[int, float]:
    """mean over depths of n_d, divided by n_depth: each depth weighs the same in sum.

    Args:
        counts: n, agents by depth, 0 = root; depths without agents are left out.
    """
    used = {depth: n for depth, n in counts.items() if n}
    mean = math.fsum(used.values()) / len(used) if used else 0.0
    return {depth: mean / n for depth, n in used.items()}


def _trained(trajectory: Trajectory) -> set[Agent]:
    return {node.agent for node in trajectory.nodes if any(node.trained)}
