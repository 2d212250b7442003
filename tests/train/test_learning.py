"""Does it learn? A bandit whose best answer depends on the prompt, sampled and trained for real."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from treadle.advantage import ESTIMATORS
from treadle.batch import spread
from treadle.config import LearnConfig
from treadle.losses import POLICY_LOSSES
from treadle.train import Trainer


def rewards_of_a_run(
    policy: Any, *, loss: str = "cispo", estimator: str = "group_mean", sign: float = 1.0
) -> list[float]:
    """30 steps of 4 prompts x 8 answers of two tokens; reward: share of tokens = prompt + 4."""
    trainer = Trainer(policy, LearnConfig(lr=2e-2, loss=loss))
    generator = torch.Generator().manual_seed(0)
    means = []
    for step in range(30):
        batch, total = [], 0.0
        for prompt in range(4):
            rows = [
                policy.draw(
                    [prompt], 2, generator, ordinal=prompt, version=step, name=f"{prompt}/{i}"
                )
                for i in range(8)
            ]
            scores = [sum(t == prompt + 4 for t in row.ids[1:]) / 2 for row in rows]
            total += sum(scores)
            values = ESTIMATORS[estimator](scores)
            batch += [
                replace(r, advantages=spread(sign * a, r.trained))
                for r, a in zip(rows, values, strict=True)
            ]
        trainer.step(batch, step=step, guard=step == 0)
        means.append(total / 32)
    return means


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_thirty_steps_raise_the_reward(make_policy: Callable[..., Any], loss: str) -> None:
    means = rewards_of_a_run(make_policy(), loss=loss)
    assert sum(means[:3]) / 3 < 0.3
    assert sum(means[-3:]) / 3 > 0.8


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_every_estimator_learns(make_policy: Callable[..., Any], estimator: str) -> None:
    means = rewards_of_a_run(make_policy(), estimator=estimator)
    assert sum(means[-3:]) / 3 > 0.8


def test_the_wrong_sign_lowers_it(make_policy: Callable[..., Any]) -> None:
    means = rewards_of_a_run(make_policy(), sign=-1.0)
    assert sum(means[-3:]) / 3 < 0.5 * sum(means[:3]) / 3
