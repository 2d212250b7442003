"""REPO: reference values, signs, and what it must not read."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treadle.train.entropy import repo_d, repo_r

NAN = math.nan


def rescale(a: float, lp: float, zeta: float) -> float:
    return float(repo_r(torch.tensor([a]), torch.tensor([lp]), torch.tensor([True]), zeta=zeta)[0])


@pytest.mark.parametrize(
    ("zeta", "lp", "a", "want"),
    [
        (0.1, -3.0, 2.0, 2.6),
        (0.1, -3.0, -2.0, -1.4),
        (-0.1, -3.0, 2.0, 1.4),
        (-0.1, -3.0, -2.0, -2.6),
        (-0.5, -3.0, 2.0, 0.0),
        (0.5, -3.0, -2.0, 0.0),
        (0.7, -3.0, 0.0, 0.0),
    ],
)
def test_repo_r_reference_values(zeta: float, lp: float, a: float, want: float) -> None:
    """The sign never flips: where it would, the token is left out."""
    assert rescale(a, lp, zeta) == pytest.approx(want)


@given(
    a=st.floats(-10, 10), lp=st.floats(-1e4, 0), zeta=st.floats(-0.5, 0.5), other=st.floats(-1e4, 0)
)
def test_repo_r_keeps_the_sign_and_orders_tokens_by_rarity(
    a: float, lp: float, zeta: float, other: float
) -> None:
    found = rescale(a, lp, zeta)
    assert math.isfinite(found) and found * a >= 0
    rare, likely = sorted((lp, other))
    if zeta > 0:  # rare good tokens get more credit, rare bad ones less blame: both larger
        assert rescale(a, rare, zeta) >= rescale(a, likely, zeta)


def test_repo_r_bounds_how_rare_a_token_can_count() -> None:
    assert rescale(1.0, -500.0, 0.05) == rescale(1.0, -20.0, 0.05) == pytest.approx(2.0)


def test_zeta_zero_and_certain_tokens_are_left_alone() -> None:
    assert rescale(1.5, -3.0, 0.0) == 1.5
    assert rescale(1.5, 0.0, 0.3) == 1.5


def _exact(weights: Tensor, reward: Tensor, a: Tensor) -> tuple[float, float]:
    """One exact policy-gradient step on one state: the entropy before and after."""
    logp = weights.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum()
    logits = weights.clone().requires_grad_()
    (logp.exp().detach() * a * logits.log_softmax(-1)).sum().backward()
    assert logits.grad is not None
    after = (weights + 0.01 * logits.grad).log_softmax(-1)
    return float(entropy), float(-(after.exp() * after).sum())


@pytest.mark.parametrize("method", ["repo_r", "repo_d"])
def test_a_positive_strength_gives_more_entropy_than_none_and_a_negative_less(method: str) -> None:
    """The point of it, on an exact gradient; 20 random states."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        z = torch.randn(8, generator=generator)
        logp = z.log_softmax(-1)
        reward = (torch.rand(8, generator=generator) < 0.5).float()
        a = reward - (logp.exp() * reward).sum()
        trained, h = torch.ones(8, dtype=torch.bool), -(logp.exp() * logp).sum().expand(8)
        after = []
        for strength in (-0.05, 0.0, 0.05):
            if method == "repo_r":
                changed = repo_r(a, logp, trained, zeta=strength)
            else:
                changed = repo_d(a, logp, h, trained, beta=strength)
            after.append(_exact(z, reward, changed)[1])
        assert after[0] < after[1] < after[2] or float(a.abs().max()) < 1e-6


def test_repo_d_subtracts_the_centred_logprob_and_has_mean_zero_under_the_policy() -> None:
    logp = torch.tensor([2.0, 1.0, 0.0, -1.0]).log_softmax(-1)
    h = -(logp.exp() * logp).sum()
    trained = torch.ones(4, dtype=torch.bool)
    changed = repo_d(torch.zeros(4), logp, h.expand(4), trained, beta=0.5)
    assert torch.allclose(changed, -0.5 * (logp + 0.947537), atol=1e-6)
    assert float((logp.exp() * changed).sum()) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("method", [repo_r, repo_d])
def test_untrained_positions_are_not_read_and_become_zero(method: object) -> None:
    a, lp = torch.tensor([1.0, NAN, 2.0]), torch.tensor([-1.0, NAN, -2.0], requires_grad=True)
    trained = torch.tensor([True, False, True])
    if method is repo_r:
        found = repo_r(a, lp, trained, zeta=0.1)
    else:
        found = repo_d(a, lp, torch.tensor([0.5, NAN, 0.5]), trained, beta=0.1)
    assert found[1] == 0 and torch.isfinite(found).all() and not found.requires_grad
