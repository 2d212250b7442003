"""Entropy and KL in the step: the right gradient, no dependence on the split, exact resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from treadle.algorithms import resolve
from treadle.batch import pack
from treadle.config import ENTROPY_METHODS, EntropyConfig, KLConfig, LearnConfig
from treadle.errors import ConfigError, WeightsError
from treadle.train.entropy import repo_r
from treadle.train.forward import forward
from treadle.train.metrics import METRICS
from treadle.train.step import Trainer
from treadle.types import Sample

Draw = Callable[..., list[Sample]]
Make = Callable[..., Any]

ENTROPIES = {
    "repo_r": EntropyConfig(method="repo_r", target=5.0, strength=0.05),
    "repo_d": EntropyConfig(method="repo_d", strength=0.2),
    "adapo": EntropyConfig(method="adapo", target=5.0),
    "mai": EntropyConfig(method="mai", target=5.0),
    "bonus": EntropyConfig(method="bonus", target=5.0, bounds=(0.0, 1.0), rate=0.1),
    "sac": EntropyConfig(method="sac", target=5.0, strength=0.05),
    "clip_cov": EntropyConfig(method="clip_cov", share=0.2, bounds=(0.01, 5.0)),
    "kl_cov": EntropyConfig(method="kl_cov", share=0.2),
}
TERMS = ("k1_in_reward", "k2_in_loss", "k3_in_loss", "k3+_in_loss")
EVERY = {name: {"entropy": config} for name, config in ENTROPIES.items()} | {
    term: {"kl": KLConfig(term=term, beta=0.3, target_nats=0.01, horizon_rows=100)}
    for term in TERMS
}
METHODS = pytest.mark.parametrize("method", EVERY)


def learn(method: str = "", **options: Any) -> LearnConfig:
    loss = "ppo_clip" if method in ("adapo", "mai") else "cispo"
    parts = EVERY[method] if method else {}
    return LearnConfig(**({"lr": 1e-2, "grad_clip": 0.0, "loss": loss} | parts | options))


def weights(policy: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.parameters().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def gradient(trainer: Trainer) -> dict[str, Tensor]:
    """Of a first step: AdamW's first moment is (1 - beta1) times the gradient."""
    tensors = trainer.state_dict()["tensors"]
    scale = 1 - trainer.learn.betas[0]
    return {k[: -len(".exp_avg")]: v / scale for k, v in tensors.items() if k.endswith(".exp_avg")}


def off(policy: Any, by: float = 1.5) -> None:
    """Away from what sampled, and from the reference."""
    with torch.no_grad():
        policy.parameters()["head"].mul_(by)


def with_advantages(samples: list[Sample], of: Callable[[int, int], float]) -> list[Sample]:
    """Samples whose trained token (row, place) has advantage of(row, place)."""
    return [
        replace(
            s,
            advantages=tuple(of(row, t) if s.trained[t] else math.nan for t in range(len(s.ids))),
        )
        for row, s in enumerate(samples)
    ]


# --------------------------------------------------------------------------- reference


def test_every_method_of_the_config_is_tested() -> None:
    assert set(ENTROPIES) == set(ENTROPY_METHODS)


def scored(policy: Any, samples: list[Sample]) -> dict[tuple[int, int], tuple[float, float]]:
    """log pi and entropy of every trained token by (row, place)."""
    (micro,) = pack(samples, micro_tokens=4096)
    with torch.no_grad():
        out = forward(policy, micro)
    places = zip(micro.row.tolist(), micro.position.tolist(), strict=True)
    return dict(zip(places, zip(out.logp.tolist(), out.entropy.tolist(), strict=True), strict=True))


def test_repo_r_trains_with_rescaled_advantages(make_policy: Make, draw_step: Draw) -> None:
    found, wanted = make_policy(), make_policy()
    samples = draw_step(found)
    off(found), off(wanted)
    logp = scored(wanted, samples)

    def rescaled(row: int, t: int) -> float:
        a, lp = torch.tensor([samples[row].advantages[t]]), torch.tensor([logp[row, t][0]])
        return float(repo_r(a, lp, torch.tensor([True]), zeta=0.05)[0])

    one, two = Trainer(found, learn("repo_r")), Trainer(wanted, learn())
    one.step(samples, step=0)
    two.step(with_advantages(samples, rescaled), step=0)
    for name, grad in gradient(two).items():
        assert torch.allclose(gradient(one)[name], grad, atol=1e-6)


@pytest.mark.parametrize("method", ["clip_cov", "kl_cov"])
def test_chosen_tokens_lose_their_gradient_or_are_held(
    make_policy: Make, draw_step: Draw, method: str
) -> None:
    """The choice is recovered from the definitions; the gradient follows from it."""
    found, wanted = make_policy(), make_policy()
    samples = draw_step(found)
    off(found), off(wanted)
    logp = {k: v[0] for k, v in scored(wanted, samples).items()}
    mean_a = sum(samples[r].advantages[t] for r, t in logp) / len(logp)
    mean_lp = sum(logp.values()) / len(logp)
    c = {k: (samples[k[0]].advantages[k[1]] - mean_a) * (lp - mean_lp) for k, lp in logp.items()}
    one = Trainer(found, learn(method))
    metrics = one.step(samples, step=0).metrics
    share = metrics["entropy/chosen_frac"]
    count = max(1, int(0.2 * len(c)))
    assert share == pytest.approx(count / len(c))
    two = Trainer(wanted, learn())
    if method == "kl_cov":
        chosen = sorted(c, key=lambda k: -c[k])[:count]
        two.step(samples, step=0)
        reference = make_policy()
        off(reference)
        (micro,) = pack(samples, micro_tokens=4096)
        out = forward(reference, micro)
        at = list(zip(micro.row.tolist(), micro.position.tolist(), strict=True))
        held = sum((out.logp[at.index(k)] - out.behaviour_logp[at.index(k)]).abs() for k in chosen)
        (held / len(c)).backward()
        extra = {n: p.grad for n, p in reference.parameters().items()}
        for name, grad in gradient(two).items():
            total = grad + (extra[name] if extra[name] is not None else 0.0)
            assert torch.allclose(gradient(one)[name], total, atol=1e-5)
        return
    # Which are taken is random: asked from a twin, then held against the definition.
    twin = make_policy()
    off(twin)
    asked = Trainer(twin, learn(method))
    micros = pack(samples, micro_tokens=4096)
    keys = [""] * len(samples)
    terms = asked.regulariser.begin(
        0, samples, micros, lambda i, out: asked.objective.loss(out, keys).loss
    )
    at = zip(micros[0].row.tolist(), micros[0].position.tolist(), strict=True)
    chosen = {k for k, taken in zip(at, terms.chosen[0].tolist(), strict=True) if taken}
    assert len(chosen) == count and all(0.01 < c[k] < 5.0 for k in chosen)
    assert len([k for k in c if 0.01 < c[k] < 5.0]) > count, "there was a choice"
    without = with_advantages(
        samples, lambda row, t: 0.0 if (row, t) in chosen else samples[row].advantages[t]
    )
    two.step(without, step=0)
    for name, grad in gradient(two).items():
        assert torch.allclose(gradient(one)[name], grad, atol=1e-6)


def test_clip_cov_spends_no_choice_on_a_token_that_the_loss_has_cut_already(
    policy: Any, draw_step: Draw
) -> None:
    samples = draw_step(policy)
    trainer = Trainer(
        policy,
        learn(
            loss="ppo_clip",
            entropy=EntropyConfig(method="clip_cov", share=1.0, bounds=(0.01, 5.0)),
        ),
    )
    off(policy, 2.0)
    (micro,) = pack(samples, micro_tokens=4096)
    with torch.no_grad():
        out = forward(policy, micro)
    ratio = (out.logp - out.behaviour_logp).exp()
    cut = ((out.advantage > 0) & (ratio > 1.2)) | ((out.advantage < 0) & (ratio < 0.8))
    c = (out.advantage - out.advantage.mean()) * (out.logp - out.logp.mean())
    inside = (c > 0.01) & (c < 5.0)
    assert (inside & cut).any() and (inside & ~cut).any()
    keys = [""] * len(samples)
    terms = trainer.regulariser.begin(
        0, samples, [micro], lambda i, x: trainer.objective.loss(x, keys).loss
    )
    assert torch.equal(terms.chosen[0], inside & ~cut)


@pytest.mark.parametrize("method", ["bonus", "sac"])
def test_a_bonus_adds_the_gradient_of_the_mean_entropy(
    make_policy: Make, draw_step: Draw, method: str
) -> None:
    found, wanted, reference = make_policy(), make_policy(), make_policy()
    samples = draw_step(found)
    one, two = Trainer(found, learn(method)), Trainer(wanted, learn())
    if method == "bonus":  # off until something was measured below the target
        state = one.state_dict()
        one.load_state_dict(state | {"entropy": state["entropy"] | {"value": 0.05, "last": 1.0}})
    result = one.step(samples, step=0)
    two.step(samples, step=0)
    assert result.metrics["entropy/control"] == pytest.approx(0.05)
    (micro,) = pack(samples, micro_tokens=4096)
    term = -0.05 * forward(reference, micro, entropy_gradient=True).entropy.mean()
    term.backward()
    assert result.metrics["loss/entropy"] == pytest.approx(term.item(), rel=1e-5)
    for name, parameter in reference.parameters().items():
        wanted_grad = gradient(two)[name] + parameter.grad
        assert torch.allclose(gradient(one)[name], wanted_grad, atol=1e-6), name


@pytest.mark.parametrize("term", TERMS)
def test_a_kl_term_adds_its_gradient(make_policy: Make, draw_step: Draw, term: str) -> None:
    """Against autograd on one packed forward of policy and reference."""
    found, wanted, model, start = (make_policy() for _ in range(4))
    samples = draw_step(found)
    one = Trainer(found, learn(term))
    two = Trainer(wanted, learn())
    off(found), off(wanted), off(model)
    result = one.step(samples, step=0)
    two.step(samples, step=0)
    (micro,) = pack(samples, micro_tokens=4096)
    out = forward(model, micro)
    x = out.logp - forward(start, micro).logp.detach()
    k3 = torch.expm1(-x) + x
    r = (out.logp - out.behaviour_logp).exp()
    n = len(x)
    metrics = result.metrics
    assert metrics["kl/reference_k1_nats"] == pytest.approx(float(x.detach().mean()), abs=1e-5)
    assert metrics["kl/reference_k3_nats"] == pytest.approx(float(k3.detach().mean()), abs=1e-5)
    assert metrics["kl/reference_row_nats"] == pytest.approx(float(k3.detach().sum()) / 12)
    if term == "k1_in_reward":
        to_go = torch.zeros(n)
        for i in range(n):
            later = (out.sequence == out.sequence[i]) & (torch.arange(n) >= i)
            to_go[i] = x.detach()[later].sum()
        changed = out.advantage - 0.3 * to_go
        moved = out.logp.detach().exp() - out.behaviour_logp.exp()

        def policy_loss(a: Tensor) -> Tensor:
            kept = ~(((a > 0) & (moved > 0.2)) | ((a < 0) & (moved < -0.2)))
            return -(kept * r.detach().clamp(max=5.0) * a * out.logp).sum() / n

        added = policy_loss(changed) - policy_loss(out.advantage)
        assert "loss/kl" not in metrics
    else:
        value = {
            "k2_in_loss": r.detach() * x**2 / 2,
            "k3_in_loss": r * k3,
            "k3+_in_loss": r.detach() * x**2 / 2,
        }[term]
        added = 0.3 * value.mean()
        reported = r * k3 if term != "k2_in_loss" else r * x**2 / 2
        assert metrics["loss/kl"] == pytest.approx(0.3 * float(reported.detach().mean()), rel=1e-4)
    added.backward()
    for name, parameter in model.parameters().items():
        total = gradient(two)[name] + (parameter.grad if parameter.grad is not None else 0.0)
        assert torch.allclose(gradient(one)[name], total, atol=1e-5), name


def test_policy_and_reference_are_scored_at_the_same_temperature(
    policy: Any, draw_step: Draw
) -> None:
    """B051: identical policies at T = 0.7 have no KL."""
    m = Trainer(policy, learn("k3+_in_loss")).step(draw_step(policy, temperature=0.7), step=0)
    for name in ("k1", "k3", "row"):
        key = f"kl/reference_{name}_nats"
        assert m.metrics[key] == pytest.approx(0.0, abs=1e-6)


def test_adapo_and_mai_train_with_the_clip_that_they_moved(policy: Any, draw_step: Draw) -> None:
    for method, own, later in (("adapo", 0.2, 0.22), ("mai", 0.2, 0.45)):
        trainer = Trainer(policy, learn(method))
        used = []
        for step in range(2):
            trainer.step(draw_step(policy), step=step)
            used.append(trainer.objective.options[""].get("clip_high", own))
        assert used == pytest.approx([own, later])


@pytest.mark.parametrize("method", ["adapo", "mai"])
def test_a_method_that_moves_the_clip_needs_a_loss_with_one(policy: Any, method: str) -> None:
    with pytest.raises(ConfigError, match="loss `cispo` has none"):
        Trainer(policy, learn(method, loss="cispo"))


# --------------------------------------------------------------------------- invariances


@METHODS
def test_nothing_depends_on_the_split_into_micro_batches_or_the_order_of_rows(
    make_policy: Make, draw_step: Draw, method: str
) -> None:
    outcomes = []
    for micro_tokens, order in ((4096, 1), (24, 1), (16, 1), (24, -1)):
        policy = make_policy()
        trainer = Trainer(policy, learn(method, micro_tokens=micro_tokens), seed=5)
        samples = draw_step(policy)
        off(policy, 1.3)
        before = weights(policy)
        metrics = trainer.step(samples[::order], step=0).metrics
        first = gradient(trainer)
        metrics |= {f"2/{k}": v for k, v in trainer.step(samples[::order], step=1).metrics.items()}
        assert not same(weights(policy), before)
        outcomes.append((metrics, first))
    unsplit = {"micro_batches", "oversized", "packed"}
    for metrics, grads in outcomes[1:]:
        assert metrics.keys() == outcomes[0][0].keys()
        for name, value in metrics.items():
            if name.rsplit("/")[-1] not in unsplit and "time/" not in name:
                assert value == pytest.approx(outcomes[0][0][name], abs=1e-4), name
        for name, grad in grads.items():
            assert torch.allclose(grad, outcomes[0][1][name], atol=1e-5), name


@METHODS
def test_demonstrations_in_the_step_change_no_term(
    make_policy: Make, draw_step: Draw, method: str
) -> None:
    """They were not sampled: no ratio, no reference, no place in the entropy that is held."""
    outcomes = []
    for demonstrated in (False, True):
        policy = make_policy()
        samples = draw_step(policy)
        demo = [
            replace(
                s,
                ordinal=s.ordinal + 100,
                trajectory_id=f"demo {i}",
                taskset="demo",
                logprobs=(math.nan,) * len(s.ids),
                versions=(-1,) * len(s.ids),
            )
            for i, s in enumerate(draw_step(policy, seed=9))
        ]
        config = learn(method)
        algorithms = {"": resolve(config), "demo": resolve(config, "sft")}
        trainer = Trainer(policy, config, seed=5, algorithms=algorithms)
        off(policy, 1.3)
        metrics = trainer.step(samples + (demo if demonstrated else []), step=0).metrics
        terms = ("entropy/", "kl/", "policy/", "ratio/")
        outcomes.append({k: v for k, v in metrics.items() if k.startswith(terms)})
        assert all(math.isfinite(v) for v in metrics.values())
    assert outcomes[0].keys() == outcomes[1].keys()
    for name, value in outcomes[0].items():
        assert outcomes[1][name] == pytest.approx(value, abs=1e-4), name


@METHODS
def test_a_step_of_demonstrations_alone_is_learnt_whatever_is_added_to_the_others(
    policy: Any, draw_step: Draw, method: str
) -> None:
    """In a mix a step may draw no rollout at all: no term has a token to average over."""
    demo = [
        replace(
            s,
            taskset="demo",
            logprobs=(math.nan,) * len(s.ids),
            versions=(-1,) * len(s.ids),
        )
        for s in draw_step(policy, seed=9)
    ]
    config = learn(method)
    algorithms = {"": resolve(config), "demo": resolve(config, "sft")}
    trainer = Trainer(policy, config, seed=5, algorithms=algorithms)
    trainer.step(draw_step(policy), step=0)
    before = trainer.state_dict()
    result = trainer.step(demo, step=1)
    assert not result.skipped and math.isfinite(result.metrics["loss/total"])
    assert [k for k in result.metrics if k.startswith(("entropy/", "kl/"))] == []
    for name in ("entropy", "kl"):
        assert trainer.state_dict().get(name) == before.get(name), "no controller has moved"


@METHODS
def test_every_metric_of_a_method_is_documented(policy: Any, draw_step: Draw, method: str) -> None:
    metrics = Trainer(policy, learn(method)).step(draw_step(policy), step=0).metrics
    assert set(metrics) <= set(METRICS)
    prefix = "entropy/" if method in ENTROPIES else "kl/"
    assert any(name.startswith(prefix) for name in metrics)
    assert all(math.isfinite(v) for v in metrics.values())


# --------------------------------------------------------------------------- state


@METHODS
def test_resuming_with_a_controller_is_bit_exact(
    make_policy: Make, draw_step: Draw, method: str
) -> None:
    """5 steps at once, or 2, save, load into a fresh trainer, and the other 3 applied again."""
    config = learn(method)
    straight = make_policy()
    batches = [draw_step(straight, seed=i) for i in range(5)]
    trainer = Trainer(straight, config)
    for i, batch in enumerate(batches):
        trainer.step(batch, step=i)
    end = trainer.state_dict()

    first = make_policy()
    trainer = Trainer(first, config)
    for i in range(2):
        trainer.step(batches[i], step=i)
    state, saved = trainer.state_dict(), weights(first)
    plain = {k: v for k, v in state.items() if k != "tensors"}
    trainer.step(batches[2], step=2)  # what is saved does not move with the trainer
    state = {"tensors": state["tensors"], **json.loads(json.dumps(plain))}

    second = make_policy()
    trainer = Trainer(second, config)  # its reference is the start of the run
    with torch.no_grad():
        for name, parameter in second.parameters().items():
            parameter.copy_(saved[name])
    trainer.load_state_dict(state)
    for i in range(2, 5):
        trainer.step(batches[i], step=i)
    assert same(weights(second), weights(straight))
    again = trainer.state_dict()
    assert {k: v for k, v in again.items() if k != "tensors"} == {
        k: v for k, v in end.items() if k != "tensors"
    }


@pytest.mark.parametrize(("saved", "loaded"), [("repo_r", ""), ("", "repo_r"), ("", "k2_in_loss")])
def test_a_state_of_other_controllers_is_refused(policy: Any, saved: str, loaded: str) -> None:
    state = Trainer(policy, learn(saved)).state_dict()
    with pytest.raises(WeightsError, match=r"controller of learn\.(entropy|kl)"):
        Trainer(policy, learn(loaded)).load_state_dict(state)


def test_a_state_of_another_term_is_refused(policy: Any) -> None:
    state = Trainer(policy, learn("k3_in_loss")).state_dict()
    with pytest.raises(WeightsError, match="KL term `k3_in_loss`, the run has `k2_in_loss`"):
        Trainer(policy, learn("k2_in_loss")).load_state_dict(state)


# --------------------------------------------------------------------------- hazards


def test_only_what_can_move_a_step_without_advantages_runs_it(
    make_policy: Make, draw_step: Draw
) -> None:
    """Zero variance everywhere: repo_r and the clips have no authority; the others do."""
    ran = set()
    for method in EVERY:
        policy = make_policy()
        trainer = Trainer(policy, learn(method))
        samples = with_advantages(draw_step(policy), lambda row, t: 0.0)
        off(policy, 1.3)
        before = weights(policy)
        result = trainer.step(samples, step=0)
        assert same(weights(policy), before) == result.skipped
        ran |= set() if result.skipped else {method}
    assert ran == {"repo_d", "sac", *TERMS}


def test_a_step_that_is_not_applied_moves_no_controller(policy: Any, draw_step: Draw) -> None:
    both = {"entropy": ENTROPIES["repo_r"], "kl": EVERY["k3+_in_loss"]["kl"]}
    trainer = Trainer(policy, learn(**both))
    trainer.step(draw_step(policy), step=0)
    samples, state = draw_step(policy, seed=1), trainer.state_dict()
    # The entropy and the KL of this step are finite; its gradient is not.
    handle = policy.parameters()["query"].register_hook(lambda grad: grad * math.nan)
    result = trainer.step(samples, step=1)
    handle.remove()
    assert result.skipped and math.isfinite(result.metrics["policy/entropy_nats"])
    with torch.no_grad():
        policy.parameters()["head"][0, 0] = math.inf
    assert trainer.step(samples, step=2).skipped
    after = trainer.state_dict()
    assert after["entropy"] == state["entropy"] and after["kl"] == state["kl"]


def test_a_controller_at_its_limit_raises_an_alarm_of_the_step(
    policy: Any, draw_step: Draw
) -> None:
    config = EntropyConfig(target=5.0, strength=0.05, alarm_steps=2)
    trainer = Trainer(policy, learn(entropy=config))
    results = [trainer.step(draw_step(policy), step=i) for i in range(3)]
    assert [len(r.alarms) for r in results] == [0, 1, 0]
    assert "at its limit of 0.05 for 2 steps" in results[1].alarms[0]
    assert results[2].metrics["entropy/at_limit_steps"] == 3


def test_adaptive_beta_moves_towards_its_target(policy: Any, draw_step: Draw) -> None:
    """Ziegler: e = clip(KL / target - 1, -.2, .2), beta (1 + e n / horizon), n = 12 rows."""
    config = KLConfig(beta=0.1, target_nats=0.2, horizon_rows=100)
    trainer = Trainer(policy, learn(kl=config))
    used = []
    for step in range(3):
        used.append(trainer.step(draw_step(policy), step=step).metrics["kl/beta"])
        if step == 1:
            off(policy, 8.0)  # far away: the KL of a row is above its target
    down = 1 - 0.2 * 12 / 100
    assert used[:2] == pytest.approx([0.1, 0.1 * down])
    assert trainer.regulariser.kl is not None
    assert trainer.regulariser.kl.beta > used[2]


def test_the_step_is_learnt_on_with_every_part_together(policy: Any, draw_step: Draw) -> None:
    both = {"entropy": ENTROPIES["sac"], "kl": EVERY["k1_in_reward"]["kl"]}
    trainer = Trainer(policy, learn(**both))
    for step in range(3):
        result = trainer.step(draw_step(policy), step=step)
        assert not result.skipped and set(result.metrics) <= set(METRICS)
