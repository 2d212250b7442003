"""The control of a run: timing, targets, limits, state, and options that contradict."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treadle.config import ENTROPY_METHODS, EntropyConfig, RunConfig, from_dict, override, to_dict
from treadle.errors import ConfigError, WeightsError
from treadle.train.entropy import Dial, EntropyControl

EVERY = pytest.mark.parametrize("method", ENTROPY_METHODS)


def control(method: str = "repo_r", **options: Any) -> EntropyControl:
    return EntropyControl(
        EntropyConfig(method=method, **options),  # type: ignore[arg-type]
        clip_high=0.28 if method in ("adapo", "mai") else None,
        loss="ppo_clip",
    )


# --------------------------------------------------------------------------- timing and target


def test_a_step_trains_with_what_the_steps_before_it_measured() -> None:
    c = control(target=0.5, bounds=(1e-4, 1.0), strength=0.1)
    used = []
    for step, entropy in enumerate([0.1, 0.1, 0.9]):
        used.append(c.start(step).value)
        metrics, _ = c.measure(step, entropy)
        assert metrics["entropy/control"] == used[-1]
    assert used == pytest.approx([0.1, 0.2, 0.4]) and c.value == pytest.approx(0.2)


def test_the_initial_target_is_the_first_entropy_that_was_measured() -> None:
    c = control()
    assert c.target(0) is None
    first, _ = c.measure(0, 1.7)
    assert first["entropy/target_nats"] == 1.7 and first["entropy/error_nats"] == 0
    assert c.value == 1e-3, "on the target nothing moves"
    later, _ = c.measure(1, 1.2)
    assert later["entropy/target_nats"] == 1.7
    assert later["entropy/error_nats"] == pytest.approx(-0.5)
    assert c.value == 2e-3


def test_a_schedule_is_followed_by_step() -> None:
    c = control(target=((0, 0.6), (10, 0.2)))
    assert c.measure(5, 0.4)[0]["entropy/target_nats"] == pytest.approx(0.4)
    assert c.measure(10, 0.4)[0]["entropy/target_nats"] == pytest.approx(0.2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_entropy_that_is_not_finite_moves_nothing(value: float) -> None:
    c = control()
    c.measure(0, 1.0)
    before = c.state_dict()
    c.measure(1, value)
    assert c.state_dict() == before


# --------------------------------------------------------------------------- what a dial does


def vectors(n: int = 3, **given: Any) -> dict[str, torch.Tensor]:
    plain = {
        "advantage": torch.tensor([1.0, -1.0, 2.0][:n]),
        "logp": torch.tensor([-1.0, -2.0, -3.0][:n]),
        "entropy": torch.tensor([0.5, 0.6, 0.7][:n]),
        "trained": torch.ones(n, dtype=torch.bool),
    }
    return plain | given


def test_adapo_and_mai_move_the_upper_clip_of_the_loss() -> None:
    adapo, mai = control("adapo", target=0.5), control("mai", target=0.5)
    assert adapo.start(0).clip_shift == mai.start(0).clip_shift == 0
    for c in (adapo, mai):
        c.measure(0, 0.1)
    assert adapo.start(1).value == pytest.approx(0.30)
    assert adapo.start(1).clip_shift == pytest.approx(0.02)
    assert mai.start(1).clip_shift == 0.25


@pytest.mark.parametrize("method", ["adapo", "mai"])
def test_a_loss_without_an_upper_clip_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="loss `cispo` has none"):
        EntropyControl(EntropyConfig(method=method), clip_high=None, loss="cispo")  # type: ignore[arg-type]


def test_adapo_refuses_a_clip_outside_of_its_bounds() -> None:
    with pytest.raises(ConfigError, match=r"is 0\.0004, outside of its bounds 0\.05\.\.1"):
        EntropyControl(EntropyConfig(method="adapo"), clip_high=4e-4, loss="gspo")


def test_the_bonus_is_active_below_the_target_alone() -> None:
    c = control("bonus", target=0.5, rate=1e-3)
    assert not c.start(0).needs_entropy_gradient, "nothing was measured yet"
    c.measure(0, 0.1)
    assert c.start(1).value == pytest.approx(1e-3) and c.start(1).needs_entropy_gradient
    c.measure(1, 0.6)
    assert c.start(2).value == 0.0
    assert c.value == 0.0


def test_a_bonus_is_the_coefficient_times_the_mean_entropy_of_the_step() -> None:
    dial = Dial(method="sac", value=0.01)
    entropy = torch.tensor([0.5, 0.6, math.nan], requires_grad=True)
    term = dial.penalty(
        torch.zeros(3),
        torch.zeros(3),
        entropy,
        torch.tensor([True, True, False]),
        torch.ones(3),
        num_tokens=8,
    )
    assert term is not None and term.item() == pytest.approx(-0.01 * 1.1 / 8)
    term.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([-0.01 / 8, -0.01 / 8, 0.0])


def test_clip_cov_takes_the_advantage_of_chosen_tokens() -> None:
    x = vectors()
    chosen = torch.tensor([False, True, False])
    found = Dial(method="clip_cov", value=0.1).advantage(**x, chosen=chosen)
    assert found.tolist() == [1.0, 0.0, 2.0]


def test_kl_cov_holds_chosen_tokens_by_the_size_of_their_log_ratio() -> None:
    """weight x strength x |log pi - log mu|: the gradient has the sign of the move."""
    logp = torch.tensor([-1.0, -2.0, -3.0, math.nan], requires_grad=True)
    mu = torch.tensor([-1.5, -1.5, -1.5, math.nan])
    chosen, trained = torch.tensor([True, True, False, True]), torch.tensor([True] * 3 + [False])
    weight = torch.tensor([0.25, 0.5, 1.0, math.nan])
    dial = Dial(method="kl_cov", value=2.0)
    term = dial.penalty(logp, mu, torch.zeros(4), trained, weight, num_tokens=3, chosen=chosen)
    assert term is not None and term.item() == pytest.approx(2 * (0.25 * 0.5 + 0.5 * 0.5))
    term.backward()
    assert logp.grad is not None and logp.grad.tolist() == [0.5, -1.0, 0.0, 0.0]


@EVERY
def test_a_dial_leaves_alone_what_is_not_its_own(method: str) -> None:
    dial = control(method).start(0)
    x = vectors()
    same = dial.advantage(**x) is x["advantage"]
    assert same == (method not in ("repo_r", "repo_d"))
    assert dial.clip_shift == 0
    assert dial.selects == (method in ("clip_cov", "kl_cov"))


def test_only_methods_that_add_to_the_advantage_or_the_loss_act_without_an_advantage() -> None:
    acts = {m for m in ENTROPY_METHODS if control(m).start(0).acts_without_advantage}
    assert acts == {"repo_d", "sac"}


# --------------------------------------------------------------------------- limits


def test_a_controller_at_its_limit_is_reported_once() -> None:
    c = control(target=1.0, alarm_steps=3)
    alarms = []
    for step in range(15):
        metrics, alarm = c.measure(step, 0.4)
        alarms += [(step, alarm)] if alarm else []
    # 1e-3 doubles to .05 in six steps; the first step that cannot move is the seventh.
    assert [step for step, _ in alarms] == [8]
    assert "limit of 0.05 for 3 steps" in alarms[0][1] and "0.4 nats" in alarms[0][1]
    assert metrics["entropy/at_limit_steps"] == 9
    c.measure(15, 1.2)
    assert c.measure(16, 0.9)[0]["entropy/at_limit_steps"] == 0


def test_both_ends_are_a_limit_of_repo_r() -> None:
    c = control(target=0.1, alarm_steps=1)
    assert any(c.measure(step, 0.9)[1] for step in range(20))


@pytest.mark.parametrize("method", ["mai", "bonus", "sac"])
def test_a_method_that_is_off_above_the_target_is_not_at_its_limit(method: str) -> None:
    c = control(method, target=0.1, alarm_steps=1)
    for step in range(400):
        metrics, alarm = c.measure(step, 0.9)
        assert not alarm and metrics["entropy/at_limit_steps"] == 0


@EVERY
@given(entropies=st.lists(st.floats(0, 5), min_size=1, max_size=40), target=st.floats(0, 5))
def test_no_history_of_entropies_takes_a_dial_out_of_its_bounds(
    method: str, entropies: list[float], target: float
) -> None:
    c = control(
        method, **({} if method in ("repo_d", "clip_cov", "kl_cov") else {"target": target})
    )
    low, high = c.config.setting("bounds") or (0.0, 1.0)
    for step, entropy in enumerate(entropies):
        c.measure(step, entropy)
        size = abs(c.value)
        if method in ("clip_cov", "kl_cov", "repo_d"):
            assert size == control(method).value
        else:
            assert low <= size <= high


# --------------------------------------------------------------------------- state


@EVERY
def test_state_goes_through_json_and_gives_the_same_bits(method: str) -> None:
    one, two = control(method), control(method)
    entropies = [0.7, 0.61, 0.9, 0.33, 0.1, 1.1, 0.2]
    for step, entropy in enumerate(entropies[:3]):
        one.measure(step, entropy)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for step, entropy in enumerate(entropies[3:], start=3):
        assert one.start(step) == two.start(step)
        assert one.measure(step, entropy) == two.measure(step, entropy)
    assert one.state_dict() == two.state_dict()


def test_a_state_of_another_method_is_refused() -> None:
    with pytest.raises(WeightsError, match="controller of `mai`, the run has `repo_r`"):
        control("repo_r").load_state_dict(control("mai").state_dict())


# --------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method=repo_r", "rate=0.1"], "method `repo_r` has no such setting"),
        (["method=repo_d", "target=0.5"], "no controller that could hold a target"),
        (["method=clip_cov", "strength=0.5"], "method `clip_cov` has no such setting"),
        (["method=mai", "bounds=[2, 1]"], "rising"),
        (["method=repo_r", "bounds=[0, 1]"], "> 0"),
        (["method=repo_r", "strength=0.5"], "within the bounds 0.0001..0.05"),
        (["method=sac", "rate=0"], "`learn.entropy.rate` must be > 0"),
        (["method=kl_cov", "share=2"], r"in \(0, 1\]"),
        (["target=[[5, 0.1], [5, 0.2]]"], "steps >= 0 that rise"),
        (["target=first"], "`learn.entropy.target` must be one of `initial`"),
        (["target=-1"], ">= 0 nats"),
        (["methodx=mai"], "unknown config key"),
    ],
)
def test_options_that_are_unknown_or_contradict_are_errors(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        override(RunConfig(), [f"learn.entropy.{s}" for s in settings])


@pytest.mark.parametrize(
    ("text", "want"),
    [("initial", "initial"), ("0.4", 0.4), ("[[0, 0.6], [100, 0.4]]", ((0, 0.6), (100, 0.4)))],
)
def test_a_target_is_a_number_the_initial_entropy_or_a_schedule(text: str, want: object) -> None:
    config = override(RunConfig(), [f"learn.entropy.target={text}"])
    assert config.learn.entropy is not None and config.learn.entropy.target == want
    assert from_dict(to_dict(config)) == config
