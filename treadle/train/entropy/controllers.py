"""Controllers: from measured entropy and its target to the next value of one dial.

Guarantees: a value never leaves its bounds; above the target no dial moves towards more entropy
and below it none towards less; on the target nothing moves. Pure functions of numbers, so a step
that is re-applied moves the dial to the same bits.

Takes: value, measured entropy H and target H* in nats. Gives: the next value.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

Schedule = Sequence[tuple[int, float]]
"""(step, nats), steps rising; linear in between, constant outside."""


def next_zeta(
    zeta: float, entropy: float, target: float, *, bounds: tuple[float, float] = (1e-4, 0.05)
) -> float:
    """REPO-R: double towards the target, halve away from it, change sign at the smallest value.

    Args:
        bounds: smallest and largest |zeta|. The largest suits the tails of a language model (log pi
            of -5 to -15); small vocabularies and near-deterministic formats need up to 0.5.

    Source: REPO (arXiv:2603.11682). 0 becomes the smallest value of the wanted sign: doubling
    could never leave it.
    """
    smallest, largest = bounds
    if entropy == target:
        return zeta
    # Mirrored where entropy is too high: the same rule with the other sign.
    side = 1.0 if entropy < target else -1.0
    value = side * zeta
    if value > 0:
        return side * min(largest, 2 * value)
    if value == 0:
        return side * smallest
    halved = value / 2
    return side * (smallest if halved > -smallest else halved)


def next_by_steps(
    value: float, entropy: float, target: float, *, bounds: tuple[float, float], rate: float
) -> float:
    """clip(value + rate * sign(H* - H), bounds): one fixed step towards the target.

    What MAI (slack of the upper ratio bound: bounds (0, 2.5), rate .25), ADAPO (clip_high itself)
    and the adaptive bonus of Skywork-OR1 ((0, .005), 1e-4) and TRL ((0, 1), .005) share.
    """
    error = target - entropy
    moved = value + math.copysign(rate, error) if error else value
    return min(max(moved, bounds[0]), bounds[1])


def next_by_rate(
    value: float, entropy: float, target: float, *, bounds: tuple[float, float], rate: float
) -> float:
    """log a <- log a - rate (H - H*), clipped to bounds: the temperature of soft actor-critic.

    Args:
        bounds: > 0.
        rate: per nat.
    """
    low, high = math.log(bounds[0]), math.log(bounds[1])
    moved = math.log(value) - rate * (entropy - target)
    # The bounds themselves, not exp(log(bound)), which may lie outside by a rounding.
    if moved <= low:
        return bounds[0]
    return bounds[1] if moved >= high else min(max(math.exp(moved), bounds[0]), bounds[1])


def target_at(schedule: Schedule, step: int) -> float:
    """The target of a step in nats, by linear interpolation; constant before and after."""
    steps = [at for at, _ in schedule]
    after = bisect_right(steps, step)
    if after == 0:
        return schedule[0][1]
    if after == len(schedule):
        return schedule[-1][1]
    (left, low), (right, high) = schedule[after - 1], schedule[after]
    return low + (high - low) * (step - left) / (right - left)
