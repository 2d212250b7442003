"""Terms that are added to the reward that trains; pure functions of counts.

Guarantees: a term is a part of the reward by a name of its own; the score of a task set, and so an
evaluation, never sees it; what is unscored stays so.

Takes: a Reward and its trajectory. Gives: a Reward.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.config import RolloutConfig
from treadle.errors import ConfigError
from treadle.reward.values import failed
from treadle.types import OVERLONG, Party, Reward, Source, Trajectory


def shaped(reward: Reward, trajectory: Trajectory, rollout: RolloutConfig) -> Reward:
    """The reward with what `rollout.overlong` takes off, as part OVERLONG; the same object where it
    is null, or nothing was scored. A part of that name is no one else's: `Reward.earned` adds it
    back.

    A limit is per turn, so it is the longest turn that counts: where an answer is one turn, all of
    it. A trajectory that was cut for another reason (its turns, the context) is not punished.
    """
    settings = rollout.overlong
    if reward.value is None:
        return reward
    if OVERLONG in reward.parts:
        return failed(
            f"of trajectory {trajectory.id}",
            f"has a part `{OVERLONG}` of its own, which is the name of what rollout.overlong adds",
            hint="give that part another name",
        )
    if settings is None:
        return reward
    penalty = overlong_penalty(
        longest_turn(trajectory),
        max_tokens=rollout.max_new_tokens,
        cache_tokens=settings.buffer(rollout.max_new_tokens),
        factor=settings.penalty,
    )
    return replace(reward, value=reward.value + penalty, parts={**reward.parts, OVERLONG: penalty})


def longest_turn(trajectory: Trajectory) -> int:
    """Tokens that the policy sampled in one turn, at most."""
    turns = (
        len(node.ids)
        for node in trajectory.nodes
        if node.source is Source.SAMPLED and node.party is Party.POLICY
    )
    return max(turns, default=0)


def overlong_penalty(
    num_tokens: int, *, max_tokens: int, cache_tokens: int, factor: float = 1.0
) -> float:
    """DAPO's soft punishment of long answers: 0 up to `max_tokens - cache_tokens`, then falling
    linearly to -factor at `max_tokens`, and no further.

    Example: with 20,480 and 4,096, 16,384 tokens cost 0, 18,432 cost .5, 20,480 and more cost 1.

    Args:
        num_tokens: sampled, e.g. `trajectory.num_sampled_tokens`.
        max_tokens: where the penalty is full; usually the limit at which answers are cut.
        cache_tokens: over how many tokens it grows; a fifth of the limit is usual.
        factor: reward units at full penalty.

    Raises:
        ConfigError: `cache_tokens` is not between 1 and `max_tokens`.

    Source: DAPO (arXiv:2503.14476), soft overlong punishment; clipped at -factor.
    """
    if not 1 <= cache_tokens <= max_tokens:
        raise ConfigError(
            f"`cache_tokens` must be between 1 and max_tokens = {max_tokens}, got {cache_tokens}",
            hint="a fifth of max_tokens is usual",
        )
    over = num_tokens - (max_tokens - cache_tokens)
    return -factor * min(1.0, over / cache_tokens) if over > 0 else 0.0
