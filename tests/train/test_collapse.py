"""Dependence of outputs on prompts: by hand, against rows scored alone, and a planted fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from treadle.config import LearnConfig
from treadle.errors import ConfigError
from treadle.train import Trainer
from treadle.train.collapse import (
    METRICS,
    OUTPUT_TOKENS,
    CollapseWatch,
    choose,
    crossed,
    dependence,
)
from treadle.types import Sample

Make = Callable[..., Any]

EVERY_STEP = LearnConfig(collapse_every=1, lr=1e-2)


def rows(policy: Any, prompts: int = 8, taskset: str = "", seed: int = 0) -> list[Sample]:
    """Two rows of each prompt; prompts differ in their first two tokens and end alike."""
    generator = torch.Generator().manual_seed(seed)
    return [
        replace(
            policy.draw(
                [i, (3 * i) % 11, 5],
                3 + (i + k) % 3,
                generator,
                advantage=1.0 - 2 * k,
                ordinal=i,
                name=f"{i}/{k}",
            ),
            taskset=taskset,
        )
        for i in range(prompts)
        for k in range(2)
    ]


def collapsed(make: Make) -> Any:
    """A policy that sees its last token alone: what the prompts say does not reach the outputs."""
    policy = make()
    with torch.no_grad():
        for name in ("value", "position"):
            policy.parameters()[name].zero_()
        policy.parameters()["head"].mul_(4)
    return policy


def healthy(make: Make) -> Any:
    """A policy whose answers hang on the whole prompt."""
    policy = make()
    with torch.no_grad():
        policy.parameters()["value"].mul_(6)
        policy.parameters()["embedding"].mul_(2)
        policy.parameters()["head"].mul_(4)
    return policy


# --------------------------------------------------------------------------- by hand


def test_information_and_retrieval_of_a_matrix_by_hand() -> None:
    """Row 0: own -1, others -2, -3, -4. Row 1: own is second best. Row 2: two are alike. Row 3:
    own prompt alone is possible."""
    scores = np.array(
        [
            [-1.0, -2.0, -3.0, -4.0],
            [-0.5, -1.0, -9.0, -9.0],
            [-7.0, -2.0, -2.0, -7.0],
            [-99.0, -99.0, -99.0, -1.0],
        ]
    )
    found = dependence(scores)
    own = [-1.0, -1.0, -2.0, -1.0]
    terms = [
        a - (math.log(sum(math.exp(x) for x in row)) - math.log(4))
        for a, row in zip(own, scores, strict=True)
    ]
    assert terms[0] == pytest.approx(0.94610, abs=1e-5)
    assert terms[3] == pytest.approx(math.log(4))
    assert found.information_nats == pytest.approx(sum(terms) / 4)
    assert found.retrieval == pytest.approx((1 + 0 + 0.5 + 1) / 4)
    assert found.pairs == 4 and not found.at_chance


def test_outputs_that_are_alike_under_all_prompts_are_exactly_at_chance() -> None:
    scores = np.repeat(np.arange(-8.0, 0.0)[:, None], 8, axis=1)
    noise = np.random.default_rng(0).uniform(-2e-4, 2e-4, (8, 8))
    found = dependence(scores + noise)
    assert found.retrieval == pytest.approx(1 / 8)
    assert found.information_nats == pytest.approx(0.0, abs=1e-3)
    assert found.at_chance


def test_outputs_that_only_their_own_prompt_allows_reach_the_bounds() -> None:
    found = dependence(np.where(np.eye(16, dtype=bool), -0.1, -500.0))
    assert found.retrieval == 1.0
    assert found.information_nats == pytest.approx(math.log(16))


def test_a_task_of_two_right_answers_is_not_at_chance() -> None:
    """yes or no: half of the prompts suit an output as well as its own, and retrieval is at twice
    chance; information is what tells it from a collapse."""
    answer = np.arange(8) % 2
    found = dependence(np.where(answer[:, None] == answer[None], -0.05, -3.0))
    assert found.retrieval == pytest.approx(2 / 8)
    assert found.information_nats > 0.5
    assert not found.at_chance


def test_what_is_measured_is_what_rows_scored_one_by_one_give(make_policy: Make) -> None:
    policy = healthy(make_policy)
    samples = rows(policy)
    metrics, _ = CollapseWatch(policy, EVERY_STEP, seed=3).measure(0, samples)
    chosen = choose(samples, 8, max_context=64, seed=3, step=0)
    assert len(chosen) == 8 and len({s.ids[:3] for s in chosen}) == 8
    scores = np.zeros((8, 8))
    for i, output in enumerate(chosen):
        for j, other in enumerate(chosen):
            ids, logps = list(other.ids[:3]), []
            for token in output.ids[3:]:
                logps.append(float(policy.distribution(ids)[token]))
                ids.append(token)
            scores[i, j] = sum(logps) / len(logps)
    found = dependence(scores)
    assert metrics == {
        "collapse/retrieval_frac": pytest.approx(found.retrieval),
        "collapse/information_nats": pytest.approx(found.information_nats, abs=1e-5),
        "collapse/num_pairs": 8.0,
        "collapse/at_chance": 0.0,
    }
    assert set(metrics) < set(METRICS)


# --------------------------------------------------------------------------- the planted fault


def alarms(policy: Any, samples: Sequence[Sample], steps: int) -> list[str]:
    watch = CollapseWatch(policy, EVERY_STEP, seed=0)
    return [watch.measure(step, samples)[1] for step in range(steps)]


def test_a_policy_that_answers_every_prompt_alike_raises_an_alarm_once(make_policy: Make) -> None:
    policy = collapsed(make_policy)
    found = alarms(policy, rows(policy), 6)
    assert [bool(alarm) for alarm in found] == [False, False, True, False, False, False]
    assert "12% of 8 are most probable under their own prompt, by chance 12%" in found[2]


def test_a_policy_that_reads_its_prompts_raises_none(make_policy: Make) -> None:
    policy = healthy(make_policy)
    metrics, _ = CollapseWatch(policy, EVERY_STEP, seed=0).measure(0, rows(policy))
    assert metrics["collapse/retrieval_frac"] >= 0.75
    assert metrics["collapse/information_nats"] > 0.3
    assert not any(alarms(policy, rows(policy), 6))


def test_entropy_does_not_see_what_this_sees(make_policy: Make) -> None:
    """Both policies are far from deterministic."""
    found = {}
    for plant in (collapsed, healthy):
        policy = plant(make_policy)
        metrics = Trainer(policy, EVERY_STEP).step(rows(policy), step=0).metrics
        assert metrics["policy/entropy_nats"] > 0.3
        found[plant.__name__] = metrics["collapse/retrieval_frac"]
    assert found["healthy"] > 4 * found["collapsed"]


# --------------------------------------------------------------------------- in the step


def test_measuring_changes_nothing_of_the_step(make_policy: Make) -> None:
    found = []
    for every in (0, 1):
        policy = make_policy()
        trainer = Trainer(policy, replace(EVERY_STEP, collapse_every=every))
        results = [trainer.step(rows(policy), step=step) for step in range(2)]
        found.append(
            (
                [p.detach().clone() for p in policy.parameters().values()],
                [
                    {k: v for k, v in r.metrics.items() if not k.startswith(("time/", "collapse/"))}
                    for r in results
                ],
            )
        )
        measured = ["collapse/retrieval_frac" in r.metrics for r in results]
        assert measured == [every == 1] * 2
        assert [r.metrics.get("time/collapse_s", 0) > 0 for r in results] == measured
    assert all(torch.equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True))
    assert found[0][1] == found[1][1]


def test_it_measures_at_its_interval_and_alarms_through_the_step(make_policy: Make) -> None:
    policy = collapsed(make_policy)
    trainer = Trainer(policy, LearnConfig(collapse_every=3, lr=1e-9))
    results = [trainer.step(rows(policy), step=step) for step in range(8)]
    assert [bool(r.metrics.keys() & METRICS.keys()) for r in results] == [
        step % 3 == 0 for step in range(8)
    ]
    assert [len(r.alarms) for r in results] == [0] * 6 + [1, 0]


def test_neither_the_split_nor_the_order_of_rows_matters(make_policy: Make) -> None:
    policy = healthy(make_policy)
    samples = rows(policy)
    found = [
        CollapseWatch(policy, replace(EVERY_STEP, micro_tokens=size), seed=0).measure(0, given)[0]
        for size, given in ((4096, samples), (16, samples), (64, samples[::-1]))
    ]
    for other in found[1:]:
        assert other == pytest.approx(found[0], abs=1e-5)


def test_the_count_goes_on_after_a_resume(make_policy: Make) -> None:
    policy = collapsed(make_policy)
    first, samples = Trainer(policy, EVERY_STEP), rows(policy)
    for step in range(2):
        assert not first.collapse.measure(step, samples)[1]
    again = Trainer(collapsed(make_policy), EVERY_STEP)
    again.load_state_dict(first.state_dict())
    assert again.collapse.measure(2, samples)[1]
    without = {k: v for k, v in first.state_dict().items() if k != "collapse"}
    anew = Trainer(collapsed(make_policy), EVERY_STEP)
    anew.load_state_dict(without)
    assert not anew.collapse.measure(2, samples)[1]


# --------------------------------------------------------------------------- which rows


def test_task_sets_take_turns_and_each_has_its_own_count(make_policy: Make) -> None:
    """Two templates, one for each task set, would be told apart by any prompts of both."""
    policy = collapsed(make_policy)
    samples = rows(policy, taskset="a") + rows(policy, taskset="b") + rows(policy, 3, taskset="c")
    found = alarms(policy, samples, 6)
    assert [bool(alarm) for alarm in found] == [False] * 4 + [True, True]
    assert "in task set a" in found[4] and "in task set b" in found[5]


def test_too_few_prompts_and_demonstrations_are_not_measured(make_policy: Make) -> None:
    policy = make_policy()
    watch = CollapseWatch(policy, EVERY_STEP, seed=0)
    assert watch.measure(0, rows(policy, 3)) == ({}, "")
    assert watch.measure(0, rows(policy, 4))[0]["collapse/num_pairs"] == 4
    shown = [
        replace(s, logprobs=(math.nan,) * len(s.ids), versions=(-1,) * len(s.ids))
        for s in rows(policy)
    ]
    assert watch.measure(0, shown) == ({}, "")


def test_the_choice_changes_with_the_step_and_is_one_row_of_a_prompt(policy: Any) -> None:
    samples = rows(policy, 11)

    def names(step: int, given: Sequence[Sample] = samples) -> list[str]:
        chosen = choose(given, 8, max_context=64, seed=0, step=step)
        return [s.trajectory_id for s in chosen]

    assert names(0) == names(0, samples[::-1])
    assert len({name.split("/")[0] for name in names(0)}) == 8
    assert len({tuple(sorted(names(step))) for step in range(4)}) > 1


def test_no_crossing_is_longer_than_the_context_and_long_outputs_are_cut(policy: Any) -> None:
    def row(i: int, prompt: int, output: int) -> Sample:
        n = prompt + output
        trained = (False,) * prompt + (True,) * output
        return Sample(
            trajectory_id=f"{i}/0", ordinal=i, ids=(i,) * n, trained=trained,
            logprobs=(-1.0,) * n, versions=(0,) * n, advantages=(0.0,) * n, temperature=1.0,
        )  # fmt: skip

    samples = [row(i, 2 + 9 * (i % 3), 3 + 9 * (i % 4)) for i in range(12)]
    for seed in range(5):
        chosen = choose(samples, 8, max_context=40, seed=seed, step=0)
        assert len(chosen) >= 4
        assert max(len(s.ids) for s in crossed(chosen)) <= 40
    long = choose([row(i, 2 + i, 700) for i in range(4)], 8, max_context=300, seed=0, step=0)
    assert [sum(s.trained) for s in crossed(long)] == [OUTPUT_TOKENS] * 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"collapse_every": -1}, "`learn.collapse_every` must be >= 0"),
        ({"collapse_pairs": 3}, "`learn.collapse_pairs` must be between 4 and 64, got 3"),
        ({"collapse_pairs": 65}, "between 4 and 64, got 65"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearnConfig(**settings)
