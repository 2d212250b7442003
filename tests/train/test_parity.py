"""The parity guard: silent when right, loud with the place when wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from treadle.config import LearnConfig
from treadle.errors import ContractError
from treadle.train import Parity, Trainer, guard, parity
from treadle.types import Sample

Draw = Callable[..., list[Sample]]
LEARN = LearnConfig()


def shifted(samples: list[Sample], row: int, by: float) -> list[Sample]:
    """The last logprob of one row, moved."""
    s = samples[row]
    return [
        *samples[:row],
        replace(s, logprobs=(*s.logprobs[:-1], s.logprobs[-1] + by)),
        *samples[row + 1 :],
    ]


def result(mean: float, dtype: torch.dtype) -> Parity:
    return Parity(mean_abs=mean, max_abs=1.0, num_tokens=10, dtype=dtype, worst="here")


def test_the_sampler_and_the_trainer_of_one_policy_agree(policy: Any, draw_step: Draw) -> None:
    samples = draw_step(policy)
    found = parity(policy, samples)
    assert found.mean_abs < 1e-6 and found.max_abs < 1e-5
    assert found.num_tokens == sum(sum(s.trained) for s in samples)
    guard(found, LEARN)


def test_numbers_and_place_of_a_known_difference(policy: Any, draw_step: Draw) -> None:
    samples = draw_step(policy)
    found = parity(policy, shifted(samples, 4, 0.5), micro_tokens=16)
    n = sum(sum(s.trained) for s in samples)
    assert found.max_abs == pytest.approx(0.5, abs=1e-5)
    assert found.mean_abs == pytest.approx(0.5 / n, abs=1e-5)
    length = len(samples[4].ids)
    assert found.worst.startswith(f"trajectory 1/1, token {length - 1} of {length} (id ")


def test_the_step_computes_the_same_without_a_second_forward(policy: Any, draw_step: Draw) -> None:
    samples = shifted(draw_step(policy), 4, 1e-3)
    alone = parity(policy, samples)
    calls = []
    policy.hidden = lambda ids, layout, inner=policy.hidden: (calls.append(1), inner(ids, layout))[
        1
    ]
    alone_in_step = replace(LEARN, collapse_every=0)
    step = Trainer(policy, alone_in_step).step(samples, step=0, guard=True)
    assert len(calls) == 1
    assert step.parity is not None
    assert step.parity.mean_abs == pytest.approx(alone.mean_abs)
    assert step.parity.worst == alone.worst


def test_stale_weights_stop_the_run_before_anything_is_learnt(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    """The engine still serves other weights than the trainer has."""
    policy = make_policy(seed=1)
    samples = draw_step(make_policy(seed=0))
    before = {k: p.detach().clone() for k, p in policy.parameters().items()}
    trainer = Trainer(policy, LEARN)
    with pytest.raises(ContractError, match=r"disagree .* nats over \d+ tokens \(bound 0.001") as e:
        trainer.step(samples, step=0, guard=True)
    assert "trajectory" in str(e.value) and "hint:" in str(e.value)
    assert all(torch.equal(before[k], p) for k, p in policy.parameters().items())
    assert all(p.grad is None for p in policy.parameters().values())


def test_a_wrong_temperature_stops_the_run(policy: Any, draw_step: Draw) -> None:
    """B025: the sampler reported untempered logprobs of a tempered distribution."""
    samples = [replace(s, temperature=0.5) for s in draw_step(policy, temperature=1.0)]
    with pytest.raises(ContractError, match="disagree"):
        Trainer(policy, LEARN).step(samples, step=0, guard=True)


def test_only_tokens_of_the_current_version_are_compared(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    policy = make_policy()
    stale = [replace(s, ordinal=s.ordinal + 100) for s in draw_step(make_policy(seed=1), version=0)]
    fresh = draw_step(policy, version=1)
    found = Trainer(policy, LEARN).step(stale + fresh, step=1, guard=True).parity
    assert found is not None
    assert found.num_tokens == sum(sum(s.trained) for s in fresh)


def test_a_guard_without_a_token_to_compare_proves_nothing(policy: Any, draw_step: Draw) -> None:
    with pytest.raises(ContractError, match="no trained token sampled by version 1"):
        Trainer(policy, LEARN).step(draw_step(policy, version=0), step=1, guard=True)


@pytest.mark.parametrize(
    ("dtype", "fine", "broken"),
    [(torch.float32, 9e-4, 1.1e-3), (torch.bfloat16, 3.9e-2, 4.1e-2)],
)
def test_the_bound_depends_on_the_dtype(dtype: torch.dtype, fine: float, broken: float) -> None:
    guard(result(fine, dtype), LEARN)
    with pytest.raises(ContractError):
        guard(result(broken, dtype), LEARN)
    guard(result(broken, dtype), LearnConfig(parity_stop=0.1))


def test_nan_is_a_difference(policy: Any, draw_step: Draw) -> None:
    with torch.no_grad():
        policy.parameters()["head"][0, 0] = math.nan
    found = parity(policy, draw_step(policy.__class__()))
    assert math.isnan(found.mean_abs) and math.isnan(found.max_abs) and found.worst
    with pytest.raises(ContractError, match="nan nats"):
        guard(found, LEARN)
