"""When a group may start: AReaL-style admission, by groups.

A group may start while

    started - dropped - published < (eta + 1) * N

with N groups per step and eta steps of run-ahead; eta = 0 is synchronous training. `published`
counts the groups of every step whose weights are being served. A group that is dropped (zero
variance, unscored, failed) gives its place back at once, else the refill deadlocks; one that a step
consumed and left out gives it back with its step, or at eta = 0 the next would start too early.

Guarantee at eta = 0: groups start in order of their ordinals and only when one is missing, so
the set trained in a step is the first N informative ordinals, whatever order they finish in.

Takes: counts. Gives: yes or no.
Source: AReaL (arXiv:2505.24298), capacity rule; there in rollouts, here in groups.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Counts of groups since the run began; they only grow."""

    started: int = 0
    dropped: int = 0
    published: int = 0
    """Groups trained in steps whose weights are being served."""

    @property
    def live(self) -> int:
        """Started and neither dropped nor published."""
        return self.started - self.dropped - self.published


def may_start(
    progress: Progress, *, groups_per_step: int, eta: int, total_steps: int | None = None
) -> bool:
    """Whether one more group may start.

    Args:
        progress: counts so far.
        groups_per_step: N.
        eta: steps of run-ahead, >= 0.
        total_steps: of the whole run; no group starts that no step would train. Without this
            bound the last steps would generate for nobody.
    """
    if progress.live >= (eta + 1) * groups_per_step:
        return False
    if total_steps is None:
        return True
    return progress.started - progress.dropped < total_steps * groups_per_step
