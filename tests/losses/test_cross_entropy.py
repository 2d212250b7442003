"""Cross-entropy on demonstrated tokens."""

from __future__ import annotations

import math

import pytest
import torch
from jaxtyping import TypeCheckError

from treadle.errors import ContractError
from treadle.losses import cross_entropy_loss


def test_it_is_the_mean_negative_log_likelihood_of_torch() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 11), torch.randint(0, 11, (6,))
    logp = logits.log_softmax(-1)[torch.arange(6), targets]
    trained = torch.tensor([False, True, True, False, True, True])
    out = cross_entropy_loss(logp, trained, num_global_tokens=4)
    wanted = torch.nn.functional.cross_entropy(logits[trained], targets[trained])
    assert out.loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert out.stats["nll"].item() == pytest.approx(4 * wanted.item(), abs=1e-5)


def test_nan_on_an_untrained_token_reaches_neither_loss_nor_gradient() -> None:
    logp = torch.tensor([math.nan, -2.0], requires_grad=True)
    out = cross_entropy_loss(logp, torch.tensor([False, True]), num_global_tokens=1)
    out.loss.backward()
    assert logp.grad is not None
    assert out.loss.item() == 2.0 and logp.grad.tolist() == [0.0, -1.0]


def test_the_denominator_is_the_whole_step() -> None:
    """Two micro-batches of 1 and 3 tokens add up to the mean over 4."""
    parts = [torch.tensor([-4.0]), torch.tensor([-1.0, -2.0, -1.0])]
    total = sum(
        cross_entropy_loss(p, torch.ones(len(p), dtype=torch.bool), num_global_tokens=4).loss.item()
        for p in parts
    )
    assert total == pytest.approx(2.0)


def test_bad_lengths_and_an_empty_step_raise() -> None:
    one = torch.tensor([True])
    with pytest.raises((ContractError, TypeCheckError)):
        cross_entropy_loss(torch.zeros(2), one, num_global_tokens=1)
    with pytest.raises(ContractError, match="must be >= 1"):
        cross_entropy_loss(torch.zeros(1), one, num_global_tokens=0)
