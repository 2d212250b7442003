"""PPO's critic: returns by hand, invariances, what moves when, exact resume, and it learns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from treadle.advantage import whiten
from treadle.algorithms import resolve
from treadle.batch import spread
from treadle.config import CriticConfig, KLConfig, LearnConfig
from treadle.errors import ConfigError, ContractError, WeightsError
from treadle.train import Trainer
from treadle.train.critic import Critic
from treadle.types import Layout, ModelShape, Sample

Make = Callable[..., Any]
Draw = Callable[..., list[Sample]]

KINDS = pytest.mark.parametrize(
    "kind", [{}, {"trunk_gradient": True}, {"kind": "model"}], ids=["head", "shared", "model"]
)


def learn(critic: Mapping[str, Any] | None = None, **options: Any) -> LearnConfig:
    config = CriticConfig(**(critic or {}))
    return LearnConfig(
        **({"lr": 1e-2, "grad_clip": 0.0, "algorithm": "ppo", "critic": config} | options)
    )


def trainer_of(policy: Any, make: Make, config: LearnConfig, **options: Any) -> Trainer:
    own = config.critic is not None and config.critic.kind == "model"
    return Trainer(policy, config, value_trunk=make(seed=7) if own else None, **options)


def outcomes(samples: list[Sample]) -> list[Sample]:
    """Rows whose advantages are outcomes, as `gae` gives them: 0, 1/3 or 1 by their last token."""
    return [
        replace(s, advantages=spread((s.ids[-1] % 3) ** 2 / 4 + s.ordinal / 8, s.trained))
        for s in samples
    ]


def weights(owner: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in owner.parameters().items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def flat(tree: Any, at: str = "") -> dict[str, Any]:
    """Leaves of a state by dotted name."""
    if not isinstance(tree, Mapping):
        return {at: tree}
    return {k: v for name, x in tree.items() for k, v in flat(x, f"{at}/{name}").items()}


# --------------------------------------------------------------------------- by hand


class Table:
    """A trunk whose hidden state is the token itself: V is a table by the token before."""

    def __init__(self, size: int) -> None:
        self.device = "cpu"
        self.shape = ModelShape(
            family="table", layers=0, hidden=size, heads=1, kv_heads=1, head_dim=1,
            intermediate=0, vocab=size, tied=False, parameters=0, max_context=64,
        )  # fmt: skip

    def parameters(self) -> dict[str, nn.Parameter]:
        return {}

    def refresh(self) -> None: ...

    def hidden(self, ids: Tensor, layout: Layout) -> Tensor:
        return 3.0 * nn.functional.one_hot(ids, self.shape.hidden)


def table_critic(values: list[float], **critic: Any) -> Critic:
    config = learn(critic)
    assert config.critic is not None
    found = Critic(config.critic, config, Table(len(values)), None)
    with torch.no_grad():
        found.model.parameters()["value_head.weight"].copy_(torch.tensor([values]))
    return found


def row(ids: list[int], trained: list[bool], outcome: float, name: str = "0/0") -> Sample:
    return Sample(
        trajectory_id=name,
        ordinal=0,
        ids=tuple(ids),
        trained=tuple(trained),
        logprobs=tuple(-1.0 if t else math.nan for t in trained),
        versions=tuple(0 if t else -1 for t in trained),
        advantages=spread(outcome, trained),
        temperature=1.0,
    )


def returned(critic: Critic, *rows: Sample) -> list[float]:
    valued = critic.value(rows, [True] * len(rows), [1.0] * len(rows))
    return torch.cat(valued.returns).tolist()


@pytest.mark.parametrize(
    ("gamma", "lam", "returns"),
    [
        (1.0, 1.0, [3.0, 3.0, 3.0]),
        (0.5, 1.0, [0.75, 1.5, 3.0]),
        (1.0, 0.5, [1.625, 2.25, 3.0]),
    ],
)
def test_a_row_of_three_tokens_by_hand(gamma: float, lam: float, returns: list[float]) -> None:
    """V before the tokens .5, 1, 1.5, and 3 is paid at the last of them. With lambda .5:
    deltas .5, .5, 1.5, so A = 1.125, 1.25, 1.5. Whitened: mean 1.2917, deviation .19094."""
    critic = table_critic([0.5, 1.0, 1.5, 9.0], gamma=gamma, lam=lam)
    sample = row([0, 1, 2, 3], [False, True, True, True], 3.0)
    valued = critic.value([sample], [True], [1.0])
    assert valued.old[0].tolist() == [0.5, 1.0, 1.5]
    assert valued.returns[0].tolist() == returns
    (made,) = valued.samples
    assert math.isnan(made.advantages[0])
    if lam == 0.5:
        assert made.advantages[1:] == pytest.approx((-0.872871, -0.218218, 1.091089), abs=1e-5)
    assert sum(made.advantages[1:]) == pytest.approx(0, abs=1e-6)
    assert sample.advantages[1:] == (3.0, 3.0, 3.0), "what the ledger holds was written to"


@pytest.mark.parametrize(
    ("gamma", "lam", "first"), [(1.0, 1.0, 0.8), (1.0, 0.5, 0.6), (0.9, 0.5, 0.52)]
)
def test_observations_are_stepped_over(gamma: float, lam: float, first: float) -> None:
    """V before the two sampled tokens .2 and .6; the 9s between them must not leak."""
    critic = table_critic([0.2, 9.0, 9.0, 0.6, 0.0], gamma=gamma, lam=lam)
    sample = row([0, 1, 2, 3, 4], [False, True, False, False, True], 1.0)
    assert returned(critic, sample) == pytest.approx([0.2 + first, 1.0])


def test_every_branch_ends_with_the_whole_outcome() -> None:
    """Two branches over one turn: the first row trains the turn and its own end."""
    critic = table_critic([0.0] * 5, gamma=0.5)
    first = row([0, 1, 2, 3], [False, True, True, True], 1.0)
    second = row([0, 1, 2, 4], [False, False, False, True], 1.0)
    assert returned(critic, first, second) == [0.25, 0.5, 1.0, 1.0]


def test_a_row_with_two_outcomes_is_an_error() -> None:
    sample = row([0, 1, 2], [False, True, True], 1.0)
    sample = replace(sample, advantages=(math.nan, 1.0, 0.5))
    with pytest.raises(ContractError, match=r"trajectory 0/0: .* 2 different outcomes"):
        table_critic([0.0] * 3).value([sample], [True], [1.0])


def test_explained_variance_by_hand() -> None:
    """Returns 1 and 0 with values .5 and 0: 1 - var(.5, 0) / var(1, 0) = .75."""
    critic = table_critic([0.5, 0.0, 0.0], steps=1)
    rows = [row([0, 2], [False, True], 1.0), row([1, 2], [False, True], 0.0, "0/1")]
    valued = critic.value(rows, [True, True], [0.5, 0.5])
    metrics = critic.update(valued, step=0)
    assert metrics["value/explained_variance"] == pytest.approx(0.75)
    assert metrics["value/loss"] == pytest.approx(0.5 * 0.5 * 0.25)
    assert "value/clipped_frac" not in metrics
    assert metrics["value/grad_norm"] == pytest.approx(0.5 * 0.25 * math.sqrt(2))


def test_the_clip_is_measured_once_the_critic_has_moved() -> None:
    """A rate of 1 moves V from 0 to beyond .2 on its way to 5 in the first of two updates."""
    config = learn({"steps": 2}, lr=0.1)
    assert config.critic is not None
    critic = Critic(config.critic, config, Table(2), None)
    valued = critic.value([row([0, 1], [False, True], 5.0)], [True], [1.0])
    metrics = critic.update(valued, step=0)
    assert metrics["value/clipped_frac"] == 1.0 and metrics["value/grad_norm"] == 0.0
    assert "value/explained_variance" not in metrics, "one return explains nothing"


# --------------------------------------------------------------------------- the step


def test_with_values_of_0_a_step_is_reinforce_with_a_whitened_reward(
    make_policy: Make, draw_step: Draw
) -> None:
    """A new critic says 0, and lambda 1: the policy's update is, bit for bit, the one with whitened
    outcomes. So no gradient of the value loss reached the policy."""
    policy, other = make_policy(), make_policy()
    samples = outcomes(draw_step(policy))
    result = trainer_of(policy, make_policy, learn()).step(samples, step=0)
    tokens = [(s.advantages[-1], sum(s.trained)) for s in samples]
    white = whiten([a for a, _ in tokens], [n for _, n in tokens])
    given = [
        replace(s, advantages=spread(float(a), s.trained))
        for s, a in zip(samples, white, strict=True)
    ]
    plain = LearnConfig(algorithm="reinforce_pp", lr=1e-2, grad_clip=0.0)
    Trainer(other, plain).step(given, step=0)
    assert not result.skipped
    assert same(weights(policy), weights(other))


@KINDS
def test_neither_split_nor_order_changes_anything(
    make_policy: Make, draw_step: Draw, kind: dict[str, Any]
) -> None:
    found = []
    for micro_tokens, order in ((4096, 1), (24, 1), (16, 1), (4096, -1)):
        policy = make_policy()
        samples = outcomes(draw_step(policy))[::order]
        trainer = trainer_of(policy, make_policy, learn(kind, micro_tokens=micro_tokens, lr=1e-3))
        for _ in range(2):  # the second step has values that are not 0
            metrics = trainer.step(samples, step=0).metrics
        found.append((metrics, flat(trainer.state_dict())))
    unsplit = {"batch/micro_batches", "batch/oversized", "tokens/packed"}
    wanted, state = found[0]
    assert wanted["batch/micro_batches"] == 1 < found[2][0]["batch/micro_batches"]
    for metrics, other in found[1:]:
        for name, value in metrics.items():
            if name not in unsplit and not name.startswith("time/"):
                assert value == pytest.approx(wanted[name], rel=1e-3, abs=1e-5), name
        moments = [name for name in state if name.endswith("exp_avg")]
        assert any("value_head" in name for name in moments)
        for name in moments:
            assert torch.allclose(other[name], state[name], rtol=1e-3, atol=1e-5), name


@KINDS
def test_in_its_warm_up_the_critic_learns_alone(
    make_policy: Make, draw_step: Draw, kind: dict[str, Any]
) -> None:
    policy = make_policy()
    trainer = trainer_of(policy, make_policy, learn(kind | {"warmup_steps": 2, "lr_scale": 1.0}))
    assert trainer.critic is not None
    before, critic = weights(policy), weights(trainer.critic.model)
    samples = outcomes(draw_step(policy))
    losses = []
    for step in range(3):
        result = trainer.step(samples, step=step, version=0, guard=step == 0)
        losses.append(result.metrics["value/loss"])
        waits = step < 2
        assert not result.skipped and (result.parity is not None) == (step == 0)
        assert result.metrics["value/actor_frozen"] == float(waits)
        assert ("grad/norm" in result.metrics) == (not waits)
        assert same(weights(policy), before) == waits
        assert all(p.grad is None for p in policy.parameters().values())
        assert not same(weights(trainer.critic.model), critic)
        critic = weights(trainer.critic.model)
    assert losses[2] < losses[1] < losses[0]
    assert trainer.optimiser.updates == 1 and policy.refreshed == 1


def test_equal_rewards_teach_the_critic_and_leave_the_policy(
    make_policy: Make, draw_step: Draw
) -> None:
    """A first step in which nothing is better than anything else: no reason to skip, though."""
    policy = make_policy()
    trainer = trainer_of(policy, make_policy, learn())
    before = weights(policy)
    samples = [replace(s, advantages=spread(1.0, s.trained)) for s in draw_step(policy)]
    result = trainer.step(samples, step=0)
    assert not result.skipped and result.metrics["value/actor_frozen"] == 1
    assert same(weights(policy), before)
    assert result.metrics["value/loss"] == pytest.approx(0.5)
    assert trainer.step(samples, step=1, version=0).metrics["value/loss"] < 0.5
    assert trainer.step([], step=2).skipped


def test_a_shared_trunk_adds_the_value_gradient_to_the_policys(
    make_policy: Make, draw_step: Draw
) -> None:
    """Against autograd: the gradient of policy loss plus coef times value loss, in the step after
    the head has left 0."""
    moments = []
    for shared in (False, True):
        policy = make_policy()
        samples = outcomes(draw_step(policy))
        # At such a rate the head stands still, so that three updates see one gradient.
        still = {"steps": 3, "coef": 2.0, "value_clip": 0.0, "lr_scale": 1e-12}
        config = learn(still | {"trunk_gradient": shared})
        trainer = trainer_of(policy, make_policy, config)
        assert trainer.critic is not None
        head = trainer.critic.model.parameters()["value_head.weight"]
        with torch.no_grad():
            head.copy_(torch.linspace(-0.1, 0.1, head.numel())[None])
        trainer.step(samples, step=0)
        moments.append(trainer.state_dict()["tensors"])
        if shared:
            reference = make_policy()
            valued = trainer_of(reference, make_policy, config).critic
            assert valued is not None
            valued.model.load_state_dict(trainer.critic.model.state_dict())
            weighed = trainer.objective.weights(samples)
            seen = valued.value(samples, [True] * len(samples), weighed)
            total = torch.zeros(())
            for micro, target in zip(seen.micros, seen.returns, strict=True):
                v = valued.model.values(valued._features(micro))
                total = total + (torch.tensor(micro.weight) * 0.5 * (v - target) ** 2).sum()
            (2.0 * total).backward()
    scale = 1 - LearnConfig().betas[0]
    for name, parameter in reference.parameters().items():
        added = (moments[1][f"{name}.exp_avg"] - moments[0][f"{name}.exp_avg"]) / scale
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.allclose(added, wanted, atol=1e-6), name
        assert name == "head" or wanted.abs().max() > 1e-4


def test_rows_of_another_algorithm_keep_their_advantages(
    make_policy: Make, draw_step: Draw
) -> None:
    policy = make_policy()
    config = learn()
    algorithms = {"": resolve(config), "plain": resolve(LearnConfig(algorithm="grpo"))}
    trainer = trainer_of(policy, make_policy, config, algorithms=algorithms)
    samples = outcomes(draw_step(policy))
    plain = [replace(s, taskset="plain", ordinal=s.ordinal + 9) for s in draw_step(policy, seed=1)]
    assert trainer.critic is not None
    judged = [False] * len(plain) + [True] * len(samples)
    valued = trainer.critic.value(plain + samples, judged, [1.0] * len(judged))
    assert valued.samples[: len(plain)] == plain
    made = [a for s in valued.samples[len(plain) :] for a in s.advantages if not math.isnan(a)]
    assert sum(made) == pytest.approx(0, abs=1e-5)
    before = weights(trainer.critic.model)
    result = trainer.step(plain, step=0)
    assert not result.skipped and not any(name.startswith("value/") for name in result.metrics)
    assert same(weights(trainer.critic.model), before)
    nothing = [replace(s, advantages=spread(0.0, s.trained)) for s in plain]
    assert "all advantages are 0" in trainer.step(nothing, step=1).reason
    assert trainer.step(plain + samples, step=1, version=0).metrics["value/actor_frozen"] == 0


def test_a_kl_term_moves_the_policy_where_advantages_do_not(
    make_policy: Make, draw_step: Draw
) -> None:
    policy = make_policy()
    trainer = trainer_of(policy, make_policy, learn(kl=KLConfig(beta=0.1)))
    samples = [replace(s, advantages=spread(1.0, s.trained)) for s in draw_step(policy)]
    assert trainer.step(samples, step=0).metrics["value/actor_frozen"] == 0


def test_values_that_are_not_finite_end_the_run(make_policy: Make, draw_step: Draw) -> None:
    policy = make_policy()
    trainer = trainer_of(policy, make_policy, learn())
    samples = outcomes(draw_step(policy))
    with torch.no_grad():
        policy.parameters()["value"].fill_(math.nan)
    with pytest.raises(ContractError, match=r"values of \d+ of \d+ trained tokens are not finite"):
        trainer.step(samples, step=0)


# --------------------------------------------------------------------------- state


@KINDS
def test_resuming_is_bit_exact(make_policy: Make, draw_step: Draw, kind: dict[str, Any]) -> None:
    """6 steps at once, or 3, save, load into a fresh trainer, and 3 more; the warm-up ends
    between."""
    config = learn(kind | {"warmup_steps": 4, "lam": 0.9}, warmup_steps=5)
    straight = make_policy()
    batches = [outcomes(draw_step(straight, seed=i)) for i in range(6)]
    trainer = trainer_of(straight, make_policy, config)
    for i, batch in enumerate(batches):
        trainer.step(batch, step=i)
    assert trainer.critic is not None
    wanted, judge = weights(straight), weights(trainer.critic.model)

    first = make_policy()
    trainer = trainer_of(first, make_policy, config)
    for i in range(3):
        trainer.step(batches[i], step=i)
    state, saved = trainer.state_dict(), weights(first)
    trainer.step(batches[3], step=3)  # what is saved does not move with the trainer

    second = make_policy(seed=1)
    with torch.no_grad():
        for name, parameter in second.parameters().items():
            parameter.copy_(saved[name])
    trainer = trainer_of(second, make_policy, config)
    trainer.load_state_dict(state)
    for i in range(3, 6):
        trainer.step(batches[i], step=i)
    assert trainer.critic is not None
    assert same(weights(second), wanted) and same(weights(trainer.critic.model), judge)


def test_a_state_of_another_critic_is_refused(make_policy: Make) -> None:
    head, model = (
        trainer_of(make_policy(), make_policy, learn(kind)) for kind in ({}, {"kind": "model"})
    )
    none = Trainer(make_policy(), LearnConfig())
    with pytest.raises(WeightsError, match="has a critic, the run has none"):
        none.load_state_dict(head.state_dict())
    with pytest.raises(WeightsError, match="has no critic, the run has one"):
        head.load_state_dict(none.state_dict())
    with pytest.raises(WeightsError, match=r"has 2 tensors, the run's 8; trunk\.embedding is miss"):
        model.load_state_dict(head.state_dict())


def test_a_critic_and_gae_need_one_another(make_policy: Make) -> None:
    with pytest.raises(ConfigError, match="needs values"):
        Trainer(make_policy(), LearnConfig(algorithm="ppo"))
    with pytest.raises(ConfigError, match="no algorithm of this run asks a critic"):
        Trainer(make_policy(), LearnConfig(critic=CriticConfig()))
    with pytest.raises(ContractError, match="kind `model` was given no model"):
        Trainer(make_policy(), learn({"kind": "model"}))


# --------------------------------------------------------------------------- it learns


def rewards_of_a_run(
    policy: Any, make: Make, critic: Mapping[str, Any], *, sign: float = 1.0
) -> tuple[list[float], list[float]]:
    """40 steps of 32 tasks with one rollout each: rewards and explained variances by step. A
    prompt of p is paid the share of its two tokens that are p + 4, and a bonus of p that no answer
    changes: what a group would subtract, and what only a critic knows here."""
    trainer = trainer_of(policy, make, learn(critic, lr=2e-2, grad_clip=1.0))
    generator = torch.Generator().manual_seed(0)
    means, explained = [], []
    for step in range(40):
        batch, total = [], 0.0
        for i in range(32):
            prompt = i % 4
            drawn = policy.draw([prompt], 2, generator, ordinal=i, version=step, name=f"{i}/0")
            score = sum(t == prompt + 4 for t in drawn.ids[1:]) / 2
            total += score
            outcome = sign * (score + prompt)
            batch.append(replace(drawn, advantages=spread(outcome, drawn.trained)))
        result = trainer.step(batch, step=step, guard=step == 0)
        means.append(total / 32)
        explained.append(result.metrics.get("value/explained_variance", 0.0))
    return means, explained


@pytest.mark.parametrize(
    ("kind", "final", "knows"),
    [({}, 0.5, 0.7), ({"trunk_gradient": True}, 0.8, 0.9), ({"kind": "model"}, 0.8, 0.9)],
    ids=["head", "shared", "model"],
)
def test_one_rollout_per_task_raises_the_reward(
    make_policy: Make, kind: dict[str, Any], final: float, knows: float
) -> None:
    """A head on states that were never trained to tell values learns more slowly."""
    means, explained = rewards_of_a_run(make_policy(), make_policy, kind | {"warmup_steps": 5})
    assert sum(means[:5]) / 5 < 0.2
    assert sum(means[-3:]) / 3 > final
    assert explained[0] == pytest.approx(0) and min(explained[-5:]) > knows


def test_the_wrong_sign_lowers_it(make_policy: Make) -> None:
    means, _ = rewards_of_a_run(
        make_policy(), make_policy, {"kind": "model", "warmup_steps": 5}, sign=-1.0
    )
    assert sum(means[-3:]) / 3 < 0.5 * sum(means[:5]) / 5
