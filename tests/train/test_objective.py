"""What a step minimises: algorithms by row, terms apart, corrections before the weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.algorithms import ALGORITHMS, Algorithm
from treadle.batch import AGGREGATIONS, pack, token_weights
from treadle.config import CorrectionConfig, LearnConfig
from treadle.errors import ContractError
from treadle.losses import POLICY_LOSSES
from treadle.train.forward import forward
from treadle.train.mismatch import mismatch_metrics
from treadle.train.objective import Objective
from treadle.train.sft import demonstration_sample
from treadle.train.step import Trainer
from treadle.types import Sample

Draw = Callable[..., list[Sample]]


def learn(**options: Any) -> LearnConfig:
    return LearnConfig(**({"lr": 1e-2, "grad_clip": 0.0} | options))


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Of the first step: AdamW's first moment is (1 - beta1) times the gradient."""
    tensors = trainer.state_dict()["tensors"]
    scale = 1 - trainer.learn.betas[0]
    return {k: v / scale for k, v in tensors.items() if k.endswith(".exp_avg")}


def close(a: dict[str, Tensor], b: dict[str, Tensor], atol: float = 1e-6) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], atol=atol) for k in a)


def off_policy(policy: Any) -> None:
    """Move the policy a little, so that every part of a loss takes part."""
    with torch.no_grad():
        policy.parameters()["head"].mul_(1.1)


# --------------------------------------------------------------------------- aggregation


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "prompt_mean"])
def test_the_split_into_micro_batches_changes_no_gradient(
    make_policy: Callable[..., Any], draw_step: Draw, loss: str, aggregation: str
) -> None:
    """B042 for every loss, with weights that differ from row to row."""
    found = []
    for micro_tokens in (4096, 16):
        policy = make_policy()
        samples = draw_step(policy)
        off_policy(policy)
        config = learn(loss=loss, aggregation=aggregation, micro_tokens=micro_tokens)
        trainer = Trainer(policy, config)
        metrics = trainer.step(samples, step=0).metrics
        found.append((gradients(trainer), metrics))
    assert found[0][1]["batch/micro_batches"] == 1 < found[1][1]["batch/micro_batches"]
    assert close(found[0][0], found[1][0], atol=2e-5)
    assert found[0][1]["loss/total"] == pytest.approx(found[1][1]["loss/total"], abs=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_step_weighs_tokens_as_its_aggregation_says(
    make_policy: Callable[..., Any], draw_step: Draw, aggregation: str
) -> None:
    """Against -sum w A log pi, each row alone, on-policy."""
    policy, reference = make_policy(), make_policy()
    samples = draw_step(policy)
    trainer = Trainer(policy, learn(aggregation=aggregation, norm_tokens=7))
    trainer.step(samples, step=0)
    weights = token_weights(samples, aggregation, norm_tokens=7)
    total = torch.zeros(())
    for sample, weight in zip(samples, weights, strict=True):
        (micro,) = pack([sample], micro_tokens=64)
        out = forward(reference, micro)
        total = total - weight * (out.advantage * out.logp).sum()
    total.backward()
    wanted = {f"{k}.exp_avg": p.grad for k, p in reference.parameters().items()}
    assert close(gradients(trainer), wanted, atol=1e-5)


def test_order_of_rows_does_not_matter_for_losses_over_rows(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    for algorithm in ("gspo", "kimi_pmd", "deepseek"):
        found = []
        for order in (1, -1):
            policy = make_policy()
            samples = draw_step(policy)
            off_policy(policy)
            trainer = Trainer(policy, learn(algorithm=algorithm))
            trainer.step(samples[::order], step=0)
            found.append(gradients(trainer))
        assert close(*found, atol=1e-5), algorithm


# --------------------------------------------------------------------------- by task set


def of_sets(samples: list[Sample]) -> list[Sample]:
    """Groups 0 and 1 are of set a, 2 and 3 of set b."""
    return [replace(s, taskset="a" if s.ordinal < 2 else "b") for s in samples]


def test_each_task_set_has_its_own_loss_and_shares_the_denominators(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    """The gradient of a mixed step is the sum of each set's part with the step's weights."""
    algorithms = {"": ALGORITHMS["cispo"], "b": ALGORITHMS["gspo"]}
    policy = make_policy()
    samples = of_sets(draw_step(policy))
    off_policy(policy)
    trainer = Trainer(policy, learn(), algorithms=algorithms)
    mixed = trainer.step(samples, step=0).metrics
    modes = ["token_mean" if s.taskset == "a" else "seq_mean_token_mean" for s in samples]
    weights = token_weights(samples, modes)

    reference = make_policy()
    off_policy(reference)
    total = torch.zeros(())
    for taskset, loss in (("a", "cispo"), ("b", "gspo")):
        rows = [i for i, s in enumerate(samples) if s.taskset == taskset]
        mine = [weights[i] for i in rows]
        for micro in pack([samples[i] for i in rows], micro_tokens=4096, weights=mine):
            total = total + POLICY_LOSSES[loss](forward(reference, micro)).loss
    total.backward()
    wanted = {f"{k}.exp_avg": p.grad for k, p in reference.parameters().items()}
    assert close(gradients(trainer), wanted, atol=1e-5)
    assert mixed["loss/total"] == pytest.approx(total.item(), abs=1e-5)
    assert mixed["tokens/trained"] == sum(sum(s.trained) for s in samples)


def test_two_sets_of_one_algorithm_are_one_call_and_change_nothing(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    found = []
    for algorithms in (None, {"": ALGORITHMS["cispo"], "a": ALGORITHMS["cispo"]}):
        policy = make_policy()
        trainer = Trainer(policy, learn(), algorithms=algorithms)
        trainer.step(of_sets(draw_step(policy)), step=0)
        found.append(trainer.state_dict()["tensors"])
    assert all(torch.equal(found[0][k], found[1][k]) for k in found[0])
    objective = Objective({"": ALGORITHMS["cispo"], "a": ALGORITHMS["cispo"]})
    assert objective.key("a") == objective.key("b") == ""


def test_a_shift_of_the_upper_clip_is_from_the_preset_and_leaves_it_as_it_was() -> None:
    """A controller moves a bound from step to step: shifts do not add up."""
    objective = Objective({"": ALGORITHMS["dapo"], "a": ALGORITHMS["dppo_tv"]})
    for by in (0.5, 0.1, 0.0):
        objective.shift_clip_high(by)
        assert objective.options[""]["clip_high"] == pytest.approx(0.28 + by)
        assert objective.options["a"] == dict(ALGORITHMS["dppo_tv"].options)
    assert ALGORITHMS["dapo"].options == {"clip_high": 0.28}


def test_a_shift_moves_the_bounds_of_other_losses_in_proportion_and_never_below_their_ratio_of_1():
    """From .28 down to .05, a bound of .2 that moved by as much would cut on-policy tokens."""
    objective = Objective(
        {"": ALGORITHMS["dapo"], "a": ALGORITHMS["grpo"], "b": ALGORITHMS["gspo"]}
    )
    objective.shift_clip_high(0.05 - 0.28)
    assert objective.options["a"]["clip_high"] == pytest.approx(0.2 * 0.05 / 0.28)
    assert objective.options["b"]["clip_high"] == pytest.approx(4e-4 * 0.05 / 0.28)
    objective.shift_clip_high(0.28)
    assert objective.options["b"]["clip_high"] == pytest.approx(8e-4)


# --------------------------------------------------------------------------- terms


def test_demonstrations_and_rollouts_do_not_dilute_one_another(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    """Each term by its own count of tokens: the gradient of both is the sum of each alone."""
    demos = [
        replace(demonstration_sample(100 + i, ids, [False, *(True,) * (len(ids) - 1)]), taskset="d")
        for i, ids in enumerate(([1, 2, 3, 4, 5, 6], [7, 8]))
    ]
    algorithms: dict[str, Algorithm] = {"": ALGORITHMS["cispo"], "d": ALGORITHMS["sft"]}
    found = []
    for part in ("both", "rl", "ce"):
        policy = make_policy()
        rollouts = draw_step(policy)
        rows = {"both": [*rollouts, *demos], "rl": rollouts, "ce": demos}[part]
        trainer = Trainer(policy, learn(), algorithms=algorithms)
        metrics = trainer.step(rows, step=0).metrics
        found.append((gradients(trainer), metrics))
    (both, m), (rl, m_rl), (ce, m_ce) = found
    assert close(both, {k: rl[k] + ce[k] for k in rl}, atol=1e-5)
    assert m["tokens/demonstrated"] == 6 and m["loss/ce_nats"] == pytest.approx(
        m_ce["loss/ce_nats"]
    )
    assert m["tokens/trained"] == m_rl["tokens/trained"]
    assert m["loss/total"] == pytest.approx(m_rl["loss/total"] + m_ce["loss/total"], abs=1e-5)
    for name in ("ratio/mean", "ratio/max", "lag/max_versions", "advantage/abs_mean"):
        assert m[name] == pytest.approx(m_rl[name]), name
        assert name not in m_ce, "a number that is not defined is absent"


def test_a_rollout_without_logprobs_is_still_refused_beside_demonstrations(
    policy: Any, draw_step: Draw
) -> None:
    demo = replace(demonstration_sample(9, [1, 2], [False, True]), taskset="d")
    algorithms = {"": ALGORITHMS["cispo"], "d": ALGORITHMS["sft"]}
    broken = replace(demo, taskset="")
    with pytest.raises(ContractError, match="it was not sampled"):
        Trainer(policy, learn(), algorithms=algorithms).step([demo, broken], step=0)


# --------------------------------------------------------------------------- corrections


def shifted(sample: Sample, by: float) -> Sample:
    """The sampler reports every token `by` nats less probable than the trainer has it."""
    return replace(
        sample,
        logprobs=tuple(p - by if t else p
                       for p, t in zip(sample.logprobs, sample.trained, strict=True)),
    )  # fmt: skip


def test_a_rejected_row_leaves_the_step_and_its_denominators(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    """The step with a vetoed row is, bit for bit, the step without it."""
    veto = {"": replace(ALGORITHMS["cispo"], correction=CorrectionConfig(veto_high=5.0))}
    found = []
    for drop in (False, True):
        policy = make_policy()
        samples = draw_step(policy)
        samples[4] = shifted(samples[4], 2.0)
        rows = [s for i, s in enumerate(samples) if not (drop and i == 4)]
        trainer = Trainer(policy, learn(), algorithms=veto)
        found.append((trainer.step(rows, step=0).metrics, trainer.state_dict()["tensors"]))
    (with_it, a), (without, b) = found
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert with_it["correction/rejected_rows"] == 1 and without["correction/rejected_rows"] == 0
    assert with_it["correction/rejected_rows_frac"] == pytest.approx(1 / 12)
    assert with_it["correction/rejected_tokens"] == 4
    assert with_it["batch/rows"] == without["batch/rows"] == 11


def test_a_masked_token_stays_in_the_denominators(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    """Its gradient is gone, and nobody else's has grown."""
    mask = {"": replace(ALGORITHMS["cispo"],
                        correction=CorrectionConfig(keep_low=0.5, keep_high=2.0))}  # fmt: skip
    policy, reference = make_policy(), make_policy()
    samples = draw_step(policy)
    samples[4] = shifted(samples[4], 2.0)
    trainer = Trainer(policy, learn(), algorithms=mask)
    metrics = trainer.step(samples, step=0).metrics
    weights = token_weights(samples, "token_mean")
    weights[4] = 0.0
    (micro,) = pack(samples, micro_tokens=4096, weights=weights)
    POLICY_LOSSES["cispo"](forward(reference, micro)).loss.backward()
    wanted = {f"{k}.exp_avg": p.grad for k, p in reference.parameters().items()}
    assert close(gradients(trainer), wanted, atol=1e-6)
    masked = sum(samples[4].trained) / metrics["tokens/trained"]
    assert metrics["correction/weight_mean"] == pytest.approx(1 - masked)
    assert metrics["correction/dropped_negative_frac"] > 0
    assert metrics["correction/dropped_positive_frac"] == 0


def test_a_step_of_rejected_rows_is_skipped_with_its_reason(policy: Any, draw_step: Draw) -> None:
    veto = {"": replace(ALGORITHMS["cispo"], correction=CorrectionConfig(veto_high=5.0))}
    before = {k: p.detach().clone() for k, p in policy.parameters().items()}
    samples = [shifted(s, 2.0) for s in draw_step(policy)]
    result = Trainer(policy, learn(), algorithms=veto).step(samples, step=0)
    assert result.skipped and "rejected" in result.reason
    assert all(torch.equal(p, before[k]) for k, p in policy.parameters().items())


def test_the_guard_sees_the_rows_that_are_about_to_be_rejected(
    policy: Any, draw_step: Draw
) -> None:
    """A gross mismatch stops the run; it is not vetoed away in silence."""
    veto = {"": replace(ALGORITHMS["cispo"], correction=CorrectionConfig(veto_high=5.0))}
    samples = [shifted(s, 2.0) if i % 2 else s for i, s in enumerate(draw_step(policy))]
    with pytest.raises(ContractError, match="trainer and sampler disagree"):
        Trainer(policy, learn(), algorithms=veto).step(samples, step=0, guard=True)


def test_ratios_are_reported_against_the_sampler_also_under_a_correction(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    found = []
    for algorithm in ("cispo", "decoupled_ppo"):
        policy = make_policy()
        samples = [shifted(s, 0.1) for s in draw_step(policy)]
        trainer = Trainer(policy, learn(algorithm=algorithm, advantage="group_mean"))
        found.append(trainer.step(samples, step=0).metrics)
    for name in ("ratio/mean", "policy/kl_k3_nats", "ratio/ess_frac", "tokens/trained"):
        assert found[0][name] == pytest.approx(found[1][name]), name
    assert found[1]["correction/weight_mean"] == pytest.approx(math.exp(0.1), rel=1e-4)


# --------------------------------------------------------------------------- two factors


def test_at_lag_zero_all_of_the_difference_is_mismatch(policy: Any, draw_step: Draw) -> None:
    samples = [shifted(s, 0.1) for s in draw_step(policy)]
    m = Trainer(policy, learn()).step(samples, step=0).metrics
    assert m["mismatch/measured_frac"] == 1.0
    for name in ("mean", "min", "max"):
        assert m[f"mismatch/rho_{name}"] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert m["mismatch/k3_nats"] == pytest.approx(math.exp(0.1) - 1 - 0.1, rel=1e-3)
    assert m["staleness/ratio_mean"] == 1.0 and m["staleness/k3_nats"] == 0.0


def test_at_lag_one_what_was_measured_splits_into_two_factors(policy: Any, draw_step: Draw) -> None:
    """prox = what the trainer had when it sampled; then its weights moved."""
    samples = draw_step(policy)
    measured = [replace(shifted(s, 0.1), prox_logprobs=s.logprobs) for s in samples]
    off_policy(policy)
    m = Trainer(policy, learn()).step(measured, step=1).metrics
    assert m["mismatch/measured_frac"] == 1.0
    assert m["mismatch/rho_mean"] == pytest.approx(math.exp(0.1), rel=1e-4)
    assert m["staleness/k3_nats"] > 1e-5 and m["staleness/ratio_max"] > 1.001
    (micro,) = pack(measured, micro_tokens=4096)
    assert np.isfinite(micro.prox).all()


def test_what_was_not_measured_is_in_neither_factor(policy: Any, draw_step: Draw) -> None:
    """At lag 1 without a measurement only the product is known, and that is what is reported."""
    samples = draw_step(policy)
    off_policy(policy)
    m = Trainer(policy, learn()).step(samples, step=1).metrics
    assert m["mismatch/measured_frac"] == 0.0
    assert not [n for n in m if n.startswith(("mismatch/rho", "mismatch/k3", "staleness/"))]
    assert m["policy/kl_k3_nats"] > 0


def test_measured_tokens_are_counted_over_sampled_ones_alone(policy: Any, draw_step: Draw) -> None:
    old, new = draw_step(policy, version=0), draw_step(policy, version=1, seed=1)
    rows = [*old, *(replace(s, ordinal=s.ordinal + 50) for s in new)]
    scored = [(m, m.behaviour.copy()) for m in pack(rows, micro_tokens=4096)]
    found = mismatch_metrics(scored, version=1)
    tokens = [sum(sum(s.trained) for s in part) for part in (old, new)]
    assert found["mismatch/measured_frac"] == pytest.approx(tokens[1] / sum(tokens))
    assert found["mismatch/rho_max"] == 1.0
