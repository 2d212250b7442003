"""Controllers: reference values, and what holds for every value, entropy and target."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.train.entropy import next_by_rate, next_by_steps, next_zeta, target_at


@pytest.mark.parametrize(
    ("zeta", "entropy", "want"),
    [
        (0.08, 1.0, 0.04),
        (1e-4, 1.0, -1e-4),
        (-0.5, 1.0, -1.0),
        (0.1, 0.1, 0.2),
        (-1e-4, 0.1, 1e-4),
        (0.07, 0.5, 0.07),
        (0.0, 0.1, 1e-4),
        (0.0, 1.0, -1e-4),
        (0.8, 0.1, 1.0),
        (-0.8, 1.0, -1.0),
    ],
)
def test_zeta_reference_values(zeta: float, entropy: float, want: float) -> None:
    assert next_zeta(zeta, entropy, 0.5, bounds=(1e-4, 1.0)) == pytest.approx(want)


def test_zeta_never_sticks_at_zero() -> None:
    zeta = 0.0
    for _ in range(10):
        zeta = next_zeta(zeta, 0.1, 0.5)
    assert zeta == pytest.approx(0.05)


def test_mai_steps_by_a_quarter_between_zero_and_two_and_a_half() -> None:
    slack, found = 0.0, []
    for _ in range(12):
        slack = next_by_steps(slack, 0.1, 0.3, bounds=(0.0, 2.5), rate=0.25)
        found.append(slack)
    assert found[:2] == [0.25, 0.5] and found[-1] == 2.5
    assert next_by_steps(0.0, 0.4, 0.3, bounds=(0.0, 2.5), rate=0.25) == 0.0
    assert next_by_steps(1.0, 0.3, 0.3, bounds=(0.0, 2.5), rate=0.25) == 1.0


def test_skywork_bonus_by_hand() -> None:
    up = next_by_steps(0.001, 0.1, 0.2, bounds=(0.0, 0.005), rate=1e-4)
    assert up == pytest.approx(0.0011)
    assert next_by_steps(0.001, 0.3, 0.2, bounds=(0.0, 0.005), rate=1e-4) == pytest.approx(0.0009)


def test_sac_rule_by_hand() -> None:
    """log a <- log a - rate (H - H*)."""
    found = next_by_rate(0.01, 0.5, 1.0, bounds=(1e-5, 1.0), rate=0.1)
    assert found == pytest.approx(0.01 * math.exp(0.05))


NATS = st.floats(0, 12, allow_nan=False)
ZETAS = st.one_of(st.just(0.0), st.floats(1e-4, 0.05), st.floats(1e-4, 0.05).map(lambda z: -z))


@given(zeta=ZETAS, entropy=NATS, target=NATS)
def test_zeta_stays_within_its_bounds_and_moves_towards_the_target(
    zeta: float, entropy: float, target: float
) -> None:
    found = next_zeta(zeta, entropy, target)
    assert found == 0.0 == zeta or 1e-4 <= abs(found) <= 0.05
    if entropy < target:
        assert found >= zeta and (found > zeta or zeta == 0.05)
    elif entropy > target:
        assert found <= zeta and (found < zeta or zeta == -0.05)
    else:
        assert found == zeta


@given(zeta=ZETAS, entropy=NATS, target=NATS)
def test_zeta_treats_too_much_and_too_little_alike(
    zeta: float, entropy: float, target: float
) -> None:
    assert next_zeta(-zeta, target, entropy) == -next_zeta(zeta, entropy, target)


@given(value=st.floats(0.01, 2.5), entropy=NATS, target=NATS, rate=st.floats(1e-6, 3))
@pytest.mark.parametrize("rule", [next_by_steps, next_by_rate])
def test_a_dial_stays_within_its_bounds_and_moves_towards_the_target(
    rule: object, value: float, entropy: float, target: float, rate: float
) -> None:
    found = rule(value, entropy, target, bounds=(0.01, 2.5), rate=rate)  # type: ignore[operator]
    assert 0.01 <= found <= 2.5
    close = 1e-9 * value  # of exp(log(value))
    if entropy < target:
        assert found >= value - close
    elif entropy > target:
        assert found <= value + close
    else:
        assert found == pytest.approx(value)


@pytest.mark.parametrize(
    ("step", "want"), [(0, 0.6), (10, 0.6), (15, 0.5), (20, 0.4), (110, 0.2), (200, 0.0), (9999, 0)]
)
def test_a_schedule_is_linear_between_its_points_and_constant_outside(
    step: int, want: float
) -> None:
    schedule = [(10, 0.6), (20, 0.4), (200, 0.0)]
    assert target_at(schedule, step) == pytest.approx(want)
