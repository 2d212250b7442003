"""Which task of a set comes next, by how often its rollouts pass.

Guarantees, each so that a run's prompts are the same after a crash:

- no clock and no state: what is known of a task is a function of stored groups, and the draw of a
  position is a function of (seed, position, groups of earlier blocks);
- a block of positions looks at groups whose positions lie at least one block back, whatever the
  order in which they finished; the draw waits for those, and for nothing else (`awaited`);
- within a block no task comes twice before all that may come have come;
- a task that once passed at `retire` or above never comes again.

A position is the ordinal of a run with one task set, or the visit of a task set in a mix.

Takes: Groups, positions. Gives: pass rates, weights, the index of a task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.errors import ConfigError, ContractError
from treadle.types import Group

UNSEEN = 0.25
"""Weight of a task of which nothing is known: that of the most informative pass rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one finished group says of its task."""

    index: int
    """Of the task in its set."""
    passed: int
    scored: int
    """Rollouts that count; 0 = nothing was learnt of the task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curriculum:
    """The rule. `low`, `high` and `retire` are pass rates."""

    block: int
    """Positions that share one look at the past; at least the groups in flight, so that the groups
    a draw waits for have nearly always finished."""
    low: float = 0.05
    high: float = 0.8
    """Outside of low..high a task teaches little and gets `floor`: it is looked at again, since
    what is too hard now need not stay so."""
    retire: float = 0.9
    floor: float = 0.01
    """Weight, as p (1 - p) is one; 0 = such tasks never come again."""

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ConfigError(f"a block has at least one position, got {self.block}")
        if not 0 <= self.low <= self.high <= self.retire <= 1:
            raise ConfigError(
                "pass rates must be 0 <= low <= high <= retire <= 1, got "
                f"{self.low}, {self.high}, {self.retire}"
            )
        if not 0 <= self.floor <= UNSEEN:
            raise ConfigError(f"the floor must be in [0, {UNSEEN}], got {self.floor}")

    def horizon(self, position: int) -> int:
        """The draw of `position` sees the outcomes of all positions below this one."""
        return max(0, (position // self.block - 1) * self.block)

    def awaited(self, position: int, finished: Iterable[int]) -> tuple[int, ...]:
        """Positions that must finish (trained or dropped) before `position` can be drawn."""
        return tuple(sorted(set(range(self.horizon(position))) - set(finished)))

    def weight(self, rate: float | None, best: float | None = None) -> float:
        """p (1 - p) of the latest pass rate p, which is the spread that a group's rewards have.

        Args:
            rate: p of the task's latest group; None = unseen.
            best: its largest p so far; at `retire` or above the weight is 0 for good.
        """
        if rate is None:
            return UNSEEN
        if max(rate, rate if best is None else best) >= self.retire:
            return 0.0
        return rate * (1 - rate) if self.low <= rate <= self.high else self.floor

    def weights(
        self, size: int, outcomes: Mapping[int, Outcome], position: int
    ) -> NDArray[np.float64]:
        """Weight of each of `size` tasks, as the draw of `position` sees them.

        Args:
            outcomes: by position; those at or past the horizon are not looked at.

        Raises ContractError: an outcome that is awaited is missing, or is of no task of the set.
        """
        if missing := self.awaited(position, outcomes):
            raise ContractError(
                f"position {position} cannot be drawn before {len(missing)} others have finished, "
                f"the first {missing[0]}",
                hint="ask `awaited` first",
            )
        out = np.full(size, UNSEEN)
        best: dict[int, float] = {}
        for place in range(self.horizon(position)):
            outcome = outcomes[place]
            if not 0 <= outcome.index < size:
                raise ContractError(
                    f"position {place} was task {outcome.index} of a set of {size} tasks"
                )
            if outcome.scored:
                rate = outcome.passed / outcome.scored
                best[outcome.index] = max(rate, best.get(outcome.index, 0.0))
                out[outcome.index] = self.weight(rate, best[outcome.index])
        return out

    def draw(
        self, size: int, outcomes: Mapping[int, Outcome], position: int, seed: int
    ) -> int | None:
        """Index of the task at `position`; None when no task may come any more.

        Tasks are drawn without replacement in proportion to their weights, block by block.

        Raises ContractError: see `weights`.

        Source: Efraimidis and Spirakis, Weighted random sampling with a reservoir (IPL 97, 2006):
            the order of exponential clocks of rate w. Weights: arXiv:2605.05112; retirement:
            ScaleRL (arXiv:2510.13786), no positive resampling.
        """
        order = self.order(size, outcomes, position, seed)
        return int(order[position % self.block % len(order)]) if len(order) else None

    def order(
        self, size: int, outcomes: Mapping[int, Outcome], position: int, seed: int
    ) -> NDArray[np.int64]:
        """The order in which tasks come in the block of `position`, again and again; empty when
        none may come any more. One for all positions of a block: worth keeping.

        Raises ContractError: see `weights`.
        """
        weights = self.weights(size, outcomes, position)
        live = np.flatnonzero(weights > 0)
        number = position // self.block
        bits = np.random.Philox(key=np.array([seed, number], dtype=np.uint64)).random_raw(size)
        uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return live[np.argsort(-np.log(uniform[live]) / weights[live], kind="stable")]


def outcome_of(group: Group, index: int) -> Outcome:
    """Passes of a group: scored rollouts with a full strict score (`Reward.solved`), as in the
    metric `reward/solved_frac`."""
    scored = group.scored
    return Outcome(index=index, passed=sum(t.reward.solved for t in scored), scored=len(scored))
