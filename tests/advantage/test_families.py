"""Each family of estimators against reference values and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from treadle.advantage import advantages, baseline_metrics, running_baselines, teaches
from treadle.advantage.batch_std import batch_std
from treadle.advantage.gdpo import gdpo
from treadle.advantage.maxrl import maxrl
from treadle.advantage.opo import opo
from treadle.advantage.reinforce import next_baseline
from treadle.errors import ConfigError, ContractError
from treadle.types import Group, Party, Trajectory

Groups = Callable[..., Group]
Trajectories = Callable[..., Trajectory]


def values(groups: list[Group], estimator: str, **given: object) -> list[float]:
    return list(advantages(groups, estimator, **given).values())  # type: ignore[arg-type]


# --------------------------------------------------------------------------- REINFORCE


def test_reinforce_subtracts_nothing_the_batch_mean_or_the_mean_of_earlier_steps(
    group: Groups,
) -> None:
    groups = [group(0, [1, 0, 0]), group(1, [1])]
    assert values(groups, "reinforce") == [1, 0, 0, 1]
    assert values(groups, "reinforce_batch_mean") == [0.5, -0.5, -0.5, 0.5]
    assert values(groups, "reinforce_running", baseline=0.25) == [0.75, -0.25, -0.25, 0.75]
    assert values(groups, "reinforce_running") == [1, 0, 0, 1]


def test_only_the_running_estimator_reads_the_running_baseline(group: Groups) -> None:
    for estimator in ("reinforce", "reinforce_batch_mean", "group_mean", "reinforce_pp"):
        groups = [group(0, [1, 0, 0])]
        assert values(groups, estimator, baseline=9.0) == values(groups, estimator)


def test_the_batch_mean_is_over_rollouts_not_over_branches_or_groups(
    group: Groups, trajectory: Trajectories
) -> None:
    groups = [group(0, [trajectory(0, 0, 1.0, branches=5), 0.0, 0.0]), group(1, [1.0])]
    assert values(groups, "reinforce_batch_mean") == [0.5, -0.5, -0.5, 0.5]


def test_the_running_baseline_starts_at_the_first_mean_and_then_decays() -> None:
    assert next_baseline(None, 0.4) == 0.4
    assert next_baseline(0.4, 1.0) == pytest.approx(0.95 * 0.4 + 0.05 * 1.0)
    assert next_baseline(0.4, 1.0, decay=0.5) == pytest.approx(0.7)


def test_the_running_baseline_survives_in_the_metrics_of_a_step(group: Groups) -> None:
    first = baseline_metrics([group(0, [1, 0, 0]), group(1, [1])], {})
    assert first == {"advantage/policy_baseline": 0.5}
    stored = running_baselines({"reward/mean": 3.0, **first})
    assert stored == {Party.POLICY: 0.5}
    second = baseline_metrics([group(2, [0, 0])], stored)
    assert second == {"advantage/policy_baseline": pytest.approx(0.475)}
    assert values([group(3, [1])], "reinforce_running", baseline=stored) == [0.5]


def test_a_step_in_which_nothing_was_judged_keeps_the_running_baseline(group: Groups) -> None:
    assert baseline_metrics([group(0, [None])], {Party.POLICY: 0.5}) == {
        "advantage/policy_baseline": 0.5
    }
    assert baseline_metrics([group(0, [None])], {}) == {}


# --------------------------------------------------------------------------- MaxRL


def test_maxrl_gives_the_reference_values(group: Groups) -> None:
    assert values([group(0, [1, 0, 0, 0])], "maxrl") == pytest.approx([3, -1, -1, -1], abs=2e-5)
    groups = [group(0, [6, 3]), group(1, [9, 12])]
    assert values(groups, "maxrl") == pytest.approx([1 / 3, -1 / 3, -1 / 7, 1 / 7], abs=1e-6)


def test_the_epsilon_of_maxrl_is_added_to_the_mean() -> None:
    assert maxrl([2e-6, 0])[0] == pytest.approx(0.5)


def test_maxrl_weighs_a_task_by_one_over_its_pass_rate(group: Groups) -> None:
    rare, common = group(0, [1] + [0] * 9), group(1, [1] * 5 + [0] * 5)
    plain = advantages([rare, common], "group_mean")
    out = advantages([rare, common], "maxrl")
    assert out["0/0"] / plain["0/0"] == pytest.approx(10, rel=1e-4)  # type: ignore[operator]
    assert out["1/0"] / plain["1/0"] == pytest.approx(2, rel=1e-4)  # type: ignore[operator]


def test_maxrl_without_a_success_is_zero_and_refuses_a_penalty(group: Groups) -> None:
    assert maxrl([0.0, 0.0]) == [0, 0]
    with pytest.raises(ConfigError, match="needs rewards >= 0, got -1"):
        advantages([group(0, [1, -1])], "maxrl")


# --------------------------------------------------------------------------- OPO


def test_opo_gives_the_reference_values(group: Groups, trajectory: Trajectories) -> None:
    """The baseline is 10 / 100; the longer a rollout, the more of it is its own reward."""
    lengths = [10, 30, 20, 40]
    assert opo([1, 0, 0, 0], lengths) == pytest.approx([0.9, -0.1, -0.1, -0.1])
    members = [trajectory(0, i, float(i == 0), trained=n) for i, n in enumerate(lengths)]
    assert values([group(0, members)], "opo") == pytest.approx([0.9, -0.1, -0.1, -0.1])


def test_opo_of_equal_lengths_is_the_group_mean(group: Groups) -> None:
    groups = [group(0, [1, 0.5, 0, 0])]
    assert values(groups, "opo") == pytest.approx(values(groups, "group_mean"))


# --------------------------------------------------------------------------- one deviation


def test_batch_std_has_the_mean_of_the_group_and_the_deviation_of_the_batch(
    group: Groups,
) -> None:
    """Differences +-1.5, +-1.5: sum of squares 9, 9 / 3 = 3, root 1.7320508."""
    groups = [group(0, [6, 3]), group(1, [9, 12])]
    expected = [1.5 / math.sqrt(3) * sign for sign in (1, -1, -1, 1)]
    assert values(groups, "batch_std") == pytest.approx(expected, abs=1e-6)


def test_batch_std_has_one_factor_for_all_groups(group: Groups) -> None:
    groups = [group(0, [1, 0, 0, 0]), group(1, [1, 1, 0, 0])]
    plain, out = values(groups, "group_mean"), values(groups, "batch_std")
    assert {round(a / b, 9) for a, b in zip(out, plain, strict=True)} == {round(out[0] / 0.75, 9)}


def test_the_deviation_of_the_batch_is_taken_after_groups_without_spread_are_out(
    group: Groups,
) -> None:
    differ, same = group(0, [1, 0]), [group(i, [1, 1, 1]) for i in range(1, 9)]
    alone = values([differ], "batch_std")
    assert alone == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-5)
    assert values([differ, *same], "batch_std")[:2] == alone
    assert values([differ, *same], "batch_std")[2:] == [0.0] * 24


def test_the_deviation_of_an_empty_batch_is_not_asked_for() -> None:
    assert batch_std([]) == []


# --------------------------------------------------------------------------- several rewards


def graded(ordinal: int, rewards: list[dict[str, float]], make: Trajectories) -> list[Trajectory]:
    return [make(ordinal, i, sum(r.values()), parts=r) for i, r in enumerate(rewards)]


def test_gdpo_worked_by_hand(group: Groups, trajectory: Trajectories) -> None:
    """Each reward of a pair is +-0.7071068 after the group; weights 1 and 0.5 give sums +-1.0606602
    (they agree) and +-0.3535534 (they disagree). Whitened over the four: the variance is
    2 (1.125 + 0.125) / 3."""
    agree = [{"right": 1.0, "short": 100.0}, {"right": 0.0, "short": 0.0}]
    differ = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 100.0}]
    groups = [
        group(0, graded(0, agree, trajectory)),
        group(1, graded(1, differ, trajectory)),
    ]
    s = math.sqrt(2 * (1.125 + 0.125) / 3)
    expected = [1.0606602 / s, -1.0606602 / s, 0.3535534 / s, -0.3535534 / s]
    out = values(groups, "gdpo", weights={"right": 1.0, "short": 0.5})
    assert out == pytest.approx(expected, abs=2e-6)


def test_gdpo_does_not_let_a_reward_of_large_spread_drown_another(
    group: Groups, trajectory: Trajectories
) -> None:
    """By the sum of both the first rollout is 99 below the second; by GDPO they are equal."""
    rewards = [{"right": 1.0, "style": 0.0}, {"right": 0.0, "style": 100.0}]
    agree = [{"right": 1.0, "style": 100.0}, {"right": 0.0, "style": 0.0}]
    groups = [group(0, graded(0, rewards, trajectory)), group(1, graded(1, agree, trajectory))]
    out = values(groups, "gdpo", weights={"right": 1.0, "style": 1.0})
    assert out[:2] == pytest.approx([0, 0], abs=1e-5)
    assert values(groups, "grpo")[0] == pytest.approx(-math.sqrt(0.5), abs=1e-6)


def test_gdpo_teaches_where_the_rewards_differ_although_their_sum_does_not(
    group: Groups, trajectory: Trajectories
) -> None:
    rewards = [{"right": 1.0, "short": 0.0}, {"right": 0.0, "short": 1.0}]
    one = group(0, graded(0, rewards, trajectory))
    assert not teaches(one, "grpo")
    assert teaches(one, "gdpo", {"right": 2.0, "short": 1.0})
    first, second = values([one], "gdpo", weights={"right": 2.0, "short": 1.0})
    assert first == -second > 0


def test_a_reward_that_is_equal_over_a_group_says_nothing_there(
    group: Groups, trajectory: Trajectories
) -> None:
    """And the others are still heard."""
    rewards = [{"a": 1.0, "b": 5.0}, {"a": 0.0, "b": 5.0}]
    weights = {"a": 1.0, "b": 3.0}
    both = gdpo([rewards], weights)
    assert both == gdpo([rewards], {"a": 1.0})
    one = group(0, graded(0, rewards, trajectory))
    assert teaches(one, "gdpo", weights)
    assert values([one], "gdpo", weights=weights) == both[0]
    assert not teaches(one, "gdpo", {"b": 1.0})


def test_gdpo_names_what_it_lacks(group: Groups, trajectory: Trajectories) -> None:
    members = graded(0, [{"right": 1.0}, {"right": 0.0, "short": 1.0}], trajectory)
    with pytest.raises(ConfigError, match="needs the weight of each reward"):
        advantages([group(0, members)], "gdpo")
    with pytest.raises(ContractError, match="0/0 of group 0 has no reward `short`; it has right"):
        advantages([group(0, members)], "gdpo", weights={"right": 1.0, "short": 1.0})
    bad = graded(0, [{"right": 1.0, "short": math.nan}, {"right": 0.0, "short": 1.0}], trajectory)
    bad = [trajectory(0, i, 1.0, parts=t.reward.parts) for i, t in enumerate(bad)]
    with pytest.raises(ContractError, match="0/0 of group 0 has reward `short` nan"):
        advantages([group(0, bad)], "gdpo", weights={"right": 1.0, "short": 1.0})


# --------------------------------------------------------------------------- epsilon


def test_the_epsilon_of_grpo_is_added_to_the_deviation_not_to_the_variance(group: Groups) -> None:
    """Rewards 0 and 2e-6: deviation 1.41421e-6. Inside of the root it would be 1e-3."""
    out = values([group(0, [2e-6, 0])], "grpo")
    assert out[0] == pytest.approx(1e-6 / (math.sqrt(2) * 1e-6 + 1e-6), rel=1e-6)
    out = values([group(0, [2e-6, 0])], "batch_std")
    assert out[0] == pytest.approx(1e-6 / (math.sqrt(2) * 1e-6 + 1e-6), rel=1e-6)
