"""Terms that a training reward may add; pure functions of counts.

They belong into a reward function, never into a task set's own score: an evaluation then does not
see them (`@td.reward` trains, the task set's strict score evaluates).

Takes: counts. Gives: numbers to add to a reward.
"""

from __future__ import annotations

from treadle.errors import ConfigError


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
    return -factor * min(1.0, max(0.0, over / cache_tokens))
