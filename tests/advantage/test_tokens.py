"""Advantages per token: GAE, returns, whitening, and their layout by node."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.advantage.conftest import said, seen
from treadle.advantage import advantages, gae, per_node, whiten
from treadle.advantage.reinforce_pp import token_advantages, token_returns
from treadle.advantage.tokens import chain, unchain
from treadle.errors import ContractError
from treadle.types import Group, Trajectory

Groups = Callable[..., Group]
Trajectories = Callable[..., Trajectory]

R, V, ALL = [1.0, 2.0, 3.0], [0.5, 1.0, 1.5], [True] * 3
nan = math.nan


def same(a: object, b: object) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-6)  # NaN equals NaN


# --------------------------------------------------------------------------- GAE


def test_gae_gives_the_reference_returns_and_whitened_advantages() -> None:
    a, ret = gae(R, V, ALL, gamma=1, lam=1)
    same(ret, [6, 5, 3])
    same(a, [5.5, 4, 1.5])
    same(whiten(a, ALL), [0.907265, 0.164957, -1.072222])
    same(gae(R, V, ALL, gamma=0.5, lam=1)[1], [2.75, 3.5, 3])
    a, ret = gae(R, V, ALL, gamma=1, lam=0.5)
    same(ret, [3.625, 4.25, 3])
    same(whiten(a, ALL), [0.512148, 0.640184, -1.152332])


@pytest.mark.parametrize(("gamma", "lam", "first"), [(1, 1, 0.8), (1, 0.5, 0.6), (0.9, 0.5, 0.52)])
@pytest.mark.parametrize("hidden", [9.0, nan, math.inf])
def test_observations_are_stepped_over(
    gamma: float, lam: float, first: float, hidden: float
) -> None:
    """The values of the observation must not leak."""
    a, ret = gae(
        [0, hidden, hidden, 1], [0.2, hidden, hidden, 0.6], [1, 0, 0, 1], gamma=gamma, lam=lam
    )
    same(a, [first, nan, nan, 0.4])
    same(ret, [first + 0.2, nan, nan, 1])


def test_lambda_zero_is_one_step_and_lambda_one_the_return_minus_the_value() -> None:
    same(gae(R, V, ALL, gamma=0.9, lam=0)[0], [1 + 0.9 * 1 - 0.5, 2 + 0.9 * 1.5 - 1, 3 - 1.5])
    same(gae(R, V, ALL, gamma=0.9, lam=1)[0], [1 + 1.8 + 0.81 * 3 - 0.5, 2 + 2.7 - 1, 1.5])


def test_rows_of_a_batch_are_independent() -> None:
    a, ret = gae([R, [0, 9, 1]], [V, [0.2, 9, 0.6]], [ALL, [1, 0, 1]], gamma=0.9, lam=0.5)
    same(a, [gae(R, V, ALL, gamma=0.9, lam=0.5)[0], [0.52, nan, 0.4]])
    same(ret[1], [0.72, nan, 1])


@given(st.data())
def test_gae_with_observations_anywhere_is_gae_of_the_rollout_without_them(
    data: st.DataObject,
) -> None:
    numbers = st.floats(-5, 5)
    mask = data.draw(st.lists(st.booleans(), min_size=1, max_size=12))
    r, v = (data.draw(st.lists(numbers, min_size=len(mask), max_size=len(mask))) for _ in "rv")
    keep = np.array(mask, dtype=bool)
    a, ret = gae(r, v, mask, gamma=0.9, lam=0.7)
    short = gae(np.array(r)[keep], np.array(v)[keep], keep[keep], gamma=0.9, lam=0.7)
    same(a[keep], short[0])
    same(ret[keep], short[1])
    assert np.isnan(a[~keep]).all() and np.isnan(ret[~keep]).all()


def test_gae_refuses_shapes_and_numbers_that_cannot_be() -> None:
    with pytest.raises(ContractError, match=r"one shape, got \(3,\), \(2,\), \(3,\)"):
        gae(R, [1.0, 2.0], ALL)
    with pytest.raises(ContractError, match=r"values of 1 of 3 trained .* first at index \(1,\)"):
        gae(R, [0.5, nan, 1], ALL)


# --------------------------------------------------------------------------- whitening


def test_whitening_uses_the_unbiased_variance_with_epsilon_inside_of_the_root() -> None:
    same(whiten([1.0, -1.0], [1, 1]), [math.sqrt(0.5), -math.sqrt(0.5)])
    out = whiten([1e-4, -1e-4], [1, 1])
    assert out[0] == pytest.approx(1e-4 / math.sqrt(2e-8 + 1e-8), rel=1e-9)


def test_whitening_does_not_see_what_does_not_count() -> None:
    same(whiten([1, nan, 1e30, -1], [1, 0, 0, 1]), [math.sqrt(0.5), nan, nan, -math.sqrt(0.5)])


def test_a_value_that_counts_n_times_is_n_values() -> None:
    short = whiten([1.0, 0.0, 0.5], [3, 1, 2])
    same(whiten([1, 1, 1, 0, 0.5, 0.5], [1] * 6), np.repeat(short, [3, 1, 2]))


def test_equal_values_become_exactly_zero_and_nothing_stays_nothing() -> None:
    """A constant reward that was whitened must not turn into noise."""
    assert whiten([0.1 + 0.2, 0.3, 0.3], [5, 1, 7]).tolist() == [0, 0, 0]
    assert whiten([3.0], [1]).tolist() == [0]
    assert np.isnan(whiten([1.0, 2.0], [0, 0])).all()


def test_whitening_refuses_a_counted_nan() -> None:
    with pytest.raises(ContractError, match="1 of 2 values"):
        whiten([nan, 1.0], [1, 1])


# --------------------------------------------------------------------------- REINFORCE++


def test_token_returns_give_the_reference_values() -> None:
    same(token_returns(R, ALL, gamma=0.5), [2.75, 3.5, 3])


def test_token_returns_carry_over_observations_whose_own_reward_is_never_read() -> None:
    """Multiplied by the mask at the end: an observation has no return."""
    same(token_returns([1, 5, 5, 2, 3], [1, 0, 0, 1, 1], gamma=0.5), [2.75, nan, nan, 3.5, 3])


def test_reinforce_pp_whitens_over_tokens(group: Groups, trajectory: Trajectories) -> None:
    """Rewards 1 (two tokens) and 0 (six): mean 0.25, variance (2 * 0.5625 + 6 * 0.0625) / 7."""
    members = [trajectory(0, 0, 1.0, trained=2), trajectory(0, 1, 0.0, trained=6, observed=50)]
    s = math.sqrt((2 * 0.5625 + 6 * 0.0625) / 7)
    out = advantages([group(0, members)], "reinforce_pp")
    assert out == pytest.approx({"0/0": 0.75 / s, "0/1": -0.25 / s}, abs=1e-6)


def test_the_baseline_variant_subtracts_the_group_mean_first(
    group: Groups, trajectory: Trajectories
) -> None:
    """Centred outcomes +-0.5: six tokens are up and four are down, mean 0.1."""
    groups = [
        group(0, [trajectory(0, 0, 1.0, trained=4), 0.0]),
        group(1, [trajectory(1, 0, 8.0), trajectory(1, 1, 9.0)]),
    ]
    mean = (6 * 0.5 - 4 * 0.5) / 10
    s = math.sqrt((6 * (0.5 - mean) ** 2 + 4 * (-0.5 - mean) ** 2) / 9)
    up, down = (0.5 - mean) / s, (-0.5 - mean) / s
    out = list(advantages(groups, "reinforce_pp_baseline").values())
    assert out == pytest.approx([up, down, down, up], abs=1e-6)


@pytest.mark.parametrize("baseline", [False, True])
def test_per_token_and_per_rollout_agree_where_nothing_but_the_outcome_is_paid(
    group: Groups, trajectory: Trajectories, baseline: bool
) -> None:
    groups = [
        group(0, [trajectory(0, 0, 1.0, trained=4, branches=2), trajectory(0, 1, 0.0, observed=9)]),
        group(1, [0.5, 0.25]),
    ]
    whole = advantages(groups, "reinforce_pp_baseline" if baseline else "reinforce_pp")
    tokens = token_advantages(groups, {}, baseline=baseline)
    for t in (t for g in groups for t in g.trajectories):
        expected = per_node(t, whole[t.id])
        assert expected.keys() == tokens[t.id].keys()
        for node, values in expected.items():
            same(tokens[t.id][node], values)


def test_the_outcome_is_paid_on_the_last_trained_token_and_penalties_where_they_fall(
    group: Groups, trajectory: Trajectories
) -> None:
    """Two turns with a tool between them; gamma 0.5, k1 penalties, one of them on the tool."""
    nodes = [seen(0, None, 7), said(1, 0, 2), seen(2, 1, 8, 9), said(3, 2, 1), seen(4, 3, 5)]
    talk = trajectory(0, 0, 1.0, nodes=nodes)
    flat = trajectory(0, 1, 0.0, trained=1)
    penalties = {"0/0": {1: (-0.1, -0.2), 2: (-99.0, nan), 3: (-0.4,)}}
    out = token_advantages([group(0, [talk, flat])], penalties, gamma=0.5)
    last = 1 - 0.4
    second = -0.2 + 0.5 * last
    returns = [-0.1 + 0.5 * second, second, last, 0.0]
    a, b, c, d = whiten(returns, [1] * 4).tolist()
    same(out["0/0"][0], [nan])
    same(out["0/0"][1], [a, b])
    same(out["0/0"][2], [nan, nan])
    same(out["0/0"][3], [c])
    same(out["0/0"][4], [nan])
    same(out["0/1"][1], [d])


def test_penalties_of_another_length_are_refused(group: Groups) -> None:
    with pytest.raises(ContractError, match="0/0 has 3 tokens, but 2 rewards"):
        token_advantages([group(0, [1.0])], {"0/0": {1: (0.1,)}})


# --------------------------------------------------------------------------- layout


def test_per_node_puts_nan_where_nothing_is_trained(trajectory: Trajectories) -> None:
    nodes = [seen(0, None, 7, 8), said(1, 0, 2), said(2, 1, 2, trained=False)]
    out = per_node(trajectory(0, 0, 1.0, nodes=nodes), 0.5)
    same(out[0], [nan, nan])
    assert out[1] == (0.5, 0.5)
    same(out[2], [nan, nan])


def test_chain_and_unchain_are_inverse(trajectory: Trajectories) -> None:
    nodes = [seen(0, None, 7, 8), said(1, 0, 2), seen(2, 1), said(3, 2, 1)]
    t = trajectory(0, 0, 1.0, nodes=nodes)
    assert chain(t).tolist() == [False, False, True, True, True]
    assert unchain(t, np.arange(5.0)) == {0: (0, 1), 1: (2, 3), 2: (), 3: (4,)}
    with pytest.raises(ContractError, match="5 tokens, but 4 values"):
        unchain(t, np.arange(4.0))


def test_a_node_with_trained_tokens_may_not_be_left_out(trajectory: Trajectories) -> None:
    t = trajectory(0, 0, 1.0)
    assert per_node(t, {1: (1.0, 2.0)})[1] == (1, 2)
    with pytest.raises(ContractError, match="node 1 has 2 tokens and no advantages"):
        per_node(t, {0: (nan,)})
    with pytest.raises(ContractError, match="node 1 has 2 tokens and 1 advantages"):
        per_node(t, {1: (1.0,)})
