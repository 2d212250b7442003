"""The value loss: its reference, by hand, masks, parts that add up, and what the clip cuts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.errors import ContractError
from treadle.losses import LossOutput, value_loss


def run(
    value: list[float],
    old: list[float],
    returns: list[float],
    trained: list[bool] | None = None,
    weight: list[float] | None = None,
    **options: Any,
) -> tuple[LossOutput, Tensor]:
    v = torch.tensor(value, requires_grad=True)
    out = value_loss(
        v,
        torch.tensor(old),
        torch.tensor(returns),
        torch.tensor(trained or [True] * len(value)),
        torch.tensor(weight or [1 / len(value)] * len(value)),
        **options,
    )
    out.loss.backward()
    assert v.grad is not None
    return out, v.grad


def test_the_reference_value() -> None:
    """V 1, V_old .5, c .2, return 2: .5 max(1, (.7 - 2)^2) = .845, and no gradient."""
    out, grad = run([1.0], [0.5], [2.0], clip=0.2)
    assert out.loss.item() == pytest.approx(0.845)
    assert grad.tolist() == [0.0]
    assert out.stats["value_clipped_tokens"].item() == out.stats["value_tokens"].item() == 1


def test_without_a_clip_it_is_half_of_the_square() -> None:
    out, grad = run([1.0], [0.5], [2.0], clip=0.0)
    assert out.loss.item() == pytest.approx(0.5)
    assert grad.tolist() == [-1.0]
    assert out.stats["value_clipped_tokens"].item() == 0


def test_a_critic_that_has_not_moved_learns_the_plain_square() -> None:
    """The on-policy identity: dL/dV = weight (V - G), whatever the clip."""
    values, returns = [0.3, -1.0, 2.0, 0.1], [1.0, -1.0, 0.0, 0.7]
    for clip in (0.0, 1e-6, 0.2):
        out, grad = run(values, values, returns, clip=clip)
        wanted = [(v - g) / 4 for v, g in zip(values, returns, strict=True)]
        assert grad.tolist() == pytest.approx(wanted, abs=1e-7)
        assert out.stats["value_clipped_tokens"].item() == 0
        squares = [(v - g) ** 2 / 8 for v, g in zip(values, returns, strict=True)]
        assert out.loss.item() == pytest.approx(sum(squares))


@pytest.mark.parametrize(
    ("value", "clipped"),
    [
        (0.65, False),  # towards its return, within the bound
        (0.8, True),  # towards it, beyond the bound: enough for this step
        (0.1, False),  # away from it, beyond the bound: pulled back
        (3.9, False),  # beyond the return: the plain error is the larger one
    ],
)
def test_the_clip_cuts_what_moved_too_far_towards_its_return_and_nothing_else(
    value: float, clipped: bool
) -> None:
    out, grad = run([value], [0.5], [2.0], clip=0.2)
    assert bool(out.stats["value_clipped_tokens"]) is clipped
    assert grad.tolist() == [pytest.approx(0.0 if clipped else value - 2.0)]


def test_what_is_not_trained_reaches_nothing() -> None:
    nan = math.nan
    out, grad = run(
        [0.0, nan, 1.0], [0.0, nan, 1.0], [1.0, nan, 0.0], [True, False, True], [0.5, nan, 0.5]
    )
    assert out.loss.item() == pytest.approx(0.5)
    assert grad.tolist() == [-0.5, 0.0, 0.5]
    assert out.stats["value_tokens"].item() == 2


def test_parts_add_up() -> None:
    torch.manual_seed(0)
    value, old, returns = torch.randn(3, 50).tolist()
    weight = torch.rand(50).tolist()
    whole, grads = run(value, old, returns, weight=weight)
    parts = [
        run(value[a:b], old[a:b], returns[a:b], weight=weight[a:b]) for a, b in ((0, 7), (7, 50))
    ]
    assert sum(out.loss.item() for out, _ in parts) == pytest.approx(whole.loss.item())
    assert torch.equal(torch.cat([g for _, g in parts]), grads)


@pytest.mark.parametrize("which", ["old", "returns"])
def test_a_trained_token_without_a_target_is_an_error(which: str) -> None:
    given = {"value": [0.0, 1.0], "old": [0.0, 1.0], "returns": [1.0, 1.0]}
    given[which] = [1.0, math.inf]
    name = "value before the step" if which == "old" else "return"
    with pytest.raises(ContractError, match=rf"1 of 2 .* no finite {name}, first at index 1"):
        run(**given)  # type: ignore[arg-type]
