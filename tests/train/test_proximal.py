"""Mismatch of older weights: measured by the very version that sampled, and never by another."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.train.conftest import ToyPolicy
from tests.train.test_policy_step import make, sampled
from treadle.batch import pack
from treadle.config import (
    CorrectionConfig,
    LearnConfig,
    LoraConfig,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
)
from treadle.errors import ConfigError
from treadle.models import tiny
from treadle.train import Trainer
from treadle.train.forward import forward
from treadle.train.mismatch import ALARM_STEPS, Watch, mismatch_metrics
from treadle.train.proximal import (
    LORA_SHARE,
    Proximal,
    chosen,
    kept_versions,
    mismatch_share,
    proximal_of,
)
from treadle.types import Sample

Draw = Callable[..., list[Sample]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.build_random(path, hidden=32, intermediate=48)
    return path


def trainer_of(policy: Any, *, share: float = 1.0, versions: int = 2, **options: Any) -> Trainer:
    proximal = Proximal(policy, share=share, versions=versions, micro_tokens=4096)
    given = {"lr": 1e-2, "grad_clip": 0.0, "micro_tokens": 4096, "mismatch_share": share}
    config = LearnConfig(**(given | options))
    return Trainer(policy, config, proximal=proximal)


@torch.no_grad()
def scored(policy: Any, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
    """What the trainer computes for every row now, NaN where untrained."""
    out = [[math.nan] * len(s.ids) for s in samples]
    for micro in pack(samples, micro_tokens=4096):
        logp = forward(policy, micro).logp.float().tolist()
        for row, position, value in zip(micro.row, micro.position, logp, strict=True):
            out[row][position] = value
    return [tuple(row) for row in out]


def same(a: Sequence[float], b: Sequence[float]) -> bool:
    """Bit for bit, NaN equal to NaN."""
    return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)


def bits(policy: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.parameters().items()}


def sampled_as(samples: Sequence[Sample], logprobs: Sequence[tuple[float, ...]]) -> list[Sample]:
    return [replace(s, logprobs=x) for s, x in zip(samples, logprobs, strict=True)]


def shifted(samples: Sequence[Sample], nats: float) -> list[Sample]:
    """As if the engine had given every sampled token `nats` less."""
    return [replace(s, logprobs=tuple(x - nats for x in s.logprobs)) for s in samples]


# --------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_old_weights_say_again_what_they_said_when_they_were_current(
    directory: Path, dtype: torch.dtype, lora: bool
) -> None:
    """To the bit, two updates later, at the temperature of the rollout."""
    policy = make(directory, dtype, lora=lora)
    trainer = trainer_of(policy)
    samples = sampled(policy, temperature=0.7)
    then = scored(policy, samples)
    for step in range(2):
        assert not trainer.step(samples, step=step).skipped
    now, weights = scored(policy, samples), bits(policy)

    measured, timed = trainer.measured(samples, version=2)
    for sample, before, after in zip(measured, then, now, strict=True):
        assert same(sample.prox_logprobs, before) and not same(before, after)
    assert [replace(s, prox_logprobs=()) for s in measured] == samples
    assert set(timed) == {"time/proximal_s"}
    assert all(map(same, scored(policy, samples), now)), "the policy is what it was"
    assert all(torch.equal(p, weights[name]) for name, p in policy.parameters().items())


def test_each_token_is_scored_by_its_own_version_and_current_ones_by_none(
    make_policy: Callable[..., ToyPolicy], draw_step: Draw
) -> None:
    policy = make_policy()
    trainer = trainer_of(policy)
    rows, then = [], []
    for version in range(3):
        drawn = draw_step(policy, seed=version, version=version)
        drawn = [replace(s, ordinal=10 * version + s.ordinal) for s in drawn]
        rows += drawn
        then += scored(policy, drawn)
        if version < 2:
            trainer.step(drawn, step=version)
    measured, _ = trainer.measured(rows, version=2)
    for sample, wanted in zip(measured, then, strict=True):
        if sample.ordinal >= 20:
            assert sample.prox_logprobs == ()
        else:
            # Rows are packed with others than then, which may move the last bit.
            assert np.allclose(sample.prox_logprobs, wanted, atol=1e-6, equal_nan=True)


def test_turns_of_one_row_are_scored_each_by_its_own_version(
    policy: ToyPolicy, draw_step: Draw
) -> None:
    samples = draw_step(policy)
    row = next(s for s in samples if sum(s.trained) == 5)
    start, last = row.trained.index(True), len(row.ids) - 1
    trained = tuple(x and t != start + 2 for t, x in enumerate(row.trained))  # an observation
    versions = tuple(0 if t < start + 2 else 1 for t in range(len(row.ids)))
    row = replace(
        row,
        trained=trained,
        versions=tuple(v if x else -1 for v, x in zip(versions, trained, strict=True)),
    )
    trainer, then = trainer_of(policy), []
    for step in range(2):
        then.append(scored(policy, [row])[0])
        trainer.step(samples, step=step)
    (measured,), _ = trainer.measured([row], version=2)
    assert same(measured.prox_logprobs[: start + 2], then[0][: start + 2])
    assert same(measured.prox_logprobs[start + 2 :], then[1][start + 2 :])
    assert then[0][last] != then[1][last] and then[0][start] != then[1][start]


def test_what_a_publication_overtook_is_left_out(policy: ToyPolicy, draw_step: Draw) -> None:
    """Its prefix is of older weights than itself: neither the one nor the other reproduces it."""
    samples = draw_step(policy)
    (row,) = [s for s in samples if sum(s.trained) == 5][:1]
    start = row.trained.index(True)
    late = tuple(t >= start + 3 for t in range(len(row.ids)))
    versions = tuple(1 if x else v for x, v in zip(late, row.versions, strict=True))
    row = replace(row, versions=versions, overtaken=late)
    trainer = trainer_of(policy)
    for version in range(2):
        assert trainer.proximal is not None
        trainer.proximal.keep(version)
    (measured,), _ = trainer.measured([row], version=2)
    known = [t for t, x in enumerate(measured.prox_logprobs) if math.isfinite(x)]
    assert known == [start, start + 1, start + 2]
    for version, share in ((2, 0.6), (1, 0.6)):  # at lag 0 it does not count either
        (micro,) = pack([measured], micro_tokens=4096)
        found = mismatch_metrics([(micro, micro.behaviour + np.float32(1.0))], version=version)
        assert found["mismatch/measured_frac"] == pytest.approx(share)
        assert found["mismatch/rho_max"] == pytest.approx(1.0, abs=1e-5)


def test_a_version_that_is_not_kept_is_not_measured(policy: ToyPolicy, draw_step: Draw) -> None:
    """After a resume, or beyond schedule.max_lag: absent, and nothing in its place."""
    samples = draw_step(policy)
    trainer = trainer_of(policy, versions=2)
    assert trainer.measured(samples, version=1) == (samples, {})
    for version in range(4):
        trainer.proximal.keep(version)  # pyright: ignore
    assert trainer.proximal.versions == (2, 3)  # pyright: ignore
    assert trainer.measured(samples, version=4) == (samples, {})
    metrics = trainer.step(samples, step=4).metrics
    assert metrics["mismatch/measured_frac"] == 0.0
    assert not [n for n in metrics if n.startswith(("mismatch/rho", "staleness/"))]


def test_what_is_measured_already_is_not_measured_again(policy: ToyPolicy, draw_step: Draw) -> None:
    trainer = trainer_of(policy)
    trainer.proximal.keep(0)  # pyright: ignore
    once, _ = trainer.measured(draw_step(policy), version=1)
    assert trainer.measured(once, version=1) == (once, {})


def test_demonstrations_and_rows_of_other_groups_are_given_back_as_they_are(
    policy: ToyPolicy, draw_step: Draw
) -> None:
    samples = draw_step(policy)
    demo = replace(
        samples[0],
        ordinal=50,
        logprobs=(math.nan,) * len(samples[0].ids),
        versions=(-1,) * len(samples[0].ids),
    )
    proximal = Proximal(policy, share=0.5, versions=1, seed=3)
    proximal.keep(0)
    measured, _ = proximal.measure([*samples, demo], 1)
    mine = [chosen(s.ordinal, share=0.5, seed=3) for s in samples]
    assert 0 < sum(mine) < len(mine)
    assert [bool(s.prox_logprobs) for s in measured] == [*mine, False]
    assert measured[-1] is demo


# --------------------------------------------------------------------------- two factors


def old_step(policy: ToyPolicy, draw_step: Draw) -> list[Sample]:
    """Rows of version 0, whose sampler computed just what the trainer does."""
    samples = draw_step(policy)
    return sampled_as(samples, scored(policy, samples))


def test_a_planted_mismatch_is_in_rho_alone(policy: ToyPolicy, draw_step: Draw) -> None:
    """Lag 2, the same weights all along; the engine says 0.1 nats less of every token."""
    samples = shifted(old_step(policy, draw_step), 0.1)
    trainer = trainer_of(policy)
    for version in range(2):
        trainer.proximal.keep(version)  # pyright: ignore
    measured, _ = trainer.measured(samples, version=2)
    m = trainer.step(measured, step=2).metrics
    assert m["lag/max_versions"] == 2 and m["mismatch/measured_frac"] == 1.0
    for name in ("mean", "min", "max"):
        assert m[f"mismatch/rho_{name}"] == pytest.approx(math.exp(0.1), rel=1e-5)
    assert m["mismatch/k3_nats"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-3)
    assert m["staleness/ratio_mean"] == m["staleness/ratio_max"] == 1.0
    assert m["staleness/k3_nats"] == 0.0


def test_a_planted_change_of_weights_is_in_staleness_alone(
    policy: ToyPolicy, draw_step: Draw
) -> None:
    samples = old_step(policy, draw_step)
    trainer = trainer_of(policy)
    for version in range(2):
        trainer.step(draw_step(policy, seed=7, version=version), step=version)
    pi = scored(policy, samples)
    measured, _ = trainer.measured(samples, version=2)
    m = trainer.step(measured, step=2).metrics
    assert m["lag/max_versions"] == 2 and m["mismatch/measured_frac"] == 1.0
    assert m["mismatch/rho_min"] == m["mismatch/rho_max"] == 1.0
    assert m["mismatch/k3_nats"] == 0.0
    ratios = [
        math.exp(now - then)
        for row, sample in zip(pi, samples, strict=True)
        for now, then, t in zip(row, sample.logprobs, sample.trained, strict=True)
        if t
    ]
    assert m["staleness/ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-5)
    assert m["staleness/ratio_max"] == pytest.approx(max(ratios), rel=1e-5)
    assert m["staleness/k3_nats"] > 1e-4


def test_weights_and_drops_of_a_correction_at_lag_two_by_hand(
    policy: ToyPolicy, draw_step: Draw
) -> None:
    """rho in turn 1, 1, 2 and .5 (ESS .81), and 4, which is dropped; pi has moved meanwhile."""
    samples = old_step(policy, draw_step)
    wanted, weights, dropped, positive = [1.0, 1.0, 2.0, 0.5, 4.0], list[float](), [0, 0], [0, 0]
    rows = []
    for sample in samples:
        logprobs = list(sample.logprobs)
        for t in (t for t, mark in enumerate(sample.trained) if mark):
            rho = wanted[len(weights) % 5]
            sign = int(sample.advantages[t] > 0)
            logprobs[t] -= math.log(rho)
            weights.append(rho if rho < 3 else 0.0)
            dropped[sign] += rho > 3
            positive[sign] += 1
        rows.append(replace(sample, logprobs=tuple(logprobs)))
    correction = CorrectionConfig(weight="token", weight_max=5.0, keep_high=3.0)
    trainer = trainer_of(policy, correction=correction)
    for version in range(2):
        trainer.step(draw_step(policy, seed=7, version=version), step=version)
    measured, _ = trainer.measured(rows, version=2)
    m = trainer.step(measured, step=2).metrics
    n, total = len(weights), sum(weights)
    assert dropped[0] and dropped[1]
    assert m["correction/weight_mean"] == pytest.approx(total / n, rel=1e-5)
    ess = total**2 / (n * sum(w * w for w in weights))
    assert m["correction/ess_frac"] == pytest.approx(ess, rel=1e-5)
    assert m["correction/dropped_positive_frac"] == pytest.approx(dropped[1] / positive[1])
    assert m["correction/dropped_negative_frac"] == pytest.approx(dropped[0] / positive[0])
    assert m["mismatch/rho_max"] == pytest.approx(4.0, rel=1e-5)
    pi_over_mu = [math.exp(x) for x in _log_ratios(policy, rows)]
    assert max(pi_over_mu) != pytest.approx(4.0, rel=1e-3), "staleness would have shown"


def _log_ratios(policy: ToyPolicy, samples: Sequence[Sample]) -> list[float]:
    return [
        now - then
        for row, sample in zip(scored(policy, samples), samples, strict=True)
        for now, then, t in zip(row, sample.logprobs, sample.trained, strict=True)
        if t
    ]


# --------------------------------------------------------------------------- hazards


@pytest.mark.parametrize("lora", [True, False])
def test_an_error_in_the_forward_leaves_policy_and_random_state_as_they_were(
    directory: Path, lora: bool
) -> None:
    policy = make(directory, lora=lora)
    trainer = trainer_of(policy)
    samples = sampled(policy)
    for step in range(2):
        trainer.step(samples, step=step)
    now, weights, state = scored(policy, samples), bits(policy), torch.get_rng_state()
    unknown = replace(samples[0], ids=(10**6, *samples[0].ids[1:]))
    with pytest.raises(IndexError):
        trainer.measured([*samples, unknown], version=2)
    assert all(torch.equal(p, weights[name]) for name, p in policy.parameters().items())
    assert all(map(same, scored(policy, samples), now))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in policy.parameters().values())


@pytest.mark.parametrize(
    ("shares", "correction"), [((1.0, 0.0), "none"), ((0.5, 0.0), "token"), ((1.0, 0.0), "token")]
)
def test_a_measured_sample_of_groups_changes_no_update_and_all_of_them_only_corrections(
    make_policy: Callable[..., ToyPolicy],
    draw_step: Draw,
    shares: tuple[float, float],
    correction: Literal["none", "token"],
) -> None:
    found, measured = [], 0
    for share in shares:
        policy = make_policy()
        samples = draw_step(policy)
        trainer = trainer_of(policy, share=share, correction=CorrectionConfig(weight=correction))
        for step in range(3):
            rows, _ = trainer.measured(samples, version=step)
            measured += sum(bool(row.prox_logprobs) for row in rows)
            trainer.step(rows, step=step)
        found.append(bits(policy))
    assert measured
    alike = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert alike == (shares != (1.0, 0.0) or correction == "none")


# --------------------------------------------------------------------------- the share


def test_the_choice_is_a_function_of_seed_and_ordinal_that_grows_with_the_share() -> None:
    few = {o for o in range(8000) if chosen(o, share=1 / 8, seed=0)}
    many = {o for o in range(8000) if chosen(o, share=1 / 4, seed=0)}
    assert 900 < len(few) < 1100 and few < many
    assert few != {o for o in range(8000) if chosen(o, share=1 / 8, seed=1)}
    assert sorted(few)[:4] == [1, 6, 17, 18], "by every process alike"
    assert all(chosen(o, share=1.0, seed=0) for o in range(100))
    assert not any(chosen(o, share=0.0, seed=0) for o in range(100))


def config(*, lora: bool = True, share: float | None = None, eta: int = 2) -> RunConfig:
    return RunConfig(
        model=ModelConfig(lora=LoraConfig() if lora else None),
        learn=LearnConfig(mismatch_share=share),
        schedule=ScheduleConfig(eta=eta, max_lag=2 * eta),
    )


def test_what_a_run_measures_where_nothing_is_set() -> None:
    assert mismatch_share(config()) == LORA_SHARE == 0.125
    assert mismatch_share(config(lora=False)) == 0.0, "each version is a copy of the model"
    assert kept_versions(config()) == 4
    assert kept_versions(config(eta=0)) == kept_versions(config(lora=False)) == 0
    assert kept_versions(config(lora=False, share=0.5)) == 4
    for bad in (-0.1, 1.5):
        with pytest.raises(ConfigError, match=r"learn\.mismatch_share"):
            config(share=bad)


def test_a_share_of_0_keeps_nothing_and_gives_no_metric(policy: ToyPolicy, draw_step: Draw) -> None:
    assert proximal_of(policy, config(share=0.0)) is None
    trainer = Trainer(policy, LearnConfig(lr=1e-2), proximal=None)
    samples = draw_step(policy)
    assert trainer.measured(samples, version=1) == (samples, {})
    metrics = trainer.step(samples, step=1).metrics
    assert "time/proximal_s" not in metrics and metrics["mismatch/measured_frac"] == 0.0


def test_steps_that_are_applied_again_are_remembered(
    make_policy: Callable[..., ToyPolicy], draw_step: Draw
) -> None:
    """A resumed process measures by the versions that it went through, as the first one did."""
    policy = make_policy()
    samples, trainer = draw_step(policy), trainer_of(policy)
    for step in range(2):
        trainer.step(samples, step=step)
    again = make_policy()
    resumed = trainer_of(again)
    for step in range(2):
        resumed.step(samples, step=step)
    one, two = (t.measured(samples, version=2)[0] for t in (trainer, resumed))
    assert one == two and one != samples


# --------------------------------------------------------------------------- the alarm


def test_a_large_mismatch_of_five_measured_steps_in_a_row_is_told_once() -> None:
    watch = Watch()
    large = {"mismatch/k3_nats": 0.06, "mismatch/rho_max": 3.0}
    told = [watch.measure(large) for _ in range(ALARM_STEPS - 1)]
    told.append(watch.measure({"mismatch/measured_frac": 0.0}))  # says nothing either way
    assert not any(told)
    again = Watch()
    again.load_state_dict(watch.state_dict())
    (alarm,) = again.measure(large)
    assert "more than 0.05 nats" in alarm and "rho_max 3" in alarm
    assert not again.measure(large)
    assert not again.measure({"mismatch/k3_nats": 0.05, "mismatch/rho_max": 1.0})
    assert not any(again.measure(large) for _ in range(ALARM_STEPS - 1))
    assert again.measure(large)


def test_the_alarm_comes_with_a_step_and_its_count_with_a_checkpoint(
    make_policy: Callable[..., ToyPolicy], draw_step: Draw
) -> None:
    """0.5 nats too little from the engine: k3 = e^.5 - 1.5 = 0.15."""
    policy = make_policy()
    trainer, told = trainer_of(policy, lr=1e-6), []
    for step in range(ALARM_STEPS + 1):
        samples = shifted(draw_step(policy, version=step), 0.5)
        told.append(trainer.step(samples, step=step).alarms)
        if step == 2:
            state = trainer.state_dict()
            trainer = trainer_of(policy, lr=1e-6)
            trainer.load_state_dict(state)
    assert [len(alarms) for alarms in told] == [0, 0, 0, 0, 1, 0]
