"""A run's weights come back, on the right base, with a card that says where they come from."""

from dataclasses import replace

import pytest
import torch

from treadle.config import LearnConfig, LoraConfig, ModelConfig, RunConfig
from treadle.errors import WeightsError
from treadle.store import EvalResult, Store
from treadle.train.optim import Optimiser
from treadle.types import Provenance
from treadle.weights.export import export_run
from treadle.weights.restore import (
    check_base,
    open_policy,
    policy_state,
    restore_policy,
    restore_run,
    save_run,
)


def step(policy, optimiser, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in policy.parameters().values():
        p.grad = torch.randn(p.shape, generator=generator)
    optimiser.apply(0.5, where=f"step {seed}")
    policy.refresh()


@pytest.mark.parametrize("rank", [4, None])
def test_a_resumed_run_ends_with_the_bits_of_a_quiet_one(tmp_path, make_policy, rank):
    """Contract 11, B074: checkpoint at 3, two more steps committed, a crash, re-applied."""
    quiet, crashed, fresh = (make_policy(rank=rank, moved=False) for _ in range(3))
    learn = LearnConfig(warmup_steps=4)
    optimisers = [Optimiser(p.parameters(), learn) for p in (quiet, crashed, fresh)]
    for seed in range(1, 6):
        step(quiet, optimisers[0], seed)
    for seed in range(1, 4):
        step(crashed, optimisers[1], seed)
    save_run(tmp_path, 3, crashed, optimisers[1], keep=2)
    found = restore_run(tmp_path, fresh, optimisers[2], committed=5)
    assert found.checkpoint.step == 3
    for seed in range(4, 6):
        step(fresh, optimisers[2], seed)
    assert fresh.fingerprint() == quiet.fingerprint() != crashed.fingerprint()


def test_a_step_that_was_never_committed_does_not_come_back(tmp_path, make_policy, move):
    policy = make_policy()
    optimiser = Optimiser(policy.parameters(), LearnConfig())
    before = policy.fingerprint()
    save_run(tmp_path, 2, policy, optimiser, keep=1)
    move(policy)
    save_run(tmp_path, 4, policy, optimiser, keep=1, more={"entropy": {"integral": 0.25}})
    found = restore_run(tmp_path, policy, optimiser, committed=3)
    assert found.checkpoint.step == 2
    assert policy.fingerprint() == before
    assert restore_run(tmp_path, policy, optimiser, committed=9).checkpoint.step == 2


def test_a_run_that_was_never_saved_starts_from_its_first_weights(tmp_path, make_policy):
    policy = make_policy()
    before = policy.fingerprint()
    optimiser = Optimiser(policy.parameters(), LearnConfig())
    assert restore_run(tmp_path, policy, optimiser, committed=5).checkpoint is None
    assert policy.fingerprint() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(next(iter(s))), "missing .*lora_A"),
        (lambda s: s.update(extra=torch.zeros(1)), r"unknown \['extra'\]"),
        (lambda s: s.update({next(iter(s)): torch.zeros(3)}), "in the checkpoint and"),
        (lambda s: s.update({k: v.half() for k, v in s.items()}), "float16 in the checkpoint"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(make_policy, change, message):
    policy = make_policy()
    state = {name: tensor + 1 for name, tensor in policy_state(policy).items()}
    change(state)
    before = policy.fingerprint()
    with pytest.raises(WeightsError, match=message):
        restore_policy(policy, state)
    assert policy.fingerprint() == before


@pytest.fixture
def finished_run(tmp_path, base_dir, make_policy):
    """A run of 3 steps on the tiny model with evals before and after."""
    policy = make_policy()
    config = RunConfig(
        name="adder", steps=3, model=ModelConfig(name=str(base_dir()), lora=LoraConfig(rank=4))
    )
    provenance = {
        "model": policy.loaded.provenance,
        "tasks.0": Provenance(source="reasoning_gym:gcd", license="Apache-2.0"),
    }
    run_dir = tmp_path / "runs" / "adder"
    with Store.create(run_dir, config, provenance=provenance) as store:
        for at, right in ((0, 1), (3, 3)):
            id = store.begin_eval(
                step=at,
                version=at,
                taskset="gcd",
                split="val",
                temperature=1.0,
                data_hash="d",
                settings={},
            )
            for question in range(4):
                score = float(question < right)
                result = EvalResult(
                    task_id=f"q{question}",
                    sample=0,
                    score=score,
                    parts={"score": score, "lenient": 1.0},
                )
                store.add_eval_result(id, result)
            store.finish_eval(id)
        for number in (1, 2, 3):
            store.commit_step(
                number, version=number, ordinals=[], samples=[], metrics={}, skipped=True
            )
        optimiser = Optimiser(policy.parameters(), LearnConfig())
        store.add_checkpoint(save_run(run_dir, 3, policy, optimiser, keep=2).record)
        store.finish("finished")
    return run_dir, policy


def test_the_result_of_a_run_is_opened_again(finished_run):
    run_dir, policy = finished_run
    run = open_policy(run_dir)
    assert run.policy.fingerprint() == policy.fingerprint()
    assert (run.checkpoint.step, run.config.name, run.skipped) == (3, "adder", ())


def test_the_card_of_an_exported_run_names_terms_and_scores(finished_run, tmp_path):
    run_dir, policy = finished_run
    done = export_run(run_dir, tmp_path / "out")
    assert (done.form, done.step) == ("peft", 3)
    text = (tmp_path / "out" / "README.md").read_text()
    assert "| gcd | val | strict rate | 0.250 | 0.750 | 0 to 3 | 4 | 1 | 1 | 0.0% |" in text
    assert "| gcd | val | lenient rate | 1.000 | 1.000 |" in text
    assert "- task set 0: `reasoning_gym:gcd`, licence Apache-2.0\n" in text
    assert policy.loaded.provenance.sha256 in text
    assert policy.loaded.template_sha256 in text
    assert "trained by reinforcement learning with Treadle for 3 optimiser steps" in text
    with pytest.raises(WeightsError, match="is not empty"):
        export_run(run_dir, tmp_path / "out")


def test_another_base_model_under_the_same_name_is_refused(finished_run):
    _, policy = finished_run
    other = replace(policy.loaded.provenance, sha256="0" * 64)
    with pytest.raises(WeightsError, match="an adapter fits its own base only"):
        check_base(policy, other)
    check_base(policy, None)


def test_a_run_without_a_checkpoint_cannot_be_opened_and_says_why(finished_run):
    run_dir, _ = finished_run
    (run_dir / "checkpoints" / "step-00000003" / "manifest.json").unlink()
    with pytest.raises(WeightsError, match=r"no complete checkpoint yet; skipped step-00000003"):
        open_policy(run_dir)
