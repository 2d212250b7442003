"""The step: one denominator, no dependence on the split, honest skips, exact resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.batch import pack, spread
from treadle.config import LearnConfig
from treadle.errors import ContractError, WeightsError
from treadle.train.forward import forward
from treadle.train.metrics import METRICS
from treadle.train.step import Trainer
from treadle.types import Sample

Draw = Callable[..., list[Sample]]
LOSSES = pytest.mark.parametrize("loss", ["cispo", "ppo_clip"])


def learn(**options: Any) -> LearnConfig:
    return LearnConfig(**({"lr": 1e-2, "grad_clip": 0.0} | options))


def weights(policy: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.parameters().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Of the first step: AdamW's first moment is (1 - beta1) times the gradient."""
    tensors = trainer.state_dict()["tensors"]
    scale = 1 - trainer.learn.betas[0]
    return {k: v / scale for k, v in tensors.items() if k.endswith(".exp_avg")}


# --------------------------------------------------------------------------- reference


@LOSSES
def test_the_gradient_is_that_of_rows_scored_one_by_one(
    make_policy: Callable[..., Any], draw_step: Draw, loss: str
) -> None:
    """Against the textbook: -sum A log pi / N, nothing packed, no prompt shared."""
    policy = make_policy()
    samples = draw_step(policy)
    trainer = Trainer(policy, learn(loss=loss))
    reference = make_policy()
    total = torch.zeros(())
    count = sum(sum(s.trained) for s in samples)
    for s in samples:
        for t in range(len(s.ids)):
            if s.trained[t]:
                (micro,) = pack(
                    [
                        replace(
                            s,
                            ids=s.ids[: t + 1],
                            trained=tuple(i == t for i in range(t + 1)),
                            logprobs=s.logprobs[: t + 1],
                            versions=s.versions[: t + 1],
                            advantages=s.advantages[: t + 1],
                        )
                    ],
                    micro_tokens=64,
                )
                total = total - s.advantages[t] * forward(reference, micro).logp[0] / count
    total.backward()
    result = trainer.step(samples, step=0)
    assert not result.skipped
    for name, parameter in reference.parameters().items():
        assert torch.allclose(gradients(trainer)[f"{name}.exp_avg"], parameter.grad, atol=1e-6)


def test_on_policy_metrics_say_so(policy: Any, draw_step: Draw) -> None:
    m = Trainer(policy, learn()).step(draw_step(policy), step=0, guard=True).metrics
    assert m["ratio/mean"] == pytest.approx(1, abs=1e-4)
    assert m["ratio/ess_frac"] == pytest.approx(1, abs=1e-4)
    assert 0 <= m["policy/kl_k3_nats"] < 1e-8
    assert m["lag/mean_versions"] == m["lag/max_versions"] == 0
    assert m["loss/clipped_frac"] == m["loss/dropped_positive_frac"] == 0
    assert m["parity/mean_abs_nats"] < 1e-5
    assert m["advantage/abs_mean"] > 0 and m["grad/norm"] > 0


def test_off_policy_metrics_by_hand(policy: Any, draw_step: Draw) -> None:
    samples = draw_step(policy)
    with torch.no_grad():
        policy.parameters()["head"].mul_(1.5)
    ratios = torch.tensor(
        [
            math.exp(float(policy.distribution(s.ids[:t])[s.ids[t]]) - s.logprobs[t])
            for s in samples
            for t in range(len(s.ids))
            if s.trained[t]
        ]
    )
    m = Trainer(policy, learn()).step(samples, step=0).metrics
    assert m["ratio/mean"] == pytest.approx(float(ratios.mean()), rel=1e-4)
    assert m["ratio/max"] == pytest.approx(float(ratios.max()), rel=1e-4)
    assert m["ratio/ess_frac"] == pytest.approx(
        float(ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())), rel=1e-4
    )
    assert m["ratio/ess_frac"] < 0.999
    assert m["policy/kl_k3_nats"] == pytest.approx(
        float((ratios - 1 - ratios.log()).mean()), rel=1e-3
    )
    assert m["policy/logprob_diff_nats"] == pytest.approx(float(ratios.log().mean()), rel=1e-3)


def test_entropy_is_that_of_the_full_distribution_at_the_sampling_temperature(
    policy: Any, draw_step: Draw
) -> None:
    samples = draw_step(policy, temperature=0.7)
    wanted = [
        float(-(logp.exp() * logp).sum())
        for s in samples
        for t in range(len(s.ids))
        if s.trained[t]
        for logp in [policy.distribution(s.ids[:t], 0.7)]
    ]
    m = Trainer(policy, learn()).step(samples, step=0).metrics
    assert m["policy/entropy_nats"] == pytest.approx(sum(wanted) / len(wanted), abs=1e-5)
    assert m["tokens/trained"] == len(wanted)


def test_every_metric_is_documented(policy: Any, draw_step: Draw) -> None:
    result = Trainer(policy, learn()).step(draw_step(policy), step=0, guard=True)
    sometimes = {"loss/ce_nats", "tokens/demonstrated"} | {
        name
        for name in METRICS
        if name.startswith(
            (
                *("correction/", "entropy/", "kl/", "loss/kl", "loss/entropy", "value/"),
                *("time/critic", "time/proximal"),
            )
        )
    }
    assert set(result.metrics) == set(METRICS) - sometimes
    assert all(isinstance(v, float) and math.isfinite(v) for v in result.metrics.values())


# --------------------------------------------------------------------------- invariances


@LOSSES
def test_loss_and_gradient_do_not_depend_on_the_split_into_micro_batches(
    make_policy: Callable[..., Any], draw_step: Draw, loss: str
) -> None:
    """B042 on the whole step: one, a few, and one row per micro-batch."""
    outcomes = []
    for micro_tokens in (4096, 24, 16):
        policy = make_policy()
        samples = draw_step(policy)
        with torch.no_grad():  # off-policy, so that every part of the loss takes part
            policy.parameters()["head"].mul_(1.3)
        trainer = Trainer(policy, learn(loss=loss, micro_tokens=micro_tokens))
        outcomes.append((trainer.step(samples, step=0).metrics, gradients(trainer)))
    assert outcomes[0][0]["batch/micro_batches"] == 1 < outcomes[2][0]["batch/micro_batches"]
    unsplit = {"batch/micro_batches", "batch/oversized", "tokens/packed"}
    for metrics, grads in outcomes[1:]:
        for name, value in metrics.items():
            if name not in unsplit and not name.startswith("time/"):
                assert value == pytest.approx(outcomes[0][0][name], abs=1e-5), name
        for name, grad in grads.items():
            assert torch.allclose(grad, outcomes[0][1][name], atol=1e-5)


def test_order_of_rows_does_not_matter(make_policy: Callable[..., Any], draw_step: Draw) -> None:
    outcomes = []
    for order in (1, -1):
        policy = make_policy()
        trainer = Trainer(policy, learn())
        trainer.step(draw_step(policy)[::order], step=0)
        outcomes.append(gradients(trainer))
    for name, grad in outcomes[0].items():
        assert torch.allclose(grad, outcomes[1][name], atol=1e-6)


def test_a_neighbour_in_the_pack_changes_nothing(policy: Any, draw_step: Draw) -> None:
    """B054: change every token of A, and B's logprobs stay, and equal those of B alone."""
    a, b = draw_step(policy)[0], draw_step(policy)[-1]
    changed = replace(a, ids=tuple((i + 1) % 12 for i in a.ids))
    found = []
    for rows in ([a, b], [changed, b], [b]):
        (micro,) = pack(rows, micro_tokens=64)
        logp = forward(policy, micro).logp
        found.append(logp[torch.tensor(micro.row == len(rows) - 1)])
    assert torch.allclose(found[0], found[2], atol=1e-6)
    assert torch.allclose(found[1], found[2], atol=1e-6)


def test_what_untrained_positions_hold_does_not_matter(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    """B017, B018: logprobs of prompt and tool tokens are never read."""
    outcomes = []
    for filler in (math.nan, 5.0):
        policy = make_policy()
        samples = [
            replace(
                s,
                logprobs=tuple(
                    x if t else filler for x, t in zip(s.logprobs, s.trained, strict=True)
                ),
            )
            for s in draw_step(policy)
        ]
        Trainer(policy, learn()).step(samples, step=0)
        outcomes.append(weights(policy))
    assert same(*outcomes)


def test_rows_of_different_temperatures_are_scored_at_their_own(
    policy: Any, draw_step: Draw
) -> None:
    """B025: tempered sampler logprobs against tempered trainer logprobs, ratio 1."""
    cold, hot = draw_step(policy, temperature=0.5), draw_step(policy, temperature=1.3, seed=1)
    hot = [replace(s, ordinal=s.ordinal + 100) for s in hot]
    m = Trainer(policy, learn()).step(cold + hot, step=0, guard=True).metrics
    assert m["ratio/max"] == pytest.approx(1, abs=1e-4)


# --------------------------------------------------------------------------- optimiser


def test_a_token_that_the_sampler_found_impossible_leaves_every_metric_finite(
    policy: Any, draw_step: Draw
) -> None:
    samples = draw_step(policy)
    at = samples[0].trained.index(True)
    odd = tuple(-1e4 if t == at else x for t, x in enumerate(samples[0].logprobs))
    result = Trainer(policy, LearnConfig()).step(
        [replace(samples[0], logprobs=odd), *samples[1:]], step=0
    )
    assert not result.skipped
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert result.metrics["ratio/max"] == pytest.approx(math.exp(20))


def test_an_update_shows_in_the_version_counters_and_leaves_no_gradient(
    policy: Any, draw_step: Draw
) -> None:
    """A policy finds out by the counters that its derived weights are stale."""
    before = [p._version for p in policy.parameters().values()]
    Trainer(policy, learn()).step(draw_step(policy), step=0)
    after = [p._version for p in policy.parameters().values()]
    assert all(a > b for a, b in zip(after, before, strict=True))
    assert all(p.grad is None for p in policy.parameters().values())


def test_warm_up_is_linear_then_constant(policy: Any, draw_step: Draw) -> None:
    trainer = Trainer(policy, learn(lr=0.01, warmup_steps=4))
    rates = [trainer.step(draw_step(policy), step=0).metrics["optim/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])


def test_the_gradient_is_clipped_by_its_global_norm(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    norms = []
    for clip in (0.0, 1e-3):
        policy = make_policy()
        trainer = Trainer(policy, learn(grad_clip=clip))
        metric = trainer.step(draw_step(policy), step=0).metrics["grad/norm"]
        flat = torch.cat([g.flatten() for g in gradients(trainer).values()])
        norms.append((metric, float(flat.norm())))
    assert norms[0][1] == pytest.approx(norms[0][0], rel=1e-4)
    assert norms[1][0] == pytest.approx(norms[0][0]) and norms[1][1] == pytest.approx(
        1e-3, rel=1e-2
    )


def test_the_policy_is_refreshed_after_an_update_and_not_after_a_skip(
    policy: Any, draw_step: Draw
) -> None:
    trainer = Trainer(policy, learn())
    trainer.step(draw_step(policy), step=0)
    assert policy.refreshed == 1
    trainer.step([], step=1)
    assert policy.refreshed == 1


def test_resuming_from_the_state_is_bit_exact(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    """B074: 6 steps at once, or 3, save, load into a fresh trainer, and 3 more."""
    config = learn(warmup_steps=5)
    straight = make_policy()
    batches = [draw_step(straight, seed=i) for i in range(6)]
    trainer = Trainer(straight, config)
    for i, batch in enumerate(batches):
        trainer.step(batch, step=i)

    first = make_policy()
    trainer = Trainer(first, config)
    for i in range(3):
        trainer.step(batches[i], step=i)
    state, saved = trainer.state_dict(), weights(first)
    trainer.step(batches[3], step=3)  # what is saved does not move with the trainer

    second = make_policy(seed=1)
    with torch.no_grad():
        for name, parameter in second.parameters().items():
            parameter.copy_(saved[name])
    trainer = Trainer(second, config)
    trainer.load_state_dict(state)
    assert same(trainer.state_dict()["tensors"], state["tensors"])
    assert (
        trainer.state_dict()["counters"]
        == state["counters"]
        == {"updates": 3, "skipped_in_a_row": 0}
    )
    for i in range(3, 6):
        trainer.step(batches[i], step=i)
    assert same(weights(second), weights(straight))


def test_a_state_of_other_parameters_is_refused(policy: Any, draw_step: Draw) -> None:
    trainer = Trainer(policy, learn())
    trainer.step(draw_step(policy), step=0)
    state = trainer.state_dict()
    other = {"tensors": {"lora_A.exp_avg": torch.zeros(2)}, "counters": state["counters"]}
    with pytest.raises(WeightsError, match=r"first lora_A\.exp_avg"):
        trainer.load_state_dict(other)
    state["tensors"]["head.exp_avg"] = torch.zeros(2)
    with pytest.raises(WeightsError, match="state of head"):
        trainer.load_state_dict(state)


def test_half_precision_masters_are_refused(policy: Any) -> None:
    policy.parameters()["head"].data = policy.parameters()["head"].data.bfloat16()
    with pytest.raises(ContractError, match=r"parameter head is torch\.bfloat16"):
        Trainer(policy, learn())


# --------------------------------------------------------------------------- skips


def test_each_empty_step_has_its_own_reason(policy: Any, draw_step: Draw) -> None:
    """B142: no samples, and equal rewards, are two causes with two messages."""
    trainer, before = Trainer(policy, learn()), weights(policy)
    trainer.step(draw_step(policy), step=0)
    after = weights(policy)
    nothing = trainer.step([], step=1)
    flat = [replace(s, advantages=spread(0.0, s.trained)) for s in draw_step(policy)]
    equal = trainer.step(flat, step=2)
    assert nothing.skipped and "no samples" in nothing.reason
    assert equal.skipped and "rewards are equal" in equal.reason
    assert nothing.reason != equal.reason
    assert same(weights(policy), after) and not same(after, before)


def test_a_non_finite_loss_moves_nothing_and_is_counted(policy: Any, draw_step: Draw) -> None:
    trainer = Trainer(policy, learn(max_nan_steps=3))
    samples = draw_step(policy)
    trainer.step(samples, step=0)
    good, state = weights(policy), trainer.state_dict()
    with torch.no_grad():
        policy.parameters()["head"][0, 0] = math.inf
    result = trainer.step(samples, step=1)
    assert result.skipped and "not finite" in result.reason
    assert result.metrics["step/skipped_nonfinite"] == 1
    assert not math.isfinite(result.metrics["loss/total"])
    assert same(trainer.state_dict()["tensors"], state["tensors"])
    with torch.no_grad():
        policy.parameters()["head"].copy_(good["head"])
    assert same(weights(policy), good)
    assert not trainer.step(samples, step=2).skipped
    assert trainer.state_dict()["counters"] == {"updates": 2, "skipped_in_a_row": 0}


def test_a_non_finite_gradient_of_a_finite_loss_is_skipped_too(
    policy: Any, draw_step: Draw
) -> None:
    trainer, before = Trainer(policy, learn()), weights(policy)
    handle = policy.parameters()["query"].register_hook(lambda grad: grad * math.nan)
    result = trainer.step(draw_step(policy), step=0)
    handle.remove()
    assert result.skipped and math.isfinite(result.metrics["loss/total"])
    assert math.isnan(result.metrics["grad/norm"])
    assert same(weights(policy), before)
    assert not trainer.step(draw_step(policy), step=1).skipped, "no gradient was left behind"


def test_several_non_finite_steps_in_a_row_end_the_run(policy: Any, draw_step: Draw) -> None:
    trainer = Trainer(policy, learn(max_nan_steps=2))
    samples = draw_step(policy)
    with torch.no_grad():
        policy.parameters()["head"][0, 0] = math.nan
    assert trainer.step(samples, step=4).skipped
    with pytest.raises(ContractError, match=r"2 steps in a row .* step 5, had loss/total = nan"):
        trainer.step(samples, step=5)


# --------------------------------------------------------------------------- hazards


def test_lag_is_the_version_trained_minus_the_version_sampled(policy: Any, draw_step: Draw) -> None:
    trainer = Trainer(policy, learn())
    old, new = draw_step(policy, version=3), draw_step(policy, version=5, seed=1)
    new = [replace(s, ordinal=s.ordinal + 100) for s in new]
    m = trainer.step(old + new, step=9, version=5).metrics
    tokens = [sum(sum(s.trained) for s in part) for part in (old, new)]
    assert m["lag/max_versions"] == 2
    assert m["lag/mean_versions"] == pytest.approx(2 * tokens[0] / sum(tokens))


def test_a_token_from_the_future_is_refused_before_anything_moves(
    policy: Any, draw_step: Draw
) -> None:
    trainer, before = Trainer(policy, learn()), weights(policy)
    with pytest.raises(ContractError, match="newer than"):
        trainer.step(draw_step(policy, version=1), step=0)
    assert same(weights(policy), before)


@pytest.mark.parametrize(("field", "value"), [("logprobs", math.nan), ("versions", -1)])
def test_a_trained_token_that_was_not_sampled_is_located(
    policy: Any, draw_step: Draw, field: str, value: float
) -> None:
    """Missing logprobs reject the sample with a reason, before anything is computed."""
    samples = draw_step(policy)
    at = len(samples[1].ids) - 1
    broken = replace(samples[1], **{field: (*getattr(samples[1], field)[:-1], value)})
    with pytest.raises(ContractError, match=rf"trajectory 0/1: trained token {at} of {at + 1}"):
        Trainer(policy, learn()).step([samples[0], broken, *samples[2:]], step=0)


def test_a_row_longer_than_the_context_is_refused(policy: Any, draw_step: Draw) -> None:
    """B024: the trainer never sees more than the limit, and nothing is cut in silence."""
    s = draw_step(policy)[0]
    n = policy.shape.max_context + 1 - len(s.ids)
    long = replace(
        s,
        ids=(0,) * n + s.ids,
        trained=(False,) * n + s.trained,
        logprobs=(math.nan,) * n + s.logprobs,
        advantages=(math.nan,) * n + s.advantages,
        versions=(-1,) * n + s.versions,
    )
    with pytest.raises(ContractError, match=r"trajectory 0/0 has a row of 65 tokens.* 64"):
        Trainer(policy, learn()).step([long], step=0)


def test_a_step_that_reaches_no_parameter_is_an_error(
    make_policy: Callable[..., Any], draw_step: Draw
) -> None:
    """Nothing learnt must never look like a finished step."""
    policy, other = make_policy(), make_policy()
    trainer = Trainer(policy, learn())
    policy.parameters = other.parameters  # what the forward uses is not what is owned
    policy._parameters = {k: p.detach().clone().requires_grad_() for k, p in weights(other).items()}
    with pytest.raises(ContractError, match="no gradient reached any of the 6 parameters"):
        trainer.step(draw_step(policy), step=0)


def test_training_leaves_the_global_random_state_alone(policy: Any, draw_step: Draw) -> None:
    samples = draw_step(policy)
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    Trainer(policy, learn(), seed=3).step(samples, step=0)
    assert torch.equal(torch.rand(3), wanted)
