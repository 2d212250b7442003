"""Cross-entropy on demonstrated tokens."""

from __future__ import annotations

import math

import pytest
import torch

from tests.losses.build import run, tokens
from treadle.losses import cross_entropy_loss

NAN = math.nan


def test_it_is_the_mean_negative_log_likelihood_of_torch() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(6, 11), torch.randint(0, 11, (6,))
    logp = logits.log_softmax(-1)[torch.arange(6), targets]
    trained = [False, True, True, False, True, True]
    out = cross_entropy_loss(tokens(logp, [NAN] * 6, [NAN] * 6, trained))
    mask = torch.tensor(trained)
    wanted = torch.nn.functional.cross_entropy(logits[mask], targets[mask])
    assert out.loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    assert out.stats["ce_nll"].item() == pytest.approx(4 * wanted.item(), abs=1e-5)
    assert out.stats["ce_tokens"].item() == 4


def test_nan_on_an_untrained_token_reaches_neither_loss_nor_gradient() -> None:
    out, grad = run(cross_entropy_loss, [NAN, -2.0], [NAN, NAN], [NAN, 1.0], [False, True])
    assert out.loss.item() == 2.0 and grad.tolist() == [0.0, -1.0]


def test_neither_behaviour_nor_advantage_is_looked_at() -> None:
    out, grad = run(cross_entropy_loss, [-3.0, -1.0], [NAN, 5.0], [-9.0, NAN])
    assert out.loss.item() == 2.0 and grad.tolist() == [-0.5, -0.5]


def test_micro_batches_add_up_by_the_weights_of_the_step() -> None:
    """Two micro-batches of 1 and 3 tokens add up to the mean over 4."""
    total = sum(
        cross_entropy_loss(tokens(p, [NAN] * len(p), [NAN] * len(p), weight=0.25)).loss.item()
        for p in ([-4.0], [-1.0, -2.0, -1.0])
    )
    assert total == pytest.approx(2.0)
