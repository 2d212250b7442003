"""The spread filter: worked by hand, and its promises on random groups."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.advantage.conftest import make_group
from treadle.advantage import top_spread
from treadle.errors import ConfigError
from treadle.types import Group

Groups = Callable[..., Group]


def pair(ordinal: int, spread: float) -> Group:
    """Two rewards with that unbiased deviation."""
    return make_group(ordinal, [0.0, spread * math.sqrt(2)])


def test_the_largest_deviations_are_kept_until_they_have_nine_tenths_of_the_sum() -> None:
    """4 + 3 + 2 + 1 = 10, target 8.99: 4, 3, 2 reach 9."""
    groups = [pair(0, 1), pair(1, 4), pair(2, 0), pair(3, 3), pair(4, 2)]
    kept = top_spread(groups)
    assert kept.indices == (1, 3, 4)
    assert kept.scale == pytest.approx(math.sqrt(3 / 5))


def test_the_slack_leaves_out_a_group_that_would_complete_the_sum_by_less() -> None:
    """Of 8.995 + 1 the target is 8.9855: reached without the last; with no slack it is 8.9955."""
    groups = [pair(0, 8.995), pair(1, 1)]
    assert top_spread(groups).indices == (0,)
    assert top_spread(groups, slack=0).indices == (0, 1)


def test_rewards_too_large_to_be_squared_do_not_end_the_step() -> None:
    assert top_spread([make_group(0, [1e300, 0.0]), make_group(1, [1.0, 0.0])]).indices == (0,)


def test_the_deviation_is_unbiased() -> None:
    """Of [1, 0] it is 0.7071 and of [1, 1, 0, 0] 0.5774; biased, both are 0.5."""
    groups = [make_group(0, [1, 1, 0, 0]), make_group(1, [1, 0])]
    assert top_spread(groups, keep=0.55).indices == (1,)


def test_keeping_everything_keeps_every_group_with_any_spread() -> None:
    groups = [pair(0, 1e-3), pair(1, 0), pair(2, 5)]
    assert top_spread(groups, keep=1).indices == (0, 2)


def test_a_least_number_of_groups_is_kept_as_far_as_they_have_any_spread() -> None:
    groups = [pair(0, 8), pair(1, 1), pair(2, 0), pair(3, 0.5)]
    assert top_spread(groups, keep=0.5).indices == (0,)
    assert top_spread(groups, keep=0.5, least=2).indices == (0, 1)
    assert top_spread(groups, keep=0.5, least=9).indices == (0, 1, 3)


def test_rewards_in_a_small_unit_still_select_a_group() -> None:
    """Their deviations sum to less than the slack."""
    assert top_spread([pair(0, 1e-3), pair(1, 2e-3)]).indices == (1,)


def test_nothing_to_keep() -> None:
    assert top_spread([]).indices == ()
    assert top_spread([pair(0, 0), make_group(1, [1.0]), make_group(2, [None])]).indices == ()


@pytest.mark.parametrize("keep", [0.0, -1.0, 1.5, math.nan])
def test_a_share_out_of_range_is_refused(keep: float) -> None:
    with pytest.raises(ConfigError, match=r"in \(0, 1\]"):
        top_spread([pair(0, 1)], keep=keep)


@given(
    st.lists(st.floats(0, 10).map(lambda x: round(x, 3)), max_size=10),
    st.sampled_from([0.3, 0.9, 1.0]),
    st.randoms(),
)
def test_the_kept_groups_are_the_fewest_that_reach_the_share_in_any_order(
    spreads: list[float], keep: float, rng: object
) -> None:
    groups = [pair(i, s) for i, s in enumerate(spreads)]
    kept = top_spread(groups, keep=keep, slack=0.0)
    chosen = [spreads[i] for i in kept.indices]
    assert all(s > 0 for s in chosen)
    assert math.fsum(chosen) >= keep * math.fsum(spreads) - 1e-9
    if chosen and keep < 1:
        assert math.fsum(chosen) - min(chosen) < keep * math.fsum(spreads) + 1e-9
    rest = [s for i, s in enumerate(spreads) if i not in kept.indices]
    assert max(rest, default=0) <= min(chosen, default=math.inf)
    shuffled = list(groups)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    again = top_spread(shuffled, keep=keep, slack=0.0)
    assert {shuffled[i].ordinal for i in again.indices} == set(kept.indices)
