"""A step cut over ranks: every rank knows the whole step and computes its share of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.train.conftest import ToyPolicy
from treadle.algorithms import resolve
from treadle.batch import AGGREGATIONS, pack, spread, token_weights
from treadle.config import CorrectionConfig, CriticConfig, EntropyConfig, KLConfig, LearnConfig
from treadle.losses import POLICY_LOSSES
from treadle.train import Trainer
from treadle.train.forward import forward
from treadle.types import Sample


def rows() -> list[Sample]:
    """Rows of 1 to 5 tokens of two prompts; behaviour a little off, advantages of both signs."""
    generator = torch.Generator().manual_seed(3)
    out = []
    for i in range(7):
        n = 1 + (2 * i) % 5
        ids = torch.randint(0, 12, (2 + n,), generator=generator).tolist()
        mu = (-2.0 + torch.randn(n, generator=generator) * 0.3).tolist()
        advantage = 1.0 if i % 3 else -0.7
        out.append(
            Sample(
                trajectory_id=f"{i % 2}/{i // 2 if i < 4 else i}",
                ordinal=i % 2,
                ids=tuple(ids),
                trained=(False,) * 2 + (True,) * n,
                logprobs=(math.nan,) * 2 + tuple(mu),
                versions=(-1,) * 2 + (0,) * n,
                advantages=(math.nan,) * 2 + (advantage,) * n,
                temperature=1.0,
            )
        )
    return out


def gradients(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    """This rank's share of the gradient, for every aggregation and some losses."""
    samples, found = rows(), {}
    for loss in ("cispo", "ppo_clip", "gspo"):
        for mode in AGGREGATIONS:
            policy = ToyPolicy()
            weights = token_weights(samples, mode, norm_tokens=8)
            mine = list(range(rank, len(samples), world))
            for micro in pack(
                [samples[i] for i in mine],
                micro_tokens=20,
                weights=[weights[i] for i in mine],
            ):
                options = {"clip_low": 0.9, "clip_high": 9.0} if loss == "gspo" else {}
                POLICY_LOSSES[loss](forward(policy, micro), **options).loss.backward()
            found[f"{loss}/{mode}"] = {
                name: p.grad if p.grad is not None else torch.zeros_like(p)
                for name, p in policy.parameters().items()
            }
    return found


STEPS = 2

LEARNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repo_r": {"entropy": EntropyConfig(method="repo_r", target=2.2, strength=0.02)},
    "repo_d": {"entropy": EntropyConfig(method="repo_d", strength=0.2)},
    "adapo": {"entropy": EntropyConfig(method="adapo", target=5.0), "loss": "ppo_clip"},
    "mai": {"entropy": EntropyConfig(method="mai", target=5.0), "loss": "ppo_clip"},
    "bonus": {"entropy": EntropyConfig(method="bonus", target=5.0, bounds=(0.0, 1.0), rate=0.1)},
    "sac": {"entropy": EntropyConfig(method="sac", target=5.0, strength=0.05)},
    "clip_cov": {"entropy": EntropyConfig(method="clip_cov", share=0.2, bounds=(0.01, 5.0))},
    "kl_cov": {"entropy": EntropyConfig(method="kl_cov", share=0.2)},
    "kl in the loss": {"kl": KLConfig(beta=0.3, target_nats=0.01, horizon_rows=100)},
    "kl in the reward": {
        "kl": KLConfig(term="k1_in_reward", beta=0.3, target_nats=0.01, horizon_rows=100)
    },
    "correction": {"correction": CorrectionConfig(weight="token", veto_low=0.5, veto_high=3.0)},
    "critic": {"algorithm": "ppo", "critic": CriticConfig()},
    "critic on the trunk": {"algorithm": "ppo", "critic": CriticConfig(trunk_gradient=True)},
    "critic of its own": {"algorithm": "ppo", "critic": CriticConfig(kind="model")},
    "demonstrations too": {"kl": KLConfig(beta=0.3, target_nats=0.01, horizon_rows=100)},
}
"""What a step can decide over all of its rows, by name."""

CASES = [(name, 16) for name in LEARNS] + [
    (name, 2048) for name in ("plain", "clip_cov", "kl in the loss", "critic")
]
"""With tokens of a micro-batch: 2048 are one, which leaves a second rank without work."""


def trained(name: str, micro_tokens: int) -> dict[str, Any]:
    """Train STEPS steps on this process's share; what must be the same however many share it."""
    every = 2 if name == "plain" else 0
    learn = LearnConfig(lr=1e-2, micro_tokens=micro_tokens, collapse_every=every, **LEARNS[name])
    samples = rows()
    algorithms = {"": resolve(learn)}
    if name.startswith("critic"):
        samples = [
            replace(s, advantages=spread((s.ids[-1] % 3) / 2 + s.ordinal / 8, s.trained))
            for s in samples
        ]
    if name == "demonstrations too":
        algorithms["shown"] = resolve(learn, "sft")
        unsampled = {"logprobs": (math.nan,) * 7, "versions": (-1,) * 7, "taskset": "shown"}
        samples += [
            replace(s, ordinal=9, **{k: v if k == "taskset" else v[: len(s.ids)]
                                     for k, v in unsampled.items()})
            for s in samples[:2]
        ]  # fmt: skip
    policy = ToyPolicy()
    own = ToyPolicy(seed=7) if name == "critic of its own" else None
    trainer = Trainer(policy, learn, algorithms=algorithms, value_trunk=own)
    metrics = []
    for step in range(STEPS):
        result = trainer.step(samples, step=step)
        assert not result.skipped, result.reason
        metrics.append({k: v for k, v in result.metrics.items() if not k.startswith("time/")})
    weights = {k: p.detach().clone() for k, p in policy.parameters().items()}
    return {"weights": weights, "metrics": metrics, "state": trainer.state_dict()}


def choices(name: str) -> list[Tensor]:
    """The tokens of every micro-batch that an entropy method chooses in a first step."""
    learn, samples = LearnConfig(micro_tokens=16, **LEARNS[name]), rows()
    trainer = Trainer(ToyPolicy(), learn)
    micros = pack(samples, micro_tokens=16, weights=trainer.objective.weights(samples))
    keys = [[trainer.objective.key("")] * (int(m.sequence.max()) + 1) for m in micros]
    terms = trainer.regulariser.begin(
        0, samples, micros, lambda i, out: trainer.objective.loss(out, keys[i]).loss
    )
    return list(terms.chosen)
