"""How far a run moved a model: divergences and weight changes against plain computations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from treadle.api import run_config
from treadle.cli.main import main
from treadle.config import (
    EvalConfig,
    LearnConfig,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TasksConfig,
)
from treadle.evals.drift import divergence, effective_rank, kind_of, weight_change
from treadle.models.load import load
from treadle.models.policy import Policy
from treadle.models.tiny import build_random
from treadle.types import Layout, Sample, Segment


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    build_random(path)
    return path


def policy(model, lora=None):
    return Policy(load(str(model), max_context=64), lora=lora, dtype=torch.float32)


def distribution(of, ids):
    """log p(. | ids), without packing."""
    hidden = of.hidden(torch.tensor(ids), Layout((Segment(0, len(ids), None, 0),)))[-1:]
    return (hidden @ of.snapshot().head.T).float().log_softmax(-1)[0].detach()


def row(ids, given, *, ordinal=0):
    trained = tuple(i >= given for i in range(len(ids)))
    return Sample(
        trajectory_id=f"{ordinal}/0",
        ordinal=ordinal,
        ids=tuple(ids),
        trained=trained,
        logprobs=tuple(-1.0 if t else math.nan for t in trained),
        versions=tuple(0 if t else -1 for t in trained),
        advantages=tuple(0.0 if t else math.nan for t in trained),
        temperature=1.0,
    )


def nudge(of, scale, name="q_proj"):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, weight in of.parameters().items():
            if name in key:
                weight += scale * torch.randn(weight.shape, generator=generator)
    of.refresh()


def test_a_model_has_no_distance_to_itself(model):
    a, b = policy(model), policy(model)
    found = divergence(a, b, [row([5, 6, 7, 8], 2), row([9, 9, 3], 1, ordinal=1)])
    assert found.kl_nats == pytest.approx(0, abs=1e-9) == found.k3_nats
    assert (found.num_tokens, found.num_rows) == (4, 2)
    assert all(k.norm == 0 and k.changed_frac == 0 for k in weight_change(a, b))
    assert divergence(a, b, []).kl_nats is None


def test_the_divergence_is_that_of_the_two_distributions_at_every_sampled_token(model):
    a, b = policy(model), policy(model)
    nudge(b, 0.3, "o_proj")
    rows = [row([5, 6, 7, 8], 2), row([9, 9, 3], 1, ordinal=1)]
    exact, k3 = [], []
    for ids, given in (([5, 6, 7, 8], 2), ([9, 9, 3], 1)):
        for t in range(given, len(ids)):
            p, q = distribution(a, ids[:t]), distribution(b, ids[:t])
            exact.append(float((p.exp() * (p - q)).sum()))
            lr = float(q[ids[t]] - p[ids[t]])
            k3.append(math.exp(lr) - 1 - lr)
    found = divergence(a, b, rows)
    assert found.kl_nats == pytest.approx(sum(exact) / 4, rel=1e-3) and found.kl_nats > 1e-3
    assert found.k3_nats == pytest.approx(sum(k3) / 4, rel=1e-3)
    assert found.row_nats == pytest.approx(sum(exact) / 2, rel=1e-3)
    assert divergence(b, a, rows).kl_nats != pytest.approx(found.kl_nats, rel=1e-3)


def test_the_effective_rank_by_hand():
    """p = (1/2, 1/2, 0): exp(log 2) = 2; p = (1): 1; p = (3/4, 1/4): exp(0.5623) = 1.7548."""
    assert effective_rank(torch.tensor([1.0, 1.0, 0.0])) == pytest.approx(2.0)
    assert effective_rank(torch.tensor([4.0])) == pytest.approx(1.0)
    assert effective_rank(torch.tensor([3.0, 1.0])) == pytest.approx(1.7548, abs=1e-4)


def test_the_change_of_weights_is_by_kind_of_layer(model):
    a, b = policy(model), policy(model)
    nudge(b, 0.1)
    found = {k.kind: k for k in weight_change(a, b)}
    moved = found["self_attn.q_proj"]
    deltas = [
        (y - x).detach().double()
        for (name, x), y in zip(a.parameters().items(), b.parameters().values(), strict=True)
        if "q_proj" in name
    ]
    assert moved.norm == pytest.approx(float(sum(d.square().sum() for d in deltas)) ** 0.5)
    assert moved.tensors == len(deltas) and moved.changed_frac > 0.9
    assert 0.5 * moved.full_rank < moved.effective_rank <= moved.full_rank
    assert found["mlp.up_proj"].norm == 0 and found["mlp.up_proj"].effective_rank is None
    assert found["all"].norm == moved.norm
    assert found["all"].parameters == sum(p.numel() for p in a.parameters().values())


def test_a_change_below_the_resolution_of_bfloat16_has_a_norm_and_changes_no_weight(model):
    a, b = policy(model), policy(model)
    with torch.no_grad():
        for weight in b.parameters().values():
            weight.copy_(weight.bfloat16())
        for mine, weight in zip(a.parameters().values(), b.parameters().values(), strict=True):
            mine.copy_(weight)
            weight *= 1 + 1e-4
    a.refresh()
    b.refresh()
    whole = weight_change(a, b)[-1]
    assert whole.relative_norm == pytest.approx(1e-4, rel=1e-2)
    assert whole.changed_frac == 0


def test_an_adapter_changes_what_its_merged_weights_change(model):
    a, b = policy(model), policy(model, LoraConfig(rank=3))
    with torch.no_grad():
        for pair in b.pairs.values():
            pair.b.copy_(torch.randn(pair.b.shape, generator=torch.Generator().manual_seed(2)))
    b.refresh()
    found = {k.kind: k for k in weight_change(a, b)}
    kind = found["self_attn.q_proj"]
    ranks = []
    for name in b.pairs:
        if "q_proj" in name:
            delta = b.merged(name) - a.parameters()[f"{name}.weight"]
            ranks.append(effective_rank(torch.linalg.svdvals(delta.detach())))
    assert kind.effective_rank == pytest.approx(sum(ranks) / len(ranks), rel=1e-2)
    assert kind.effective_rank <= 3.01
    assert found["embed_tokens"].norm == 0


def test_kinds_are_names_without_the_numbers_of_layers():
    assert kind_of("model.layers.11.self_attn.q_proj.weight") == "self_attn.q_proj"
    assert kind_of("model.layers.0.mlp.experts.3.up_proj.weight") == "up_proj"
    assert kind_of("model.embed_tokens.weight") == "embed_tokens"


def test_the_command_tells_trained_and_untouched_task_sets_apart(tmp_path, capsys):
    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Path(tmp_path / name)

    shown = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "ok"}]}
        for i in range(40)
    ]
    chat = write("chat.jsonl", shown)
    own = write(
        "own.jsonl", [{"prompt": f"{i}!", "answer": "ok", "split": "val"} for i in range(6)]
    )
    other = write(
        "x.jsonl", [{"prompt": f"{i}.", "answer": "no", "split": "val"} for i in range(6)]
    )
    config = RunConfig(
        steps=6,
        model=ModelConfig(name="tiny-random", lora=None, dtype="float32", max_context=64),
        tasks=(TasksConfig(source=f"chat:{chat}"), TasksConfig(source=f"jsonl:{own}", ratio=0)),
        rollout=RolloutConfig(groups_per_step=16, max_new_tokens=4),
        learn=LearnConfig(algorithm="sft", lr=5e-3),
        eval=EvalConfig(questions=0),
    )
    run_config(config, tmp_path / "run")
    asked = ["--tasks", f"jsonl:{other}", "--questions", "4", "--samples", "2"]
    assert main(["drift", str(tmp_path / "run"), *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    first, second = found["tasksets"]
    assert first["taskset"] == f"jsonl:{own}" and second["taskset"] == f"jsonl:{other}"
    assert first["trained"] is second["trained"] is False
    assert first["questions"] == 4 and first["before"]["mean"] == 0.0
    for side in ("to_start", "from_start"):
        assert 0.1 < first[side]["kl_nats"] < 20 and first[side]["num_rows"] == 8
    weights = {kind["kind"]: kind for kind in found["weights"]}
    assert 0 < weights["all"]["relative_norm"] < 1 and 0 < weights["all"]["changed_frac"] <= 1
    assert main(["drift", str(tmp_path / "run"), *asked]) == 0
    assert "KL end|start" in capsys.readouterr().out
    assert main(["drift", str(tmp_path / "run"), "--tasks", "nothing"]) == 2
    assert main(["drift", str(tmp_path / "run"), "--tasks", f"chat:{chat}"]) == 2
    assert "holds demonstrations: there is nothing to ask" in capsys.readouterr().err
    for setting in ("model.name=smollm2-135m", "seed=3", "tasks.0.system=Be brief."):
        assert main(["drift", str(tmp_path / "run"), *asked, "--set", setting]) == 2
        assert "in this run: what training did to it" in capsys.readouterr().err
