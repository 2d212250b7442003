"""Finished groups in a bounded queue, first in, first out: what other systems do instead of
admission. Two things can happen when more finish than it holds, and one of them is a decision:

    drop    the oldest finished group is thrown away. Nobody waits, and what is thrown away does
            not depend on how long it took, so lengths stay unbiased
    block   what has begun goes on, and no new group starts until all that finished fit; nothing
            is thrown away, and everything is older

Capacity is in groups and counts what waits, not what is being trained. Both are here for
comparison and for planning; admission (`admission`, `order`) is what runs.

Takes: counts, finished groups in order of completion. Gives: how many leave, whether one may
start, which are trained.
Source: queue-drop of Dong, Goel and Yu, "Predicting and Controlling Staleness in Fully
Asynchronous RL Training" (2026); blocking as the bounded buffers of slime and miles.
"""

from collections.abc import Sequence
from itertools import islice


def num_dropped(finished: int, *, capacity: int) -> int:
    """How many of the oldest of so many finished groups leave."""
    return max(0, finished - capacity)


def may_start_blocking(finished: int, *, capacity: int) -> bool:
    """Whether one more group may start: not while a finished one finds no place."""
    return finished <= capacity


def first_batch(finished: Sequence[int], *, groups_per_step: int) -> tuple[int, ...] | None:
    """Ordinals to train now, or None while more must finish.

    Args:
        finished: ordinals in the order in which they finished.
        groups_per_step: N.
    """
    if len(finished) < groups_per_step:
        return None
    return tuple(islice(finished, groups_per_step))
