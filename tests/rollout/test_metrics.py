"""The numbers of a set of groups, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from treadle.errors import ErrorRecord
from treadle.rollout import METRICS, CutShort, alarms, group_metrics
from treadle.types import (
    Group,
    Message,
    Node,
    Party,
    Reward,
    SamplingParams,
    Source,
    Status,
    Task,
    Trajectory,
)

TASK = Task(id="t", taskset="set", messages=(Message(role="user", content="q"),))


def trajectory(
    sample: int,
    length: int,
    reward: float | None,
    status: Status = Status.FINISHED,
    **changes: object,
) -> Trajectory:
    prompt = Node(
        id=0,
        parent=None,
        party=Party.ENVIRONMENT,
        source=Source.OBSERVATION,
        ids=(1, 2),
        trained=(False,) * 2,
        logprobs=(math.nan,) * 2,
        versions=(-1, -1),
    )
    said = Node(
        id=1,
        parent=0,
        party=Party.POLICY,
        source=Source.SAMPLED,
        ids=(5,) * length,
        trained=(True,) * length,
        logprobs=(-1.0,) * length,
        versions=(0,) * length,
        entropies=(0.5,) * length,
    )
    return Trajectory(
        id=f"0/{sample}",
        task=TASK,
        sample=sample,
        nodes=(prompt, said) if length else (),
        status=status,
        sampling=SamplingParams(max_new_tokens=8),
        reward=Reward(value=reward, parts={} if reward is None else {"score": reward}),
        **changes,  # type: ignore[arg-type]
    )


def group(*trajectories: Trajectory) -> Group:
    return Group(ordinal=0, task=TASK, trajectories=trajectories, version=0)


def test_lengths_are_of_all_trajectories_before_anything_is_masked() -> None:
    """B052: lengths 3 and 8 (the limit)."""
    out = group_metrics([group(trajectory(0, 3, 1.0), trajectory(1, 8, None, Status.TRUNCATED))])
    assert out["rollout/sampled_tokens_min"] == 3
    assert out["rollout/sampled_tokens_max"] == 8
    assert out["rollout/sampled_tokens_mean"] == 5.5
    assert out["rollout/truncated_frac"] == 0.5
    assert out["rollout/prompt_tokens_mean"] == 2
    assert out["rollout/entropy_nats_mean"] == 0.5
    assert out["rollout/logprob_nats_mean"] == -1.0


def test_rewards_are_of_the_scored_alone_and_shares_of_all() -> None:
    down = ErrorRecord(kind="HarnessError", where="x", message="boom")
    out = group_metrics(
        [
            group(
                trajectory(0, 3, 1.0),
                trajectory(1, 3, 0.5, Status.TRUNCATED),
                trajectory(2, 3, None),
                trajectory(3, 0, None, Status.FAILED, error=down),
                trajectory(4, 3, None, Status.ABORTED),
            )
        ]
    )
    assert out["reward/mean"] == out["reward/score_mean"] == 0.75
    assert out["reward/solved_frac"] == 0.5
    assert out["reward/unscored_frac"] == 0.2
    kinds = ("finished", "truncated", "failed", "aborted")
    assert [out[f"rollout/{k}_frac"] for k in kinds] == [0.4, 0.2, 0.2, 0.2]
    assert out["rollout/num_trajectories"] == 5


def test_groups_whose_rewards_are_equal_are_a_share_of_those_that_could_differ() -> None:
    flat = group(trajectory(0, 1, 0.1), trajectory(1, 1, 0.1 + 1e-12))
    spread = group(trajectory(0, 1, 0.0), trajectory(1, 1, 1.0))
    zeros = group(trajectory(0, 1, 0.0), trajectory(1, 1, 0.0))
    single = group(trajectory(0, 1, 1.0))
    out = group_metrics([flat, spread, zeros, single])
    assert out["reward/zero_variance_frac"] == pytest.approx(2 / 3)


def test_tools_and_counts() -> None:
    out = group_metrics(
        [
            group(
                trajectory(0, 1, 1.0, tool_calls=3, tool_errors=1, duration_s=2.0),
                trajectory(1, 1, 1.0, tool_calls=1, info={"turns": 4, "unread_tool_marks": 2}),
            )
        ]
    )
    assert (out["tools/calls_mean"], out["tools/error_frac"]) == (2.0, 0.25)
    assert (out["tools/unread_frac"], out["rollout/turns_mean"]) == (0.5, 2.0)
    assert (out["rollout/duration_s_mean"], out["rollout/duration_s_max"]) == (1.0, 2.0)


def test_what_is_not_defined_is_absent_and_every_metric_is_documented() -> None:
    empty = group_metrics([])
    assert "reward/mean" not in empty and "rollout/sampled_tokens_min" not in empty
    unscored = group_metrics([group(trajectory(0, 0, None, Status.FAILED))])
    assert "reward/mean" not in unscored and "reward/zero_variance_frac" not in unscored
    full = group_metrics([group(trajectory(0, 2, 1.0, tool_calls=1), trajectory(1, 2, 0.0))])
    known = set(METRICS) - {"reward/{part}_mean"} | {"reward/score_mean"}
    assert set(full) == known
    assert all(math.isfinite(x) for out in (empty, unscored, full) for x in out.values())


def test_a_set_in_which_everything_failed_says_why() -> None:
    down = ErrorRecord(kind="ToolError", where="x", message="the service is down")
    (alarm,) = alarms([group(trajectory(0, 0, None, Status.FAILED, error=down))])
    assert "all 1 trajectories" in alarm and "ToolError: the service is down" in alarm


def test_trajectories_that_are_cut_raise_an_alarm_once_it_has_lasted() -> None:
    """More than 5%: 1 of 20 passes, 2 of 20 do not; one good step begins the count anew."""

    def step(cut: int) -> list[Group]:
        of = [Status.TRUNCATED] * cut + [Status.FINISHED] * (20 - cut)
        return [group(*(trajectory(i, 3, 1.0, status) for i, status in enumerate(of)))]

    watch = CutShort()
    assert [bool(watch.alarm(step(n))) for n in (2, 2, 1, 2, 2)] == [False] * 5
    assert watch.alarm([]) == ""
    alarm = watch.alarm(step(3))
    assert "3 of 20 trajectories were cut" in alarm and "rollout.max_new_tokens" in alarm
    assert [watch.alarm(step(n)) for n in (3, 3, 3, 3)] == [""] * 4
    assert [bool(watch.alarm(step(n))) for n in (0, 2, 2, 2)] == [False, False, False, True]
    rest = CutShort()
    assert not any(rest.alarm(step(1)) for _ in range(9))


def test_a_solved_answer_is_solved_however_long_it_was() -> None:
    """A reward function without a strict score: what the penalty took off does not count."""
    long = Reward(value=0.5, parts={"overlong": -0.5})
    out = group_metrics([group(replace(trajectory(0, 3, 1.0), reward=long))])
    assert out["reward/solved_frac"] == 1.0 and out["reward/mean"] == 0.5
    assert out["reward/overlong_mean"] == -0.5
