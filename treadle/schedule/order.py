"""Which finished groups the next step trains.

Oldest version first, then lowest ordinal. The trainer waits for a group that is still being
generated only when it has become `max_lag` versions old: training without it now would make it
older than that. So nothing is dropped for age. `max_lag` equal to eta is strict start order;
eta = 0 = `max_lag` is synchronous training.

Takes: finished and running groups. Gives: the ordinals of the next step, or None = wait.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A group as the consumption order sees it."""

    ordinal: int
    version: int
    """Oldest version of its tokens; for a running group, the version when it started."""


def next_batch(
    finished: Iterable[Ready],
    running: Iterable[Ready],
    *,
    groups_per_step: int,
    version: int,
    max_lag: float,
) -> tuple[int, ...] | None:
    """Ordinals to train now, in training order, or None while more must finish.

    Args:
        finished: groups that are generated, judged and not dropped.
        running: groups that have started and have not finished.
        groups_per_step: N.
        version: now served; the step about to begin trains at this version.
        max_lag: K >= eta; inf = no bound. A running group of version v is waited for once
            `version - v >= K`.
    """
    if any(version - group.version >= max_lag for group in running):
        return None
    order = sorted(finished, key=lambda group: (group.version, group.ordinal))
    if len(order) < groups_per_step:
        return None
    return tuple(group.ordinal for group in order[:groups_per_step])
