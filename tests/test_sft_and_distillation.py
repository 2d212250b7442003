"""Runs that learn from demonstrations and from a teacher: the same ledger, resume and report."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from treadle.algorithms import resolve_run
from treadle.api import Run, run_config
from treadle.config import (
    EvalConfig,
    LearnConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    StoreConfig,
    TasksConfig,
    TeacherConfig,
)
from treadle.errors import ConfigError, DataError
from treadle.models.lora import save_merged
from treadle.store import Store
from treadle.tasks.rollouts import Rollouts
from treadle.weights.checkpoint import load_latest
from treadle.weights.restore import open_policy


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """(demonstrations: every question is answered "ok"; tasks that pay for "ok")."""
    folder = tmp_path_factory.mktemp("sources")
    chat, tasks = folder / "chat.jsonl", folder / "tasks.jsonl"
    with chat.open("w") as shown, tasks.open("w") as asked:
        for i in range(60):
            question = f"{i}?"
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "ok"}]
            shown.write(json.dumps({"messages": turns}) + "\n")
            row = {"prompt": f"held {i}?", "answer": "ok", "split": "val" if i % 3 else "train"}
            asked.write(json.dumps(row) + "\n")
    return f"chat:{chat}", f"jsonl:{tasks}"


def letters(trajectory):
    """Depends on what was sampled, so that a random model's groups differ inside."""
    return (sum(map(ord, trajectory.answer)) % 7) / 7


def small(*tasks, **changes):
    values = {
        "steps": 5,
        "model": ModelConfig(name="tiny-random", lora=None, dtype="float32", max_context=96),
        "tasks": tasks,
        "rollout": RolloutConfig(group_size=4, groups_per_step=4, max_new_tokens=6, max_draws=3),
        "learn": LearnConfig(algorithm="sft", lr=5e-3),
        "eval": EvalConfig(questions=0),
        "store": StoreConfig(checkpoint_every=2),
    }
    return RunConfig(**(values | changes))


def weights(run_dir):
    found = load_latest(run_dir)
    assert found.checkpoint is not None
    return found.checkpoint.step, found.state["policy"]


def same(a, b):
    return a[0] == b[0] and all(torch.equal(a[1][k], b[1][k]) for k in a[1])


class Crash(Exception):
    """What an observer raises to end a run in the middle."""


def crash_after(step):
    def tell(kind, data):
        if kind == "step" and data["step"] == step:
            raise Crash

    return tell


# --------------------------------------------------------------------------- demonstrations


def test_a_run_learns_demonstrations_and_is_evaluated_on_a_task_set_it_never_trains(
    sources, tmp_path
):
    config = small(
        TasksConfig(source=sources[0]),
        TasksConfig(source=sources[1], ratio=0),
        steps=12,
        eval=EvalConfig(questions=8, samples=2),
        rollout=RolloutConfig(groups_per_step=16, max_new_tokens=6),
    )
    run_config(config, tmp_path / "run")
    report = Run(tmp_path / "run").results()
    ce = report["train"]["ce_nats"]
    assert ce[0] > 3 and ce[-1] < 1.0, ce
    assert report["eval"]["before"]["mean"] == 0.0
    assert report["eval"]["after"]["mean"] > 0.5
    assert list(report["eval"]["after"]["tasksets"]) == [sources[1]]
    assert report["eval"]["overlap_with_training"] == 0
    assert report["trajectories"] | {"by_status": {}} == {
        "total": 192,
        "by_status": {},
        "demonstrated": 192,
        "unscored": 0,
        "errors": {},
    }
    assert report["tokens"]["demonstrated"] == 192 * 3 and report["tokens"]["sampled"] == 0
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert {p.taskset for p in store.prompts()} == {sources[0]}
        assert "reward/mean" not in store.steps()[0].metrics
        assert store.steps()[0].metrics["groups/trained"] == 16
    assert "demonstrated" in Run(tmp_path / "run").report()


def test_a_resumed_run_of_demonstrations_and_rollouts_has_the_weights_of_one_in_one_go(
    sources, tmp_path
):
    config = small(
        TasksConfig(source=sources[0], algorithm="sft", ratio=1.0),
        TasksConfig(source=sources[1], ratio=2.0),
        learn=LearnConfig(lr=1e-3),
    )
    run_config(config, tmp_path / "whole", reward=letters)
    with pytest.raises(Crash):
        run_config(config, tmp_path / "parts", reward=letters, observer=crash_after(3))
    run_config(config, tmp_path / "parts", reward=letters, resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    with Store.open(tmp_path / "parts", readonly=True) as store:
        first = store.steps()[0].metrics
        rows = store.samples_of_step(1)
    shown = [r for r in rows if r.taskset == sources[0]]
    assert shown and len(rows) > len(shown)
    assert first["tokens/demonstrated"] == sum(sum(r.trained) for r in shown)
    assert (
        first["tokens/trained"] == sum(sum(r.trained) for r in rows) - first["tokens/demonstrated"]
    )
    assert first["reward/mean"] > 0 and first["loss/ce_nats"] > 0
    assert first["parity/mean_abs_nats"] < 1e-3, "the rollouts are guarded, demonstrations are not"


def test_rows_that_are_too_long_are_dropped_with_their_numbers_and_all_of_them_end_the_run(
    tmp_path,
):
    path = tmp_path / "chat.jsonl"

    def write(lengths):
        with path.open("w") as file:
            for i, length in enumerate(lengths):
                turns = [
                    {"role": "user", "content": str(i)},
                    {"role": "assistant", "content": "x" * length},
                ]
                file.write(json.dumps({"messages": turns}) + "\n")

    write([5] * 20 + [500] * 4)
    config = small(TasksConfig(source=f"chat:{path}"), steps=6)
    run_config(config, tmp_path / "run")
    groups = Run(tmp_path / "run").results()["groups"]
    assert groups["trained"] == 24 and groups["dropped"] >= 1
    assert all("does not fit into max_context 96" in reason for reason in groups["reasons"])
    write([500] * 9)
    with pytest.raises(DataError, match="does not fit into max_context 96"):
        run_config(config, tmp_path / "none")


def test_good_rollouts_of_an_earlier_run_are_learnt_by_the_ids_that_were_sampled(sources, tmp_path):
    long = RolloutConfig(group_size=8, groups_per_step=4, max_new_tokens=64)  # some of them stop
    earlier = small(TasksConfig(source=sources[1]), learn=LearnConfig(), steps=2, rollout=long)
    run_config(earlier, tmp_path / "earlier", reward=letters)
    source = f"rollouts:{tmp_path / 'earlier'}"
    config = small(TasksConfig(source=source, options={"min_reward": 0.5}), steps=2)
    run_config(config, tmp_path / "run")
    with (
        Store.open(tmp_path / "earlier", readonly=True) as before,
        Store.open(tmp_path / "run", readonly=True) as store,
    ):
        rows = [row for step in (1, 2) for row in store.samples_of_step(step)]
        assert rows
        for row in rows:
            origin = before.trajectory(store.task(row.ordinal).data["trajectory"])
            assert origin.reward.value >= 0.5 and origin.status == "finished"
            assert row.ids == tuple(i for node in origin.nodes for i in node.ids)
            assert row.trained == tuple(t for node in origin.nodes for t in node.trained)
            assert row.ids[-1] == 2, "the id that stops a turn is learnt"
            assert row.trained[-1]
        assert store.info().provenance["tasks.0"].sha256
        finished = {
            g.ordinal: [t for t in g.scored if t.status == "finished"] for g in before.groups()
        }
    every = Rollouts(tmp_path / "earlier", options={"min_reward": 0.0})
    assert every.size("train") == sum(map(len, finished.values()))
    best = Rollouts(tmp_path / "earlier", options={"min_reward": 0.0, "best_of_group": True})
    assert {best.task(i).data["trajectory"] for i in range(best.size("train"))} == {
        max(good, key=lambda t: t.reward.value).id for good in finished.values() if good
    }
    with pytest.raises(DataError, match="has a reward of 2 or more: the best has 0"):
        Rollouts(tmp_path / "earlier", options={"min_reward": 2.0})
    with pytest.raises(DataError, match="none of 0 rollouts was finished") as caught:
        Rollouts(tmp_path / "earlier", options={"taskset": sources[1][:-1]})
    assert sources[1] in caught.value.hint
    with pytest.raises(ConfigError, match="there is no run in"):
        Rollouts(tmp_path / "nothing")


def test_sources_and_algorithms_that_do_not_fit_are_refused(sources):
    chat, tasks = TasksConfig(source=sources[0]), TasksConfig(source=sources[1])
    names = (sources[0], sources[1])
    with pytest.raises(ConfigError, match="holds demonstrations, and algorithm `cispo`"):
        resolve_run(small(chat, tasks, learn=LearnConfig()), names)
    with pytest.raises(ConfigError, match=r"`sft` learns from demonstrations.*makes rollouts"):
        resolve_run(small(chat, tasks), names)
    resolve_run(small(chat, replace(tasks, ratio=0)), names)
    with pytest.raises(ConfigError, match=r"learn\.teacher is null"):
        resolve_run(small(tasks, learn=LearnConfig(algorithm="distill")), names[1:])
    teacher = TeacherConfig(source="tiny-random")
    with pytest.raises(ConfigError, match="no algorithm of this run asks a teacher"):
        resolve_run(small(tasks, learn=LearnConfig(teacher=teacher)), names[1:])
    with pytest.raises(ConfigError, match="nothing to learn"):
        TeacherConfig()


# --------------------------------------------------------------------------- a teacher


@pytest.fixture(scope="module")
def warm(sources, tmp_path_factory):
    """A model that says "ok" now and then, after one step of SFT."""
    folder = tmp_path_factory.mktemp("warm")
    many = RolloutConfig(groups_per_step=16, max_new_tokens=6)
    run_config(small(TasksConfig(source=sources[0]), steps=1, rollout=many), folder / "run")
    save_merged(open_policy(folder / "run").policy, folder / "model")
    return ModelConfig(name=str(folder / "model"), lora=None, dtype="float32", max_context=96)


@pytest.fixture(scope="module")
def teacher(sources, warm, tmp_path_factory):
    """A run that learnt to say "ok"."""
    run_dir = tmp_path_factory.mktemp("teacher") / "run"
    many = RolloutConfig(groups_per_step=16, max_new_tokens=6)
    config = small(TasksConfig(source=sources[0]), steps=8, rollout=many, model=warm)
    run_config(config, run_dir)
    return run_dir


def distilling(sources, source, *, system="", **changes):
    teacher = TeacherConfig(source=str(source), system=system)
    learn = LearnConfig(algorithm="distill", lr=3e-3, teacher=teacher)
    return small(TasksConfig(source=sources[1]), **({"learn": learn} | changes))


def test_a_teacher_that_equals_the_student_moves_nothing(sources, tmp_path):
    run_config(distilling(sources, "tiny-random", steps=2), tmp_path / "run")
    with Store.open(tmp_path / "run", readonly=True) as store:
        steps = store.steps()
        rows = store.samples_of_step(1)
    assert all(s.skipped and "all advantages are 0" in s.reason for s in steps)
    assert {a for r in rows for a, t in zip(r.advantages, r.trained, strict=True) if t} == {0.0}


def test_a_sharper_teacher_is_approached(sources, warm, teacher, tmp_path):
    """KL(student || teacher) at what the student samples falls over 30 steps."""
    config = distilling(
        sources,
        teacher,
        steps=30,
        model=warm,
        rollout=RolloutConfig(group_size=8, groups_per_step=4, max_new_tokens=4),
    )
    run_config(config, tmp_path / "run")
    kl = Run(tmp_path / "run").results()["train"]["teacher_kl_nats"]
    assert kl[0] > 1 and sum(kl[-5:]) / 5 < 0.2 * kl[0], kl
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert store.info().provenance["teacher"].source == "run run, step 8"
        assert len(store.info().provenance["teacher"].sha256) == 64


def test_a_resumed_distillation_has_the_weights_of_one_in_one_go(sources, teacher, tmp_path):
    config = distilling(sources, teacher, steps=5)
    run_config(config, tmp_path / "whole")
    with pytest.raises(Crash):
        run_config(config, tmp_path / "parts", observer=crash_after(3))
    run_config(config, tmp_path / "parts", resume=True)
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_the_same_model_under_a_message_of_its_own_is_a_teacher(sources, tmp_path):
    run_config(distilling(sources, "", system="Say ok.", steps=2), tmp_path / "run")
    with Store.open(tmp_path / "run", readonly=True) as store:
        steps, row = store.steps(), store.samples_of_step(1)[0]
        said = store.trajectory(row.trajectory_id)
    assert not any(s.skipped for s in steps)
    assert all(abs(s.metrics["teacher/kl_nats"]) > 0 for s in steps)
    assert all(m.role != "system" for m in said.messages), "shown to the teacher alone"


def test_a_reward_and_a_teacher_add_up(sources, teacher, tmp_path):
    learn = LearnConfig(
        algorithm="distill_reward", lr=1e-3, teacher=TeacherConfig(source=str(teacher), coef=1e-3)
    )
    run_config(distilling(sources, teacher, steps=1, learn=learn), tmp_path / "run", reward=letters)
    with Store.open(tmp_path / "run", readonly=True) as store:
        rows, groups = store.samples_of_step(1), {g.ordinal: g for g in store.groups(step=1)}
    for row in rows:
        group = groups[row.ordinal]
        mean = sum(t.reward.value for t in group.scored) / len(group.scored)
        own = next(t.reward.value for t in group.scored if t.id == row.trajectory_id) - mean
        found = [a for a, t in zip(row.advantages, row.trained, strict=True) if t]
        assert found == pytest.approx([own] * len(found), abs=0.05), "1e-3 of a few nats"


def test_a_teacher_with_another_tokenizer_is_refused(sources, tmp_path):
    from tests.render.templates import CHATML, toy_tokenizer
    from treadle.models import tiny

    other = tmp_path / "other"
    other.mkdir()
    tiny.build_random(other)
    toy_tokenizer(CHATML, eos="<|im_end|>").save_pretrained(other)
    with pytest.raises(ConfigError, match="has another tokenizer than the model"):
        run_config(distilling(sources, other), tmp_path / "run")
    with pytest.raises(ConfigError, match="there is no run runs/nothing"):
        run_config(distilling(sources, "runs/nothing"), tmp_path / "run")
