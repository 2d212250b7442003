"""CISPO with the trust mask: reference values and each of its parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.losses import build
from treadle.losses import LossOutput, cispo_loss


def run(
    logp: list[float], behaviour: list[float], advantage: list[float], **options: float
) -> tuple[LossOutput, Tensor]:
    """Every token weighs 1."""
    return build.run(cispo_loss, logp, behaviour, advantage, weight=1.0, **options)


OLD, NEW, A = [-1.0, -1.0, -3.0], [-1.69315, -1.0, -0.69741], [1.0, -1.0, -4.0]
"""Ratios .5, 1 and 10."""


def test_reference_values_with_cap_five_and_no_floor() -> None:
    out, grad = run(NEW, OLD, A)
    assert out.loss.item() == pytest.approx(0.846573 - 1 - 13.9482, abs=1e-4)
    assert torch.allclose(grad, torch.tensor([-0.5, 1.0, 20.0]), atol=1e-4)
    assert out.stats["clipped_tokens"].item() == 1


def test_reference_values_with_bounds_on_both_sides() -> None:
    """Bounds .2/.2: [1.35452, -1, -3.347568], gradient [-.8, 1, 4.8]."""
    out, grad = run(NEW, OLD, A, ratio_min=0.8, ratio_max=1.2)
    assert out.loss.item() == pytest.approx(-2.99305, abs=1e-5)
    assert torch.allclose(grad, torch.tensor([-0.8, 1.0, 4.8]), atol=1e-5)
    assert out.stats["clipped_tokens"].item() == 2


def test_a_capped_token_keeps_its_gradient() -> None:
    """Unlike PPO, CISPO never takes the gradient away for a large ratio alone."""
    _, grad = run([-4.0], [-8.0], [1.0])
    assert grad.item() == pytest.approx(-5.0)


def test_no_gradient_flows_through_the_weight() -> None:
    """Below the cap the gradient is -r A; with the weight's own gradient it would be
    -r A (1 + logp)."""
    _, grad = run([-1.2], [-1.1], [1.0])
    assert grad.item() == pytest.approx(-math.exp(-0.1), abs=1e-6)


def test_dppo_mask_reference_values() -> None:
    """old -1, new [-.3, -2, -.9], A = [1, -1, 1], d = .2 -> keep [0, 0, 1]."""
    out, grad = run([-0.3, -2.0, -0.9], [-1.0] * 3, [1.0, -1.0, 1.0])
    assert grad[0].item() == 0 and grad[1].item() == 0
    assert grad[2].item() == pytest.approx(-math.exp(0.1), abs=1e-6)
    assert out.stats["dropped_positive"].item() == 1
    assert out.stats["dropped_negative"].item() == 1


def test_the_mask_only_stops_moves_in_the_direction_of_the_advantage() -> None:
    """A token that moved the other way keeps its gradient: it is pulled back."""
    _, grad = run([-0.3, -2.0], [-1.0, -1.0], [-1.0, 1.0])
    assert (grad != 0).all()


def test_the_mask_bounds_differences_of_probability_not_ratios() -> None:
    """mu = .5 to pi = .7 is exactly .2 apart; a rare token's ratio of 10 is not dropped."""
    _, grad = run([math.log(0.699), math.log(0.701)], [math.log(0.5)] * 2, [1.0, 1.0])
    assert grad[0].item() != 0 and grad[1].item() == 0
    _, rare = run([math.log(0.01)], [math.log(0.001)], [1.0])
    assert rare.item() == pytest.approx(-5.0)


def test_the_two_bounds_of_the_mask_belong_to_their_own_sign() -> None:
    logp, behaviour = [math.log(0.6), math.log(0.4)], [math.log(0.5)] * 2
    out, _ = run(logp, behaviour, [1.0, -1.0], drop_high=0.05, drop_low=0.2)
    assert out.stats["dropped_positive"].item() == 1 and out.stats["dropped_negative"].item() == 0
    out, _ = run(logp, behaviour, [1.0, -1.0], drop_high=0.2, drop_low=0.05)
    assert out.stats["dropped_positive"].item() == 0 and out.stats["dropped_negative"].item() == 1


def test_dropped_tokens_stay_in_the_denominator() -> None:
    out, grad = build.run(cispo_loss, [-0.3, -1.0], [-1.0, -1.0], [1.0, 1.0])
    assert grad.tolist() == [0.0, -0.5]
    assert out.stats["num_tokens"].item() == 2
