"""The trainer with the real policy on a tiny Llama: the two rooms fit together."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.batch import pack, spread
from treadle.config import EntropyConfig, KLConfig, LearnConfig, LoraConfig
from treadle.models import tiny
from treadle.models.load import load
from treadle.models.policy import Policy
from treadle.train import Trainer
from treadle.train.forward import forward
from treadle.types import Layout, Sample, Segment


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.build_random(path, hidden=32, intermediate=48)
    return path


def make(directory: Path, dtype: torch.dtype = torch.float32, *, lora: bool = True) -> Policy:
    loaded = load(str(directory), max_context=128)
    return Policy(loaded, lora=LoraConfig(rank=4) if lora else None, dtype=dtype, seed=1)


@torch.no_grad()
def sampled(policy: Policy, *, temperature: float = 1.0) -> list[Sample]:
    """3 groups of 4 rows drawn token by token, one row at a time."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for ordinal in range(3):
        prompt = list(range(10 + ordinal, 18 + 2 * ordinal))
        for i in range(4):
            ids, logprobs = list(prompt), [math.nan] * len(prompt)
            for _ in range(2 + (ordinal + i) % 4):
                layout = Layout((Segment(0, len(ids), None, 0),))
                last = policy.hidden(torch.tensor(ids), layout)[-1:]
                every = torch.arange(policy.shape.vocab)
                hidden = last.expand(len(every), -1)
                logp, _ = policy.logprobs(hidden, every, temperature)
                token = int(torch.multinomial(logp.exp(), 1, generator=generator))
                ids.append(token)
                logprobs.append(float(logp[token]))
            made = len(ids) - len(prompt)
            rows.append(
                Sample(
                    trajectory_id=f"{ordinal}/{i}",
                    ordinal=ordinal,
                    ids=tuple(ids),
                    trained=(False,) * len(prompt) + (True,) * made,
                    logprobs=tuple(logprobs),
                    versions=(-1,) * len(prompt) + (0,) * made,
                    advantages=spread(
                        (1.0, -1.0, 0.5, -0.5)[i], [*(False for _ in prompt), *(True,) * made]
                    ),
                    temperature=temperature,
                )
            )
    return rows


@pytest.mark.parametrize("lora", [True, False])
def test_gradients_do_not_depend_on_the_split_and_reach_every_parameter(
    directory: Path, lora: bool
) -> None:
    found: list[dict[str, Any]] = []
    for micro_tokens in (4096, 20):
        policy = make(directory, lora=lora)
        trainer = Trainer(policy, LearnConfig(micro_tokens=micro_tokens, grad_clip=0.0))
        metrics = trainer.step(sampled(policy), step=0, guard=True).metrics
        found.append(trainer.state_dict()["tensors"] | {"n": metrics["batch/micro_batches"]})
    one, many = found
    assert one.pop("n") == 1 < many.pop("n")
    assert len(one) == 3 * len(policy.parameters())
    for name, moment in one.items():
        assert torch.allclose(moment, many[name], atol=1e-6, rtol=1e-5), name


def test_bfloat16_keeps_its_masters_in_float32_and_passes_its_own_parity(directory: Path) -> None:
    policy = make(directory, torch.bfloat16)
    samples = sampled(policy)
    before = {k: p.detach().clone() for k, p in policy.parameters().items()}
    result = Trainer(policy, LearnConfig()).step(samples, step=0, guard=True)
    assert not result.skipped and result.parity is not None
    assert result.parity.dtype == torch.bfloat16 and result.parity.mean_abs < 1e-2
    assert all(p.dtype == torch.float32 for p in policy.parameters().values())
    moved = [k for k, p in policy.parameters().items() if not torch.equal(p, before[k])]
    assert any("lora_B" in name for name in moved)


def test_a_step_moves_the_policy_towards_what_was_better_than_its_group(directory: Path) -> None:
    policy = make(directory)
    samples = sampled(policy, temperature=0.8)
    Trainer(policy, LearnConfig(lr=1e-3)).step(samples, step=0, guard=True)
    (micro,) = pack(samples, micro_tokens=4096)
    with torch.no_grad():
        change = forward(policy, micro).logp.numpy() - micro.behaviour
    assert (change * micro.advantage).mean() > 1e-3


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_where_the_run_started_and_the_kl_grows_from_there(
    directory: Path, dtype: torch.dtype, lora: bool
) -> None:
    policy = make(directory, dtype, lora=lora)
    trainer = Trainer(policy, LearnConfig(lr=1e-2, kl=KLConfig(beta=0.01)))
    samples = sampled(policy)
    nats = [trainer.step(samples, step=i).metrics["kl/reference_k3_nats"] for i in range(3)]
    assert 0 <= nats[0] < (1e-9 if dtype == torch.float32 else 1e-4)
    assert nats[0] < nats[1] < nats[2]
    assert policy.fingerprint() != make(directory, dtype, lora=lora).fingerprint()


@pytest.mark.parametrize("lora", [True, False])
def test_a_bonus_raises_the_entropy_of_the_real_policy(directory: Path, lora: bool) -> None:
    """All advantages 0: what moves is the entropy alone, and up."""
    policy = make(directory, lora=lora)
    samples = [
        replace(s, advantages=spread(0.0, s.trained)) for s in sampled(policy, temperature=0.5)
    ]
    config = EntropyConfig(method="sac", target=10.0, strength=0.05)
    trainer = Trainer(policy, LearnConfig(lr=1e-3, entropy=config))
    nats = [trainer.step(samples, step=i).metrics["policy/entropy_nats"] for i in range(4)]
    assert nats == sorted(nats) and nats[-1] > nats[0] + 1e-4
