"""Corrections: reference values, and which factor acts on what."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.losses.build import tokens
from treadle.errors import ContractError
from treadle.losses import Tokens, ppo_clip_loss
from treadle.losses.correction import (
    corrected,
    log_rho,
    outside,
    proximal,
    rejected,
    row_weight,
    token_weight,
)

NAN = math.nan
RHO = [0.4, 0.5, 1.0, 2.0, 2.1, 3.0]


def with_rho(
    rho: list[float], rows: list[int] | None = None, advantage: list[float] | None = None
) -> Tokens:
    """Tokens whose trainer and sampler differ by rho at the sampling version; nothing is stale."""
    prox = [-3.0] * len(rho)
    mu = [p - math.log(r) for p, r in zip(prox, rho, strict=True)]
    return tokens(prox, mu, advantage or [1.0] * len(rho), weight=1.0, rows=rows, prox=prox)


# --------------------------------------------------------------------------- reference


def test_reference_values_of_truncation_and_masking() -> None:
    """rho = [.4, .5, 1, 2, 2.1, 3]: TIS [.4, .5, 1, 2, 2, 2], IcePop [0, .5, 1, 2, 0, 0]."""
    x = with_rho(RHO)
    assert token_weight(log_rho(x), 2.0).tolist() == pytest.approx([0.4, 0.5, 1, 2, 2, 2])
    assert outside(log_rho(x), 0.5, 2.0).tolist() == [True, False, False, False, True, True]
    icepop, _ = corrected(x, weight="token", keep_low=0.5, keep_high=2.0)
    assert icepop.weight.tolist() == pytest.approx([0, 0.5, 1, 2, 0, 0])
    mis, _ = corrected(x, keep_low=0.5, keep_high=2.0)
    assert mis.weight.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_reference_value_of_the_decoupled_loss() -> None:
    """A = 1, old 0, new .5, rollout -.7, eh = .2, cap 2: l = -2.4 (r cut at 1.2, rho at 2)."""
    x = tokens([0.5], [-0.7], [1.0], weight=1.0, prox=[0.0])
    seen, _ = corrected(x, weight="token", weight_max=2.0)
    assert ppo_clip_loss(seen).loss.item() == pytest.approx(-2.4)


def test_reference_value_of_the_effective_sample_size() -> None:
    """w = [1, 1, 2, .5] -> (sum w)^2 / (n sum w^2) = .81."""
    _, described = corrected(with_rho([1.0, 1.0, 2.0, 0.5]), weight="token", weight_max=9.0)
    sums = {name: v.item() for name, v in described.stats.items()}
    assert sums["correction"] ** 2 / (4 * sums["correction_sq"]) == pytest.approx(0.81)


def test_the_product_over_a_row_is_capped() -> None:
    """1.1^100 = 13,780: never without a cap; rows do not mix."""
    x = with_rho([1.1] * 100 + [0.5, 1.0], rows=[0] * 100 + [1, 1])
    weight = row_weight(log_rho(x), x, 5.0)
    assert weight[:100].tolist() == [5.0] * 100
    assert weight[100:].tolist() == pytest.approx([0.5, 0.5])
    wide = row_weight(log_rho(x), x, 1e6)
    assert wide[0].item() == pytest.approx(13780.6, rel=1e-3)


def test_a_weight_alone_is_rho_r_of_the_bypass_where_nothing_is_clipped() -> None:
    """rho x r = pi / mu: weighing by rho against prox is the bypass' ratio, not its square."""
    x = tokens([-1.0], [-1.5], [2.0], weight=1.0, prox=[-1.2])
    seen, _ = corrected(x, weight="token", weight_max=9.0)
    wide = {"clip_low": 0.9, "clip_high": 9.0}
    bypass = ppo_clip_loss(x, **wide).loss.item()
    assert ppo_clip_loss(seen, **wide).loss.item() == pytest.approx(bypass)


# --------------------------------------------------------------------------- rejection


def gone(rho: list[float], rows: list[int], **bounds: float) -> list[bool]:
    return rejected(with_rho(rho, rows), **bounds).tolist()


def test_one_token_vetoes_its_row_and_no_other() -> None:
    assert gone([1.0, 5e-5, 1.0, 1.0], [0, 0, 1, 1], veto_low=1e-4) == [True, True, False, False]
    assert gone([1.0, 2e-4, 1.0, 1.0], [0, 0, 1, 1], veto_low=1e-4) == [False] * 4
    assert gone([1.0, 101.0, 1.0, 1.0], [0, 0, 1, 1], veto_high=100.0) == [True, True, False, False]


def test_the_geometric_mean_of_a_row_decides_over_it() -> None:
    """Row 0: mean log rho .005, inside [.99, 1.01]; row 1: .02; row 2: -.02."""
    rho = [math.exp(x) for x in (0.015, -0.005, 0.03, 0.01, -0.02, -0.02)]
    found = gone(rho, [0, 0, 1, 1, 2, 2], mean_low=0.99, mean_high=1.01)
    assert found == [False, False, True, True, True, True]
    assert gone(rho, [0, 0, 1, 1, 2, 2], mean_high=1.01) == [False, False, True, True, False, False]


def test_the_mean_k3_of_a_row_decides_over_it_whatever_the_sign() -> None:
    """Opposite differences cancel in the geometric mean and not in k3."""
    rho = [math.exp(0.2), math.exp(-0.2), 1.0, 1.0]
    assert gone(rho, [0, 0, 1, 1], mean_low=0.99, mean_high=1.01) == [False] * 4
    assert gone(rho, [0, 0, 1, 1], k3_max=1e-2) == [True, True, False, False]


def test_no_bound_rejects_nothing() -> None:
    assert gone([1e-9, 1e9], [0, 0]) == [False, False]
    seen, _ = corrected(x := with_rho([1e-9, 1e9]))
    assert torch.equal(seen.weight, x.weight)
    assert torch.equal(seen.behaviour_logp, x.behaviour_logp)


# --------------------------------------------------------------------------- factors


def test_what_was_not_measured_takes_the_current_weights_for_prox() -> None:
    """Then rho holds all of pi / mu and r is 1: the product is right, and no number is made up."""
    x = tokens([-1.0, -1.0], [-1.5, -1.5], [1.0, 1.0], weight=1.0, prox=[-1.2, NAN])
    assert proximal(x).tolist() == pytest.approx([-1.2, -1.0])
    assert log_rho(x).tolist() == pytest.approx([0.3, 0.5])
    seen, _ = corrected(x, weight="token", weight_max=9.0)
    assert seen.behaviour_logp.tolist() == pytest.approx([-1.2, -1.0])
    bare = tokens([-1.0], [-1.5], [1.0])
    assert log_rho(bare).tolist() == pytest.approx([0.5])


def test_a_mask_without_a_weight_leaves_the_bypass_ratio_alone() -> None:
    x = tokens([-1.0], [-1.5], [1.0], weight=1.0, prox=[-1.2])
    seen, _ = corrected(x, keep_low=0.5, keep_high=2.0)
    assert torch.equal(seen.behaviour_logp, x.behaviour_logp)


def test_dropped_tokens_are_counted_by_sign_and_stay_trained() -> None:
    x = with_rho([3.0, 1.0, 0.1, 9.0], advantage=[1.0, 1.0, -1.0, -1.0])
    seen, described = corrected(x, keep_low=0.5, keep_high=2.0)
    assert described.stats["masked_positive"].item() == 1
    assert described.stats["masked_negative"].item() == 2
    assert seen.trained.all()


@pytest.mark.parametrize("weight", ["none", "token", "sequence"])
def test_no_gradient_flows_through_a_correction(weight: Any) -> None:
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    x = tokens(logp, [-1.2, -2.3], [1.0, -1.0], weight=1.0, rows=[0, 0])
    seen, described = corrected(x, weight=weight, keep_low=0.1, keep_high=9.0)
    assert seen.logp is logp
    found: list[Tensor] = [seen.weight, seen.behaviour_logp, *described.stats.values()]
    assert not any(t.requires_grad for t in found)
    assert not rejected(x, mean_low=0.9).requires_grad


def test_nan_on_an_untrained_token_reaches_no_row() -> None:
    x = tokens(
        [-1.0, NAN, -2.0], [-1.2, NAN, -2.0], [1.0, NAN, 1.0], [True, False, True],
        weight=[1.0, NAN, 1.0], rows=[0, 0, 0], prox=[NAN, NAN, -2.0],
    )  # fmt: skip
    assert (
        rejected(x, mean_low=0.5, mean_high=2.0, veto_low=1e-4, k3_max=1.0).tolist() == [False] * 3
    )
    seen, described = corrected(x, weight="sequence", weight_max=9.0, keep_low=0.5, keep_high=2.0)
    assert seen.weight.tolist() == pytest.approx([math.exp(0.2), 0.0, math.exp(0.2)])
    assert all(math.isfinite(v.item()) for v in described.stats.values())


def test_a_missing_behaviour_logprob_is_an_error_here_too() -> None:
    with pytest.raises(ContractError, match="1 of 2 trained tokens have no behaviour"):
        log_rho(tokens([-1.0, -1.0], [-1.0, NAN], [1.0, 1.0]))
