"""Supervised fine-tuning: it learns what the mask says, once per epoch, in a seeded order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from treadle.errors import DataError
from treadle.train import sft
from treadle.train.sft import sft_steps

COPY = [([i, 11, i, 10], [False, False, True, True]) for i in range(6)]
"""i SEP i END"""


def test_it_learns_to_copy(policy: Any) -> None:
    losses = sft(policy, COPY, steps=60, batch_tokens=24, lr=3e-2)
    assert losses[0] > 1.5 and losses[-1] < 0.1
    assert [int(policy.distribution([i, 11]).argmax()) for i in range(6)] == list(range(6))
    assert policy.refreshed == 60


def test_the_first_loss_is_the_mean_negative_log_likelihood(policy: Any) -> None:
    wanted = [
        -float(policy.distribution(ids[:t])[ids[t]])
        for ids, mask in COPY
        for t in range(len(ids))
        if mask[t]
    ]
    (loss,) = sft(policy, COPY, steps=1, batch_tokens=24, lr=1e-3)
    assert loss == pytest.approx(sum(wanted) / len(wanted), abs=1e-5)


def test_only_masked_tokens_are_learnt(make_policy: Callable[..., Any]) -> None:
    """The same demonstration with another token where the mask is False gives the prompt's
    embedding another gradient, but never a target."""
    policy = make_policy()
    before = policy.distribution([3])[7]
    sft(policy, [([3, 7, 5], [False, False, True])], steps=20, batch_tokens=3, lr=3e-2)
    assert float(policy.distribution([3, 7])[5].exp()) > 0.5
    assert float(policy.distribution([3])[7].exp()) < float(before.exp()) + 0.1


def test_packing_does_not_change_what_is_learnt(make_policy: Callable[..., Any]) -> None:
    runs = []
    for micro_tokens in (4096, 16):
        policy = make_policy()
        sft(policy, COPY, steps=1, batch_tokens=24, lr=1e-2, micro_tokens=micro_tokens)
        runs.append(policy.distribution([1, 11]))
    assert torch.allclose(*runs, atol=1e-4)


def test_the_order_is_a_function_of_the_seed(make_policy: Callable[..., Any]) -> None:
    a, b, c = (
        sft(make_policy(), COPY, steps=5, batch_tokens=8, lr=1e-2, seed=seed) for seed in (0, 0, 1)
    )
    assert a == b and a != c


def test_every_demonstration_is_seen_once_per_epoch(policy: Any) -> None:
    """At a negligible rate, the mean loss of an epoch's batches is that of all demonstrations."""
    losses = sft(policy, COPY, steps=3, batch_tokens=8, lr=1e-12)
    (whole,) = sft(policy, COPY, steps=1, batch_tokens=24, lr=1e-12)
    assert sum(losses) / 3 == pytest.approx(whole, abs=1e-5)


def test_a_caller_can_stop_when_it_is_satisfied(policy: Any) -> None:
    for loss in sft_steps(policy, COPY, batch_tokens=24, lr=3e-2):
        if loss < 0.5:
            break
    assert 1 < policy.refreshed < 60


def test_no_gradient_is_left_behind(policy: Any) -> None:
    sft(policy, COPY, steps=1, batch_tokens=24, lr=1e-2)
    assert all(p.grad is None for p in policy.parameters().values())


@pytest.mark.parametrize(
    "bad", [([1, 2], [True, True]), ([1, 2], [False, False]), ([1, 2], [True]), ([], [])]
)
def test_a_malformed_demonstration_is_named(policy: Any, bad: Any) -> None:
    with pytest.raises(DataError, match="demonstration 1 has"):
        sft(policy, [COPY[0], bad], steps=1, batch_tokens=8, lr=1e-2)


def test_no_demonstrations_are_refused(policy: Any) -> None:
    with pytest.raises(DataError, match="no demonstrations"):
        sft(policy, [], steps=1, batch_tokens=8, lr=1e-2)
