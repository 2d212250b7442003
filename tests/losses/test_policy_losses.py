"""Every policy loss: what must hold for each of them, whatever its shape."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from tests.losses import build
from treadle.errors import ContractError
from treadle.losses import POLICY_LOSSES, LossOutput

EVERY = pytest.mark.parametrize("loss", POLICY_LOSSES)
NAN = math.nan


def run(
    loss: str,
    logp: list[float],
    behaviour: list[float],
    advantage: list[float],
    trained: list[bool] | None = None,
    **options: Any,
) -> tuple[LossOutput, Tensor]:
    return build.run(POLICY_LOSSES[loss], logp, behaviour, advantage, trained, **options)


# --------------------------------------------------------------------------- reference


@EVERY
def test_on_policy_gradient_is_the_plain_policy_gradient(loss: str) -> None:
    """dL/dlogp = -A / N: right sign, right scale, whatever the loss."""
    logp, advantage = [-0.1, -1.0, -3.0, -7.0], [1.0, -2.0, 0.5, 0.0]
    _, grad = run(loss, logp, logp, advantage)
    assert torch.allclose(grad, torch.tensor([-0.25, 0.5, -0.125, 0.0]))


@EVERY
def test_on_policy_gradient_of_rows_of_several_tokens(loss: str) -> None:
    """Rows of 3, 1 and 2 tokens with weights of their own; one advantage per row."""
    logp, rows = [-0.1, -1.0, -3.0, -7.0, -0.5, -2.0], [0, 0, 0, 1, 2, 2]
    advantage = [(1.0, -2.0, 0.5)[r] for r in rows]
    weight = [(0.5, 1.0, 0.25)[r] for r in rows]
    _, grad = run(loss, logp, logp, advantage, weight=weight, rows=rows)
    wanted = [-a * w for a, w in zip(advantage, weight, strict=True)]
    assert grad.tolist() == pytest.approx(wanted, abs=1e-6)


@EVERY
def test_on_policy_statistics_say_so(loss: str) -> None:
    logp = [-0.1, -1.0, -3.0, -7.0]
    out, _ = run(loss, logp, logp, [1.0, -2.0, 0.5, 0.0])
    stats = {name: value.item() for name, value in out.stats.items()}
    assert stats["num_tokens"] == stats["ratio"] == stats["ratio_sq"] == 4
    assert (stats["positive_tokens"], stats["negative_tokens"]) == (2, 1)
    for name in ("k3", "logprob_diff", "clipped_tokens", "dropped_positive", "dropped_negative"):
        assert stats[name] == 0


@EVERY
def test_statistics_by_hand(loss: str) -> None:
    """B049: k1 per token [-.691, .309, 1.309] gives k3 [.3047, .0432, .5791]: never negative."""
    k1 = [-0.691, 0.309, 1.309]
    out, _ = run(loss, [-3.0 - x for x in k1], [-3.0] * 3, [1.0] * 3)
    assert out.stats["k3"].item() == pytest.approx(0.3047 + 0.0432 + 0.5791, abs=1e-3)
    assert out.stats["logprob_diff"].item() == pytest.approx(-sum(k1), abs=1e-5)


@EVERY
def test_effective_sample_size_from_the_sums(loss: str) -> None:
    """Ratios [1, 1, 2, .5] have (sum w)^2 / (n sum w^2) = .81."""
    out, _ = run(loss, [-2 + math.log(w) for w in (1, 1, 2, 0.5)], [-2.0] * 4, [1.0] * 4)
    sums = {name: value.item() for name, value in out.stats.items()}
    assert sums["ratio"] ** 2 / (4 * sums["ratio_sq"]) == pytest.approx(0.81)


@EVERY
def test_k3_is_not_negative_for_tiny_differences(loss: str) -> None:
    """r - 1 - log r rounds below zero near r = 1 unless it is computed with care."""
    steps = [10.0**-k for k in range(1, 9)]
    for sign in (1, -1):
        for step in steps:
            out, _ = run(loss, [-0.5 + sign * step], [-0.5], [1.0])
            assert out.stats["k3"].item() >= 0


# --------------------------------------------------------------------------- invariances


@EVERY
def test_splitting_into_micro_batches_leaves_loss_and_gradient_unchanged(loss: str) -> None:
    """B042: with the global N, parts add up; with local ones, 100 and 900 tokens would not."""
    torch.manual_seed(0)
    logp = -torch.rand(1000) * 3
    behaviour = logp + torch.randn(1000) * 0.3
    advantage = torch.randn(1000)
    everything = run(loss, logp.tolist(), behaviour.tolist(), advantage.tolist(), weight=1e-3)
    for cut in (100, 900):
        parts = [
            run(loss, x.tolist(), mu.tolist(), a.tolist(), weight=1e-3)
            for x, mu, a in (
                (logp[:cut], behaviour[:cut], advantage[:cut]),
                (logp[cut:], behaviour[cut:], advantage[cut:]),
            )
        ]
        total = sum(out.loss.item() for out, _ in parts)
        assert total == pytest.approx(everything[0].loss.item(), abs=1e-5)
        assert torch.allclose(torch.cat([g for _, g in parts]), everything[1], atol=1e-7)


@EVERY
def test_order_of_tokens_does_not_matter(loss: str) -> None:
    logp, behaviour, advantage = [-1.0, -0.2, -2.0], [-1.3, -0.1, -1.8], [1.0, -1.0, 0.5]
    there = run(loss, logp, behaviour, advantage)
    back = run(loss, logp[::-1], behaviour[::-1], advantage[::-1])
    assert there[0].loss.item() == pytest.approx(back[0].loss.item())
    assert torch.allclose(there[1], back[1].flip(0))


@EVERY
def test_every_token_weighs_the_same_whatever_the_length_of_its_row(loss: str) -> None:
    """B045: rows of 10 and of 100 tokens, A = -1: the same gradient for each token."""
    _, grad = run(loss, [-1.0] * 110, [-1.0] * 110, [-1.0] * 110)
    assert torch.allclose(grad, torch.full((110,), 1 / 110))


@EVERY
def test_untrained_tokens_are_in_neither_numerator_nor_denominator(loss: str) -> None:
    """B022: two completions of four tokens, one masked: the loss of the other, not half of it."""
    trained = [True] * 4 + [False] * 4
    out, grad = run(loss, [-1.0] * 8, [-1.0] * 8, [1.0] * 8, trained)
    alone, _ = run(loss, [-1.0] * 4, [-1.0] * 4, [1.0] * 4)
    assert out.loss.item() == pytest.approx(alone.loss.item())
    assert torch.allclose(grad, torch.tensor([-0.25] * 4 + [0.0] * 4))
    assert out.stats["num_tokens"].item() == 4


@EVERY
def test_a_second_pass_computes_its_own_ratio(loss: str) -> None:
    """B046: nothing of the first pass is written into its inputs."""
    x = build.tokens([-1.0, -2.0], [-1.0, -2.0], [1.0, -1.0])
    kept = x.behaviour_logp.clone(), x.advantage.clone()
    first, second = (
        POLICY_LOSSES[loss](replace(x, logp=torch.tensor(logp))).stats["ratio"]
        for logp in ([-1.0, -2.0], [-1.1, -1.9])
    )
    assert first.item() == pytest.approx(2.0)
    assert second.item() == pytest.approx(math.exp(-0.1) + math.exp(0.1))
    assert torch.equal(x.behaviour_logp, kept[0]) and torch.equal(x.advantage, kept[1])


@EVERY
def test_rows_do_not_mix_and_their_order_does_not_matter(loss: str) -> None:
    logp = [-1.0, -0.4, -2.0, -3.0, -0.7]
    mu = [-1.1, -0.5, -1.7, -3.3, -0.7]
    advantage, rows = [1.0, 1.0, 1.0, -0.5, -0.5], [0, 0, 0, 1, 1]
    together, grad = run(loss, logp, mu, advantage, weight=0.2, rows=rows)
    parts = [
        run(loss, logp[s], mu[s], advantage[s], weight=0.2, rows=[0] * len(logp[s]))
        for s in (slice(3, 5), slice(0, 3))
    ]
    assert together.loss.item() == pytest.approx(sum(out.loss.item() for out, _ in parts), abs=1e-5)
    assert torch.allclose(grad, torch.cat([parts[1][1], parts[0][1]]), atol=1e-7)


# --------------------------------------------------------------------------- hazards


@EVERY
def test_nan_on_an_untrained_token_of_a_row_reaches_none_of_its_tokens(loss: str) -> None:
    mask = [True, False, True, True]
    dirty, grad = run(
        loss,
        [-1.0, NAN, -2.0, -0.5],
        [-1.1, NAN, -2.0, -0.6],
        [1.0, NAN, 1.0, -1.0],
        mask,
        weight=[0.5, NAN, 0.5, 1.0],
        rows=[0, 0, 0, 1],
    )
    clean, wanted = run(
        loss, [-1.0, -2.0, -0.5], [-1.1, -2.0, -0.6], [1.0, 1.0, -1.0],
        weight=[0.5, 0.5, 1.0], rows=[0, 0, 1],
    )  # fmt: skip
    assert dirty.loss.item() == clean.loss.item()
    assert grad[torch.tensor(mask)].tolist() == wanted.tolist() and grad[1].item() == 0
    for name, value in dirty.stats.items():
        assert value.item() == clean.stats[name].item(), name


@EVERY
def test_nan_on_an_untrained_token_reaches_neither_loss_nor_gradient(loss: str) -> None:
    out, grad = run(
        loss, [-1.0, NAN, -2.0], [-1.0, NAN, -2.0], [1.0, NAN, -1.0], [True, False, True]
    )
    clean, clean_grad = run(loss, [-1.0, -2.0], [-1.0, -2.0], [1.0, -1.0])
    assert out.loss.item() == clean.loss.item()
    assert grad.tolist() == [clean_grad[0].item(), 0.0, clean_grad[1].item()]
    for name, value in out.stats.items():
        assert value.item() == clean.stats[name].item(), name


@EVERY
@pytest.mark.parametrize("difference", [1e4, -1e4])
def test_an_absurd_log_ratio_stays_finite(loss: str, difference: float) -> None:
    for advantage in (1.0, -1.0):
        out, grad = run(
            loss, [-1e4 - 1 + max(difference, 0)], [-1e4 - 1 - min(difference, 0)], [advantage]
        )
        assert math.isfinite(out.loss.item()) and torch.isfinite(grad).all()
        assert all(math.isfinite(v.item()) for v in out.stats.values())


@EVERY
def test_a_missing_behaviour_logprob_is_counted_and_located(loss: str) -> None:
    with pytest.raises(ContractError, match=r"1 of 2 trained tokens .* first at index 2"):
        run(loss, [-1.0] * 3, [-1.0, NAN, NAN], [1.0] * 3, [True, False, True])


@EVERY
def test_bad_lengths_raise(loss: str) -> None:
    with pytest.raises((ContractError, TypeCheckError)):
        run(loss, [-1.0] * 3, [-1.0] * 2, [1.0] * 3)


@EVERY
def test_statistics_are_detached(loss: str) -> None:
    out, _ = run(loss, [-1.0, -2.0], [-1.1, -2.0], [1.0, -1.0])
    assert not any(value.requires_grad for value in out.stats.values())
