"""The curriculum: weights by hand, and its promises on random histories."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.advantage.conftest import make_group, make_trajectory
from treadle.errors import ConfigError, ContractError
from treadle.schedule.curriculum import UNSEEN, Curriculum, Outcome, outcome_of


def history(
    positions: int, index: Callable[[int], int], passed: Callable[[int], int]
) -> dict[int, Outcome]:
    return {p: Outcome(index=index(p), passed=passed(index(p)), scored=8) for p in range(positions)}


# --------------------------------------------------------------------------- weights


def test_the_weight_is_the_spread_of_the_rewards_within_the_band() -> None:
    rule = Curriculum(block=4)
    assert rule.weight(0.5) == 0.25 == rule.weight(None)
    assert rule.weight(0.25) == pytest.approx(0.1875)
    assert rule.weight(0.8) == pytest.approx(0.16)
    assert rule.weight(0.05) == pytest.approx(0.0475)
    assert rule.weight(0.0) == rule.weight(0.04) == rule.weight(0.85) == rule.floor
    assert rule.weight(0.9) == rule.weight(1.0) == 0


def test_retired_is_retired_whatever_comes_after() -> None:
    rule = Curriculum(block=1)
    assert rule.weight(0.5, best=0.9) == 0
    assert rule.weight(0.5, best=0.89) == 0.25
    outcomes = {
        0: Outcome(index=0, passed=8, scored=8),
        1: Outcome(index=0, passed=1, scored=8),
        2: Outcome(index=1, passed=4, scored=8),
    }
    assert rule.weights(3, outcomes, position=4).tolist() == [0, 0.25, UNSEEN]


def test_the_latest_group_of_a_task_counts_and_one_without_scores_says_nothing() -> None:
    rule = Curriculum(block=1)
    outcomes = {
        0: Outcome(index=0, passed=0, scored=8),
        1: Outcome(index=0, passed=4, scored=8),
        2: Outcome(index=0, passed=0, scored=0),
        3: Outcome(index=1, passed=0, scored=0),
    }
    assert rule.weights(2, outcomes, position=5).tolist() == [0.25, UNSEEN]


def test_an_outcome_is_a_function_of_the_stored_rewards() -> None:
    """A pass is a full strict score, as in the metrics; what was not scored does not count."""
    assert outcome_of(make_group(0, [1, 0.7, None, 0]), 5) == Outcome(index=5, passed=1, scored=3)
    shaped = make_trajectory(0, 0, 0.4, parts={"score": 1.0})
    assert outcome_of(make_group(0, [shaped, 1.2]), 0).passed == 2
    assert outcome_of(make_group(0, [None]), 0) == Outcome(index=0, passed=0, scored=0)


# --------------------------------------------------------------------------- what a draw sees


def test_a_draw_sees_whole_blocks_that_end_a_block_before_its_own() -> None:
    rule = Curriculum(block=4)
    assert [rule.horizon(p) for p in (0, 3, 4, 7, 8, 11, 12)] == [0, 0, 0, 0, 4, 4, 8]
    assert rule.awaited(7, []) == ()
    assert rule.awaited(8, [0, 2, 9]) == (1, 3)


def test_a_draw_before_its_time_is_refused() -> None:
    with pytest.raises(
        ContractError, match=r"position 8 cannot be drawn before 3 others .* first 1"
    ):
        Curriculum(block=4).draw(5, {0: Outcome(index=0, passed=0, scored=8)}, 8, seed=0)
    strange = {0: Outcome(index=9, passed=0, scored=8)}
    with pytest.raises(ContractError, match="position 0 was task 9 of a set of 5"):
        Curriculum(block=1).draw(5, strange, 2, seed=0)


@given(
    size=st.integers(1, 12),
    block=st.integers(1, 6),
    seed=st.integers(0, 2**63 - 1),
    passes=st.lists(st.integers(0, 8), min_size=40, max_size=40),
    cut=st.integers(0, 39),
)
def test_a_run_that_is_cut_anywhere_draws_the_same_tasks(
    size: int, block: int, seed: int, passes: list[int], cut: int
) -> None:
    """Played on from its stored outcomes, in another order and with later ones there already."""
    rule = Curriculum(block=block)
    outcomes: dict[int, Outcome] = {}
    drawn: list[int | None] = []
    for position in range(40):
        index = rule.draw(size, outcomes, position, seed)
        drawn.append(index)
        if index is None:
            outcomes[position] = Outcome(index=0, passed=0, scored=0)
        else:
            outcomes[position] = Outcome(index=index, passed=passes[position], scored=8)
    stored = dict(reversed(list(outcomes.items())))
    assert [rule.draw(size, stored, p, seed) for p in range(cut, 40)] == drawn[cut:]
    early = {p: o for p, o in outcomes.items() if p < rule.horizon(cut)}
    assert rule.draw(size, early, cut, seed) == drawn[cut]


@given(
    size=st.integers(1, 12),
    block=st.integers(1, 30),
    seed=st.integers(0, 99),
    rates=st.lists(st.integers(0, 8), min_size=12, max_size=12),
)
def test_no_task_comes_twice_in_a_block_before_all_that_may_have_come(
    size: int, block: int, seed: int, rates: list[int]
) -> None:
    rule = Curriculum(block=block)
    outcomes = history(3 * block, lambda p: p % size, lambda i: rates[i])
    drawn = [rule.draw(size, outcomes, p, seed) for p in range(2 * block, 3 * block)]
    weights = rule.weights(size, outcomes, 2 * block)
    live = {i for i in range(size) if weights[i] > 0}
    counts = Counter(drawn)
    if not live:
        assert set(drawn) == {None}
    else:
        assert set(counts) <= live
        assert max(counts.values()) <= math.ceil(block / len(live))


def test_a_retired_task_never_comes_again_and_when_all_are_there_is_none() -> None:
    rule = Curriculum(block=2)
    outcomes = history(4, lambda p: p % 2, lambda i: 8)
    assert {rule.draw(3, outcomes, p, seed=1) for p in (4, 5)} == {2}
    assert rule.draw(2, outcomes, 4, seed=1) is None


def test_tasks_come_in_proportion_to_their_weights() -> None:
    """One of 0.25 and one of 0.0475 that is first in a block: 84% and 16%, over 4000 blocks."""
    rule = Curriculum(block=1)
    outcomes = {
        0: Outcome(index=0, passed=50, scored=100),
        1: Outcome(index=1, passed=5, scored=100),
    }
    first = [rule.draw(2, outcomes, 3, seed=s) for s in range(4000)]
    share = 0.25 / (0.25 + 0.0475)
    assert first.count(0) / 4000 == pytest.approx(
        share, abs=4 * math.sqrt(share * (1 - share) / 4000)
    )


def test_the_draw_depends_on_seed_and_block() -> None:
    rule = Curriculum(block=8)
    orders = {tuple(rule.draw(100, {}, p, seed) for p in range(8)) for seed in range(3)} | {
        tuple(rule.draw(100, {}, p, 0) for p in range(8, 16))
    }
    assert len(orders) == 4


def test_the_random_bits_are_those_of_the_first_release() -> None:
    """A library that changes them would change the prompts of a resumed run."""
    rule = Curriculum(block=8)
    assert [rule.draw(10, {}, p, seed=7) for p in range(8)] == [0, 9, 5, 7, 2, 3, 6, 1]


@pytest.mark.parametrize(
    "wrong", [{"block": 0}, {"low": 0.9}, {"retire": 0.5}, {"floor": 0.5}, {"floor": -0.1}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Curriculum(**{"block": 4, **wrong})  # type: ignore[arg-type]
