"""KL estimators: reference values, exact expectations on a small vocabulary, hazards."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from treadle.errors import ContractError
from treadle.losses.kl import ESTIMATORS, MAX_K3_NATS, kl_in_reward, kl_loss, kl_per_token

EVERY = pytest.mark.parametrize("estimator", ESTIMATORS)
NAN = math.nan


def value(x: list[float], estimator: str) -> list[float]:
    """Of log-ratios x, by a reference logprob of 0."""
    logp = torch.tensor(x)
    mask = torch.ones(len(x), dtype=torch.bool)
    return kl_per_token(logp, torch.zeros(len(x)), mask, estimator=estimator).tolist()


# --------------------------------------------------------------------------- reference


def test_reference_values() -> None:
    x = [0.5, -0.5, 0.0, 1.0]
    assert value(x, "k1") == x
    assert value(x, "k2") == pytest.approx([0.125, 0.125, 0, 0.5])
    assert value(x, "k3") == pytest.approx([0.106531, 0.148721, 0, 0.367879], abs=1e-6)
    assert value(x, "k3+") == pytest.approx([0.106531, 0.148721, 0, 0.367879], abs=1e-6)


def test_the_sign_of_the_difference_is_policy_minus_reference() -> None:
    """The trap: exp(x) - 1 - x gives .148721 and .718282 for x = .5 and 1, k3 of KL(ref || pi)."""
    x = [0.5, -0.5, 1.0]
    reversed_sign = [math.expm1(v) - v for v in x]
    assert reversed_sign == pytest.approx([0.148721, 0.106531, 0.718282], abs=1e-6)
    for found, wrong in zip(value(x, "k3"), reversed_sign, strict=True):
        assert abs(found - wrong) > 0.04


POLICY = torch.tensor([0.4, -1.0, 0.7, 0.1, -0.3], dtype=torch.float64)
REFERENCE = torch.tensor([0.0, 0.5, -0.2, 0.9, -1.1], dtype=torch.float64).log_softmax(-1)
BEHAVIOUR = torch.tensor([0.3, -0.2, 0.4, 0.2, -0.6], dtype=torch.float64).log_softmax(-1)


def expected(estimator: str, mu: Tensor, with_mu: bool) -> tuple[Tensor, Tensor]:
    """Mean of the estimator over all tokens of a vocabulary drawn from mu, and its gradient."""
    z = POLICY.clone().requires_grad_()
    logp = z.log_softmax(-1)
    values = kl_per_token(
        logp,
        REFERENCE,
        torch.ones(5, dtype=torch.bool),
        estimator=estimator,
        behaviour_logp=mu if with_mu else None,
    )
    mean = (mu.exp() * values).sum()
    (grad,) = torch.autograd.grad(mean, z)
    return mean.detach(), grad


def exact() -> tuple[Tensor, Tensor]:
    z = POLICY.clone().requires_grad_()
    logp = z.log_softmax(-1)
    kl = (logp.exp() * (logp - REFERENCE)).sum()
    return kl.detach(), torch.autograd.grad(kl, z)[0]


@EVERY
def test_gradient_on_policy_is_what_the_table_says(estimator: str) -> None:
    mean, grad = expected(estimator, POLICY.log_softmax(-1), with_mu=False)
    kl, wanted = exact()
    if estimator == "k1":
        assert torch.allclose(grad, torch.zeros(5, dtype=torch.float64), atol=1e-12)
    elif estimator == "k3":
        assert not torch.allclose(grad, wanted, atol=1e-2)
    else:
        assert torch.allclose(grad, wanted, atol=1e-12)
    if estimator != "k2":
        assert torch.allclose(mean, kl)


@EVERY
def test_gradient_off_policy_is_exact_with_the_importance_ratio(estimator: str) -> None:
    mean, grad = expected(estimator, BEHAVIOUR, with_mu=True)
    kl, wanted = exact()
    assert torch.allclose(grad, wanted, atol=1e-12)
    if estimator != "k2":
        assert torch.allclose(mean, kl)
    _, without = expected(estimator, BEHAVIOUR, with_mu=False)
    assert not torch.allclose(without, wanted, atol=1e-3), "the ratio matters"


def test_a_penalty_in_the_reward_has_the_gradient_of_the_kl() -> None:
    """The policy gradient of -beta k1, over all tokens that pi may sample."""
    z = POLICY.clone().requires_grad_()
    logp = z.log_softmax(-1)
    mask, rows = torch.ones(5, dtype=torch.bool), torch.arange(5)
    a = kl_in_reward(torch.zeros(5), logp, REFERENCE, mask, rows, beta=0.3)
    loss = -(logp.exp().detach() * a * logp).sum()
    (grad,) = torch.autograd.grad(loss, z)
    assert torch.allclose(grad, 0.3 * exact()[1], atol=1e-9)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3+"])
def test_a_larger_beta_ends_nearer_to_the_reference(estimator: str) -> None:
    """B049: 50 steps of a toy that is paid for leaving the reference."""
    ends = []
    for beta in (0.0, 0.1, 1.0):
        z = REFERENCE.clone().requires_grad_()
        optimiser = torch.optim.SGD([z], lr=0.5)
        for _ in range(50):
            logp = z.log_softmax(-1)
            mask = torch.ones(5, dtype=torch.bool)
            reward = -(logp.exp()[0])
            k = kl_per_token(
                logp, REFERENCE, mask, estimator=estimator, behaviour_logp=logp.detach()
            )
            loss = reward + beta * (logp.exp().detach() * k).sum()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        logp = z.detach().log_softmax(-1)
        ends.append(float((logp.exp() * (logp - REFERENCE)).sum()))
    assert ends[0] > ends[1] > ends[2] > 0


# --------------------------------------------------------------------------- in the reward


def test_penalty_to_go_by_hand() -> None:
    """Rows of 3 and 2 tokens, k1 = [1, 2, 3], [4, 5]; beta .1."""
    logp = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]) - 9.0
    ref = torch.full((5,), -9.0)
    mask, rows = torch.ones(5, dtype=torch.bool), torch.tensor([0, 0, 0, 1, 1])
    a = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    for discount, to_go in (
        (1.0, [6.0, 5.0, 3.0, 9.0, 5.0]),
        (0.0, [1.0, 2.0, 3.0, 4.0, 5.0]),
        (0.5, [2.75, 3.5, 3.0, 6.5, 5.0]),
    ):
        found = kl_in_reward(a, logp, ref, mask, rows, beta=0.1, discount=discount)
        assert torch.allclose(found, a - 0.1 * torch.tensor(to_go))


def test_what_a_tool_says_costs_nothing() -> None:
    """B017: three tool tokens whose logprobs differ by 5 nats, or are not known at all."""
    logp = torch.tensor([-1.0, -9.0, NAN, -9.0, -2.0])
    mask, rows = torch.tensor([True, False, False, False, True]), torch.zeros(5, dtype=torch.long)
    a = torch.tensor([1.0, NAN, NAN, NAN, 1.0])
    found = [
        kl_in_reward(
            a, logp, torch.tensor([-1.5, x, x, x, -2.5]), mask, rows, beta=1.0, discount=0.5
        )
        for x in (-4.0, NAN)
    ]
    assert torch.equal(found[0], found[1])
    assert found[0].tolist() == pytest.approx([1 - 0.75, 0, 0, 0, 1 - 0.5])


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    discount=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
def test_a_neighbour_in_the_batch_changes_no_bit(lengths: list[int], discount: float) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    n = sum(lengths)
    logp, ref = -torch.rand(n, generator=generator), -torch.rand(n, generator=generator)
    mask, a = torch.ones(n, dtype=torch.bool), torch.zeros(n)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    whole = kl_in_reward(a, logp, ref, mask, rows, beta=0.2, discount=discount)
    for row in range(len(lengths)):
        at = rows == row
        alone = kl_in_reward(
            a[at], logp[at], ref[at], mask[at], rows[at], beta=0.2, discount=discount
        )
        assert torch.equal(whole[at], alone)
        want, to_go = [], 0.0
        for x in reversed((logp[at] - ref[at]).tolist()):
            to_go = x + discount * to_go
            want.append(-0.2 * to_go)
        assert alone.tolist() == pytest.approx(want[::-1], abs=1e-5)


# --------------------------------------------------------------------------- hazards


@EVERY
def test_nan_on_an_untrained_token_reaches_neither_value_nor_gradient(estimator: str) -> None:
    logp = torch.tensor([-1.0, NAN, -2.0], requires_grad=True)
    other = torch.tensor([-1.5, NAN, -1.0])
    mask = torch.tensor([True, False, True])
    found = kl_per_token(logp, other, mask, estimator=estimator, behaviour_logp=other)
    found.sum().backward()
    assert torch.isfinite(found).all() and found[1] == 0
    assert logp.grad is not None and torch.isfinite(logp.grad).all() and logp.grad[1] == 0


@EVERY
@pytest.mark.parametrize("x", [1e4, -1e4])
def test_an_absurd_difference_stays_finite(estimator: str, x: float) -> None:
    logp = torch.tensor([-1e5], requires_grad=True)
    mask = torch.tensor([True])
    found = kl_per_token(
        logp, logp.detach() - x, mask, estimator=estimator, behaviour_logp=logp.detach() - x
    )
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert logp.grad is not None and torch.isfinite(logp.grad).all()


def test_k3_is_clamped_and_never_negative() -> None:
    assert value([-5.0, -1000.0, 1000.0], "k3") == [MAX_K3_NATS] * 3
    assert all(v >= 0 for v in value([s * 10.0**-k for k in range(9) for s in (1, -1)], "k3"))


def test_k3_of_a_known_case() -> None:
    """k1 per token [-.691, .309, 1.309] gives k3 [.3047, .0432, .5791]."""
    assert value([-0.691, 0.309, 1.309], "k3") == pytest.approx([0.3047, 0.0432, 0.5791], abs=1e-3)


def test_the_loss_has_its_own_denominator_and_adds_up_over_micro_batches() -> None:
    logp, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.2, -1.0, -0.5])
    mask = torch.ones(3, dtype=torch.bool)
    options = {"estimator": "k3+", "beta": 0.1, "num_tokens": 3}
    whole = kl_loss(logp, ref, mask, **options)
    parts = [kl_loss(logp[s], ref[s], mask[s], **options) for s in (slice(0, 1), slice(1, 3))]
    assert float(whole) == pytest.approx(float(sum(parts)))
    each = kl_per_token(logp, ref, mask, estimator="k3")
    assert float(whole) == pytest.approx(0.1 * float(each.mean()))
    with pytest.raises(ContractError, match="num_tokens must be >= 1, got 0"):
        kl_loss(logp, ref, mask, estimator="k3", beta=1.0, num_tokens=0)


def test_a_missing_reference_is_counted_and_located() -> None:
    with pytest.raises(ContractError, match=r"1 of 2 trained tokens .* first at index 2"):
        kl_per_token(
            torch.zeros(3),
            torch.tensor([0.0, NAN, NAN]),
            torch.tensor([True, False, True]),
            estimator="k3",
        )


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown estimator `k4`"):
        value([0.0], "k4")
