"""`learn.credit`: what each setting does to a batch, in which order, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.advantage.conftest import said, seen
from treadle.advantage import advantages
from treadle.advantage.credit import (
    credit_metrics,
    credited,
    settings_of,
    teaches_by_credit,
    turn_rewards,
    verdicts,
)
from treadle.advantage.credit_agents import recursive
from treadle.algorithms import ALGORITHMS, describe, resolve, resolve_run
from treadle.batch import samples
from treadle.config import CreditConfig, LearnConfig, RolloutConfig, RunConfig, override
from treadle.errors import ConfigError, ContractError
from treadle.types import Group, TokenSpan, Trajectory

Groups = Callable[..., Group]
Make = Callable[..., Trajectory]


def flagged(t: Trajectory, *spans: tuple[int, int, int]) -> Trajectory:
    return replace(t, reward=replace(t.reward, flagged=tuple(TokenSpan(*s) for s in spans)))


def qualities(make: Make, group: Groups, *pairs: tuple[float, float | None]) -> Group:
    members = [
        make(0, i, reward, parts={} if q is None else {"elegance": q})
        for i, (reward, q) in enumerate(pairs)
    ]
    return group(0, members)


def test_the_default_gives_back_what_it_was_given(group: Groups) -> None:
    values = {"0/0": 0.5, "0/1": -0.5}
    assert credited([group(0, [1.0, 0.0])], values, CreditConfig()) == values
    assert credit_metrics([group(0, [1.0, 0.0])], values, CreditConfig()) == {}


def test_quality_shares_out_as_the_reference_says(group: Groups, trajectory: Make) -> None:
    """A = [1, 1, -1, -1], f = [1, .25]: lambda 1.6, so [1.6, .4, -1, -1]."""
    batch = [qualities(trajectory, group, (1, 1.0), (1, 0.25), (-1, 0.0), (-1, 0.0))]
    credit = CreditConfig(quality="elegance")
    out = credited(batch, advantages(batch, "group_mean"), credit)
    assert [out[f"0/{i}"] for i in range(4)] == pytest.approx([1.6, 0.4, -1, -1])
    assert credit_metrics(batch, out, credit)["credit/judged_groups"] == 1


def test_a_group_that_was_not_compared_keeps_its_advantages(
    group: Groups, trajectory: Make
) -> None:
    batch = [qualities(trajectory, group, (1, 0.2), (1, None), (0, 0.0))]
    plain = advantages(batch, "group_mean")
    assert credited(batch, plain, CreditConfig(quality="elegance")) == plain
    assert verdicts(batch, "elegance") == {}


@pytest.mark.parametrize("value", [-0.1, 1.5, math.nan])
def test_a_quality_out_of_range_names_the_trajectory_and_the_setting(
    group: Groups, trajectory: Make, value: float
) -> None:
    batch = [qualities(trajectory, group, (1, 1.0), (0, value))]
    with pytest.raises(ContractError, match="trajectory 0/1 has `elegance`") as caught:
        verdicts(batch, "elegance")
    assert "learn.credit.quality" in caught.value.hint


def test_spans_that_a_reward_flagged_leave_the_mask_and_the_rows(
    group: Groups, trajectory: Make
) -> None:
    good = flagged(trajectory(0, 0, 1.0, trained=4), (1, 0, 2))
    bad = flagged(trajectory(0, 1, 0.0, trained=4), (1, 3, 4))
    batch = [group(0, [good, bad])]
    plain = advantages(batch, "group_mean")
    assert credited(batch, plain, CreditConfig()) == plain, (
        "spans are read where they are asked for"
    )
    credit = CreditConfig(span_blame=3.0)
    out = credited(batch, plain, credit)
    first, second = samples(batch, out)
    assert first.trained == (False, False, False, True, True)
    assert second.advantages[1:] == (-0.5, -0.5, -0.5, -1.5)
    assert credit_metrics(batch, out, credit) == {"credit/masked_tokens": 2.0}


def with_agent(make: Make, sample: int, reward: float, own: float) -> Trajectory:
    nodes = [
        seen(0, None, 1),
        said(1, 0, 2),
        seen(2, None, 1, agent=(0,)),
        said(3, 2, 2, agent=(0,)),
    ]
    return make(0, sample, reward, parts={"score": reward, "agent/0": own}, nodes=nodes)


def test_root_trains_the_root_alone(group: Groups, trajectory: Make) -> None:
    batch = [group(0, [with_agent(trajectory, i, r, 0.0) for i, r in enumerate((1.0, 0.0))])]
    values = advantages(batch, "group_mean")
    assert len(samples(batch, values)) == 4
    rows = samples(batch, credited(batch, values, CreditConfig(agents="root")))
    assert [row.trajectory_id for row in rows] == ["0/0", "0/1"]


def test_recursive_takes_the_place_of_the_estimate_and_teaches_where_outcomes_are_equal(
    group: Groups, trajectory: Make
) -> None:
    credit = CreditConfig(agents="recursive", agent_share=0.5)
    batch = [group(0, [with_agent(trajectory, i, 1.0, own) for i, own in enumerate((1.0, 0.0))])]
    nothing = {t.id: 0.0 for g in batch for t in g.scored}
    assert credited(batch, nothing, credit) == recursive(batch, share=0.5)
    assert teaches_by_credit(batch[0], credit)
    same = group(0, [with_agent(trajectory, i, 1.0, 1.0) for i in range(2)])
    other = group(0, [with_agent(trajectory, 0, 1.0, 1.0)])
    assert not teaches_by_credit(other, credit), "a lone rollout is compared with nobody"
    assert teaches_by_credit(same, CreditConfig(quality="x")) is None


def walk(make: Make, sample: int, reward: float, turns: int, paid: list[float]) -> Trajectory:
    nodes = [seen(0, None, 1)]
    for i in range(turns):
        nodes += [said(2 * i + 1, 2 * i, 1)]
        nodes += [seen(2 * i + 2, 2 * i + 1, 7)] if i + 1 < turns else []
    t = make(0, sample, reward, nodes=nodes)
    return replace(t, info={"environment_rewards": paid} if paid else {})


def test_an_environment_pays_its_turns_where_it_paid_them_all(
    group: Groups, trajectory: Make
) -> None:
    whole = [walk(trajectory, 0, 1.0, 2, [0.2, 0.8]), walk(trajectory, 1, 0.0, 2, [0.1])]
    assert turn_rewards([group(0, whole)]) == {"0/0": [0.2, 0.8], "0/1": [0.1, 0.0]}
    other = [whole[0], walk(trajectory, 1, 0.0, 3, [0.1])]
    assert turn_rewards([group(0, other)]) == {}, "one that paid now and then says not which turn"
    assert turn_rewards([group(0, [whole[0], walk(trajectory, 1, 0.0, 2, [])])]) == {}


def test_turns_teach_where_outcomes_are_equal(group: Groups, trajectory: Make) -> None:
    """Both solve it, one a turn sooner."""
    credit = CreditConfig(turn_weight=1.0, turn_gamma=0.5)
    fast, slow = walk(trajectory, 0, 1.0, 1, []), walk(trajectory, 1, 1.0, 2, [])
    batch = group(0, [fast, slow])
    assert teaches_by_credit(batch, credit)
    out = credited([batch], {"0/0": 0.0, "0/1": 0.0}, credit)
    assert out["0/0"][1] == (0.25,) and out["0/1"][1] == (-0.25,)  # type: ignore[index]


# --------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"agent_share": 0.3}, "agent_share` is 0.3, but nothing reads it"),
        ({"turn_gamma": 0.9}, "turn_gamma` is 0.9, but nothing reads it"),
        ({"quality_cap": 3.0}, "quality_cap` is 3.0, but nothing reads it"),
        ({"span_blame": 0.5}, "span_blame` must be 0, or >= 1"),
        ({"turn_weight": -1.0}, "turn_weight` must be >= 0"),
        ({"turn_weight": 1.0, "turn_gamma": 1.5}, r"turn_gamma` must be in \[0, 1\]"),
        ({"quality": "x", "quality_cap": 0.5}, "quality_cap` must be >= 1"),
        ({"agents": "some"}, "must be one of `all`, `root`, `recursive`"),
    ],
)
def test_a_setting_that_nothing_reads_or_that_makes_no_sense_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        CreditConfig(**options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["learn.credit.quality=x", "learn.advantage=reinforce"], "sum to 0 over the rollouts"),
        (["learn.credit.quality=x", "learn.advantage=opo"], "sum to 0 over the rollouts"),
        (["learn.credit.quality=x", "learn.credit.agents=recursive"], "of recursive agents"),
        (["learn.credit.agents=recursive", "learn.advantage=rloo"], "nothing reads it"),
        (["learn.credit.agents=recursive", "rollout.group_size=1"], "with one trajectory"),
        (["learn.spread_keep=0.9", "learn.advantage=reinforce"], "reads more"),
        (["learn.spread_keep=0.9", "learn.credit.turn_weight=1"], "credit of .* reads more"),
        (["learn.spread_keep=0.9", "learn.zero_variance=keep"], "without any spread"),
    ],
)
def test_ways_that_contradict_each_other_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_run(override(RunConfig(rollout=RolloutConfig()), settings), ())


def test_the_plan_has_every_number_of_the_credit() -> None:
    assert describe(ALGORITHMS["gigpo"])["credit"] == {"turn_weight": 1.0, "turn_gamma": 0.95}
    rao = describe(ALGORITHMS["rao"])
    assert (rao["advantage"], rao["credit"]) == (
        "recursive",
        {"agents": "recursive", "agent_share": 0.4},
    )
    found = resolve(LearnConfig(algorithm="gigpo", credit=CreditConfig()))
    assert "credit" not in describe(found), "{} switches a preset's off"
    quality = settings_of(CreditConfig(quality="x"))
    assert quality == {"quality": "x", "quality_cap": 2.0}
