"""Reference values of the losses beside cispo and ppo_clip, and what is particular to each."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.losses.build import run, tokens
from treadle.batch import token_weights
from treadle.losses import POLICY_LOSSES, LossOutput, ppo_clip_loss
from treadle.losses.dis import dis_loss
from treadle.losses.dppo import dppo_kl_loss, dppo_tv_loss
from treadle.losses.gspo import gspo_loss
from treadle.losses.kernels import binary_kl, detached
from treadle.losses.kimi import kimi_sequence_loss, kimi_token_loss
from treadle.losses.prime_rl import prime_rl_loss
from treadle.losses.reinforce import reinforce_loss
from treadle.losses.sapo import sapo_loss
from treadle.losses.sequence_mask import sequence_mask_loss
from treadle.types import Sample

# --------------------------------------------------------------------------- GSPO

LOG_RATIOS = [[1.2, -1.5, 0.7, 1.1, -0.8], [1.8, 0.8], [0.5, 1.3, -0.7, 1.4]]
ADVANTAGES = [[1.5, 2.0, 1.0, 0.8, 0.5], [3.0, 1.5], [0.5, 0.8, 1.2, 2.5]]
FLAT = [x for row in LOG_RATIOS for x in row]
ROWS = [i for i, row in enumerate(LOG_RATIOS) for _ in row]


def aggregated(mode: str) -> list[float]:
    """The weight of each token of the three rows."""
    rows = [
        Sample(
            trajectory_id=str(i),
            ordinal=i,
            ids=(0,) * (1 + len(row)),
            trained=(False,) + (True,) * len(row),
            logprobs=(math.nan,) + (-1.0,) * len(row),
            versions=(-1,) + (0,) * len(row),
            advantages=(math.nan, *row),
            temperature=1.0,
        )
        for i, row in enumerate(ADVANTAGES)
    ]
    return [w for w, row in zip(token_weights(rows, mode), ADVANTAGES, strict=True) for _ in row]


def three_rows(loss: str, mode: str, **options: float) -> tuple[LossOutput, Tensor]:
    mu = [-5.0] * len(FLAT)
    return run(
        POLICY_LOSSES[loss],
        [m + x for m, x in zip(mu, FLAT, strict=True)],
        mu,
        [a for row in ADVANTAGES for a in row],
        weight=aggregated(mode),
        rows=ROWS,
        **options,
    )


@pytest.mark.parametrize(
    ("loss", "mode", "wanted"),
    [
        ("gspo", "seq_mean_token_mean", -1.844773),
        ("ppo_clip", "token_mean", -1.380621),
        ("ppo_clip", "seq_mean_token_mean", -1.638387),
        ("ppo_clip", "seq_mean_token_sum", -5.062276),
    ],
)
def test_reference_values_of_sequence_and_token_ratios(loss: str, mode: str, wanted: float) -> None:
    """Rows of 5, 2 and 4 tokens, bounds .2/.2."""
    out, _ = three_rows(loss, mode, clip_low=0.2, clip_high=0.2)
    assert out.loss.item() == pytest.approx(wanted, abs=2e-5)


def test_the_sequence_ratio_is_the_geometric_mean_of_the_rows_ratios() -> None:
    """s = [1.150274, 3.669297, 1.868246]: unclipped, dL/dlogp_t = -s A_t w_t."""
    _, grad = three_rows("gspo", "token_mean", clip_low=9.0, clip_high=9.0)
    found = [
        -g / (a / len(FLAT))
        for g, a in zip(grad.tolist(), (a for r in ADVANTAGES for a in r), strict=True)
    ]
    wanted = [1.150274, 3.669297, 1.868246]
    assert found == pytest.approx([wanted[r] for r in ROWS], rel=1e-5)


def test_the_tight_bounds_take_a_row_out_as_a_whole() -> None:
    """Bounds of 3e-4 and 4e-4: a row whose mean ratio is 1.001 keeps no gradient with A > 0."""
    logp = [-1.0 + 0.002, -1.0, -2.0, -2.0]
    out, grad = run(
        gspo_loss, logp, [-1.0, -1.0, -2.0, -2.0], [1.0, 1.0, 1.0, 1.0], rows=[0, 0, 1, 1]
    )
    assert grad.tolist() == pytest.approx([0.0, 0.0, -0.25, -0.25])
    assert out.stats["dropped_positive"].item() == 2


def test_rows_of_a_micro_batch_do_not_mix() -> None:
    """Two rows together give what each gives alone, in any order of rows."""
    both, _ = run(gspo_loss, [-1.0, -0.5, -2.0], [-1.1, -0.4, -2.5], [1.0, 1.0, -1.0], weight=1.0,
                  rows=[1, 1, 0], clip_low=0.5, clip_high=0.5)  # fmt: skip
    parts = [
        run(gspo_loss, logp, mu, a, weight=1.0, rows=[0] * len(logp), clip_low=0.5, clip_high=0.5)
        for logp, mu, a in (
            ([-1.0, -0.5], [-1.1, -0.4], [1.0, 1.0]),
            ([-2.0], [-2.5], [-1.0]),
        )
    ]
    assert both.loss.item() == pytest.approx(sum(out.loss.item() for out, _ in parts), abs=1e-6)


def test_an_untrained_token_is_in_no_mean_of_its_row() -> None:
    clean, grad = run(gspo_loss, [-1.0, -2.0], [-1.2, -2.3], [1.0, 1.0], rows=[0, 0],
                      clip_high=1.0)  # fmt: skip
    found, more = run(
        gspo_loss,
        [-1.0, math.nan, -2.0],
        [-1.2, math.nan, -2.3],
        [1.0, math.nan, 1.0],
        [True, False, True],
        rows=[0, 0, 0],
        clip_high=1.0,
    )
    assert found.loss.item() == clean.loss.item()
    assert more.tolist() == [grad[0].item(), 0.0, grad[1].item()]


# --------------------------------------------------------------------------- SAPO


def test_reference_values_of_sapo_with_one_and_two() -> None:
    """lr = [-.5, .2, -.1], A = [1, -1, .5], tau 1/2: [-1.61153, 1.217855, -.952455]."""
    values = [
        run(sapo_loss, [-3 + lr], [-3.0], [a], weight=1.0, tau_positive=1.0, tau_negative=2.0)[0]
        for lr, a in ((-0.5, 1.0), (0.2, -1.0), (-0.1, 0.5))
    ]
    assert [v.loss.item() for v in values] == pytest.approx(
        [-1.61153, 1.217855, -0.952455], abs=1e-5
    )


def test_reference_values_of_sapo_with_its_own_temperatures() -> None:
    """Sum -.438811, dL/dlogp [-.583648, 1.205048, -.451396]."""
    out, grad = run(sapo_loss, [-3.5, -2.8, -3.1], [-3.0] * 3, [1.0, -1.0, 0.5], weight=1.0)
    assert out.loss.item() == pytest.approx(-0.438811, abs=1e-5)
    assert grad.tolist() == pytest.approx([-0.583648, 1.205048, -0.451396], abs=1e-5)


# --------------------------------------------------------------------------- DPPO


@pytest.mark.parametrize("loss", [dppo_tv_loss, prime_rl_loss])
def test_reference_values_of_the_total_variation_mask(loss) -> None:  # type: ignore[no-untyped-def]
    """old -1, new [-.3, -2, -.9], A = [1, -1, 1], d = .2 -> keep [0, 0, 1]."""
    out, _ = run(loss, [-0.3, -2.0, -0.9], [-1.0] * 3, [1.0, -1.0, 1.0])
    assert out.stats["dropped_positive"].item() == out.stats["dropped_negative"].item() == 1


def test_the_gradient_of_what_dppo_keeps_is_its_ratio_up_to_twenty() -> None:
    _, grad = run(dppo_tv_loss, [-0.9], [-1.0], [1.0])
    assert grad.item() == pytest.approx(-math.exp(0.1), abs=1e-6)
    _, grad = run(dppo_tv_loss, [-6.0], [-12.0], [1.0])
    assert grad.item() == pytest.approx(-20.0)


def test_reference_value_of_the_binary_kl() -> None:
    """mu = .5, pi = .7: total variation .2, binary KL .087177."""
    x = tokens([math.log(0.7)], [math.log(0.5)], [1.0])
    assert binary_kl(x).item() == pytest.approx(0.087177, abs=1e-6)


@pytest.mark.parametrize(
    ("pi", "advantage", "dropped"),
    [(0.7, 1.0, True), (0.7, -1.0, False), (0.3, -1.0, True), (0.3, 1.0, False), (0.6, 1.0, False)],
)
def test_the_kl_mask_drops_what_moved_far_with_its_advantage(
    pi: float, advantage: float, dropped: bool
) -> None:
    """mu = .5: .7 and .3 are .087 nats away, .6 is .020; the bound is .05."""
    out, grad = run(dppo_kl_loss, [math.log(pi)], [math.log(0.5)], [advantage])
    assert (grad.item() == 0) is dropped
    name = "dropped_positive" if advantage > 0 else "dropped_negative"
    assert out.stats[name].item() == dropped


@pytest.mark.parametrize(("logp", "mu"), [(0.0, -1e-8), (-1e-8, 0.0), (0.0, -9.0), (-80.0, -0.1)])
def test_the_binary_kl_is_finite_at_certainty(logp: float, mu: float) -> None:
    x = tokens([logp], [mu], [1.0])
    assert 0 <= binary_kl(x).item() < 20


# --------------------------------------------------------------------------- DIS, MiMo


def test_reference_values_of_dis() -> None:
    """lr = [0, .1, .8, -.8], A = 1, window .2: dL/dlogp = [-.25, -.25 e^.1, 0, 0], dropped .5."""
    out, grad = run(dis_loss, [-3.0, -2.9, -2.2, -3.8], [-3.0] * 4, [1.0] * 4)
    assert grad.tolist() == pytest.approx([-0.25, -0.25 * math.exp(0.1), 0.0, 0.0], abs=1e-6)
    assert out.stats["dropped_positive"].item() / 4 == 0.5


def test_the_four_bounds_belong_to_their_own_sign() -> None:
    options = {"low_positive": 0.5, "high_positive": 2.0, "low_negative": 0.9, "high_negative": 1.1}
    logp = [math.log(r) - 3 for r in (1.5, 1.5, 0.6, 0.6)]
    _, grad = run(dis_loss, logp, [-3.0] * 4, [1.0, -1.0, 1.0, -1.0], weight=1.0, **options)
    assert grad.tolist() == pytest.approx([-1.5, 0.0, -0.6, 0.0], abs=1e-6)


# --------------------------------------------------------------------------- sequence mask


def test_a_bad_row_that_the_policy_has_left_gets_no_gradient() -> None:
    """Mean log mu - log pi of .6 nats with A < 0, bound .5; the good row and the near one stay."""
    mu = [-1.0] * 6
    logp = [-1.9, -1.3, -1.9, -1.3, -1.4, -1.4]
    advantage, rows = [-1.0, -1.0, 1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1, 2, 2]
    options = {"clip_low": 0.9, "clip_high": 0.9}
    out, grad = run(sequence_mask_loss, logp, mu, advantage, rows=rows, weight=1.0, **options)
    _, plain = run(ppo_clip_loss, logp, mu, advantage, weight=1.0, **options)
    assert grad[:2].tolist() == [0.0, 0.0]
    assert torch.equal(grad[2:], plain[2:]) and (plain != 0).all()
    assert out.stats["dropped_negative"].item() == 2
    assert out.stats["num_tokens"].item() == 6, "its tokens stay in the denominators"


# --------------------------------------------------------------------------- mirror descent


def test_reference_values_of_the_sequence_form() -> None:
    """R - mean = .5, tau .01, sum lr = .2: loss 12.4002, dL/dlogp_t = -.498 at every token."""
    out, grad = run(
        kimi_sequence_loss, [-0.95, -0.95, -0.9], [-1.0] * 3, [0.5] * 3, weight=1.0, rows=[0] * 3
    )
    assert out.loss.item() == pytest.approx(12.4002, abs=1e-3)
    assert grad.tolist() == pytest.approx([-0.498] * 3, abs=1e-5)


def test_the_token_form_by_hand() -> None:
    """l = -r A + tau lr^2 within the window; outside it the square alone, whatever the sign."""
    lr, tau = 0.5, 0.1
    out, grad = run(kimi_token_loss, [-2 + lr], [-2.0], [3.0], tau=tau)
    assert out.loss.item() == pytest.approx(-3 * math.exp(lr) + tau * lr**2)
    assert grad.item() == pytest.approx(-3 * math.exp(lr) + 2 * tau * lr)
    for sign in (1.0, -1.0):
        out, grad = run(kimi_token_loss, [-2 + 1.5], [-2.0], [sign], tau=tau)
        assert out.loss.item() == pytest.approx(tau * 1.5**2)
        assert grad.item() == pytest.approx(2 * tau * 1.5)


def test_prime_rl_by_hand() -> None:
    """The gradient of a kept token is -A r + 2 tau lr; a dropped one keeps the square."""
    _, grad = run(prime_rl_loss, [-3.9], [-4.0], [2.0])
    assert grad.item() == pytest.approx(-2 * math.exp(0.1) + 2e-3 * 0.1, abs=1e-5)
    _, grad = run(prime_rl_loss, [-0.3], [-1.0], [2.0])
    assert grad.item() == pytest.approx(2e-3 * 0.7, abs=1e-6)


# --------------------------------------------------------------------------- REINFORCE


def test_reinforce_looks_at_no_ratio() -> None:
    out, grad = run(reinforce_loss, [-1.0, -2.0], [-3.0, -0.5], [2.0, -1.0], weight=1.0)
    assert grad.tolist() == [-2.0, 1.0]
    assert out.loss.item() == pytest.approx(2.0 - 2.0)
    assert out.stats["ratio"].item() == pytest.approx(math.exp(2.0) + math.exp(-1.5), rel=1e-5)


def test_every_loss_multiplies_by_the_weight_of_the_token() -> None:
    """Twice the weight of one token: twice its gradient, and nobody else's."""
    logp, mu, advantage = [-1.0, -2.0, -0.5], [-1.05, -1.95, -0.5], [1.0, -1.0, 0.5]
    for name, loss in POLICY_LOSSES.items():
        _, one = run(loss, logp, mu, advantage, weight=[1.0, 1.0, 1.0])
        _, two = run(loss, logp, mu, advantage, weight=[1.0, 2.0, 1.0])
        assert two.tolist() == pytest.approx([one[0].item(), 2 * one[1].item(), one[2].item()]), (
            name
        )


def test_a_detached_factor_gives_no_gradient_of_its_own() -> None:
    """Also where a loss hands over a factor that has one."""
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    x = tokens(logp, [-1.1, -2.3], [1.0, -1.0])
    detached(x, (x.logp - x.behaviour_logp).exp() * x.advantage).sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-math.exp(0.1), math.exp(0.3)], rel=1e-5)


def test_tokens_of_different_lengths_are_refused() -> None:
    from treadle.errors import ContractError

    x = tokens([-1.0, -2.0], [-1.0, -2.0], [1.0, 1.0])
    with pytest.raises(ContractError, match="expected vectors of one length"):
        replace(x, weight=torch.ones(3))
