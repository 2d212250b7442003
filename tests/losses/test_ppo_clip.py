"""PPO-clip: reference values and the sides of the clip."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.losses import build
from treadle.losses import LossOutput, ppo_clip_loss


def run(
    logp: list[float], behaviour: list[float], advantage: list[float], **options: float
) -> tuple[LossOutput, Tensor]:
    """Every token weighs 1."""
    return build.run(ppo_clip_loss, logp, behaviour, advantage, weight=1.0, **options)


def test_reference_values() -> None:
    """Ratios [.5, 1, 10], A = [1, -1, -4], bounds .2/.2: [-.5, 1, 40]."""
    out, grad = run([-1.69315, -1.0, -0.69741], [-1.0, -1.0, -3.0], [1.0, -1.0, -4.0])
    assert out.loss.item() == pytest.approx(-0.5 + 1 + 40, abs=1e-3)
    assert torch.allclose(grad, torch.tensor([-0.5, 1.0, 40.0]), atol=1e-3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [(1.3, 1, True), (1.3, -1, False), (0.7, 1, False), (0.7, -1, True), (1.1, 1, False)],
)
def test_the_gradient_is_cut_on_one_side_only(ratio: float, advantage: int, clipped: bool) -> None:
    out, grad = run([math.log(ratio) - 1], [-1.0], [float(advantage)])
    assert grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage, abs=1e-6)
    assert out.stats["clipped_tokens"].item() == clipped
    assert out.stats["dropped_positive"].item() == (clipped and advantage > 0)
    assert out.stats["dropped_negative"].item() == (clipped and advantage < 0)


def test_a_clipped_token_has_the_value_at_the_bound() -> None:
    out, _ = run([math.log(2.0) - 1], [-1.0], [3.0], clip_high=0.28)
    assert out.loss.item() == pytest.approx(-1.28 * 3)
    out, _ = run([math.log(0.5) - 1], [-1.0], [-3.0], clip_low=0.1)
    assert out.loss.item() == pytest.approx(0.9 * 3)


def test_raising_the_upper_bound_alone_frees_only_positive_advantages() -> None:
    """Clip-Higher: clip_low stays what it was."""
    logp, behaviour, advantage = [math.log(1.25) - 1, math.log(0.75) - 1], [-1.0, -1.0], [1.0, -1.0]
    _, tight = run(logp, behaviour, advantage)
    _, higher = run(logp, behaviour, advantage, clip_high=0.28)
    assert tight.tolist() == [0.0, 0.0]
    assert higher[0].item() == pytest.approx(-1.25) and higher[1].item() == 0.0


def test_clipped_tokens_stay_in_the_denominator() -> None:
    _, grad = build.run(ppo_clip_loss, [math.log(2.0) - 1, -1.0], [-1.0, -1.0], [1.0, 1.0])
    assert grad.tolist() == [0.0, -0.5]


def test_the_dual_clip_bounds_what_a_large_ratio_can_do_to_a_bad_token() -> None:
    """The reference values with c = 3: [-.5, 1, 12]; only the third token's gradient is cut."""
    logp, behaviour, advantage = [-1.69315, -1.0, -0.69741], [-1.0, -1.0, -3.0], [1.0, -1.0, -4.0]
    out, grad = run(logp, behaviour, advantage, dual_clip=3.0)
    assert out.loss.item() == pytest.approx(12.5, abs=1e-4)
    assert torch.allclose(grad, torch.tensor([-0.5, 1.0, 0.0]), atol=1e-4)
    assert out.stats["dropped_negative"].item() == 1


def test_the_dual_clip_leaves_good_tokens_alone() -> None:
    plain, dual = (
        run([math.log(r) - 1], [-1.0], [2.0], clip_high=9.0, dual_clip=c)[1].item()
        for r, c in ((5.0, 0.0), (5.0, 3.0))
    )
    assert plain == dual == pytest.approx(-10.0)
