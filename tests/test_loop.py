"""The controller on a tiny model: what it commits, proves, refuses and restores."""

import json
import math
import re
import traceback
from dataclasses import replace

import pytest

from treadle.api import load_model, policy_of, run_config
from treadle.config import (
    CorrectionConfig,
    CriticConfig,
    EntropyConfig,
    EvalConfig,
    KLConfig,
    LearnConfig,
    ModelConfig,
    OverlongConfig,
    RolloutConfig,
    RunConfig,
    ScheduleConfig,
    StoreConfig,
    TasksConfig,
)
from treadle.errors import ConfigError, ContractError, DataError, StoreError
from treadle.store import Store
from treadle.train import Trainer
from treadle.weights.restore import open_policy


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "sums.jsonl"
    rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a in range(10) for b in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def letters(trajectory):
    """Depends on what was sampled, so that a random model's groups differ inside."""
    return (sum(map(ord, trajectory.answer)) % 7) / 7


def constant(trajectory):
    return 1.0


def nothing(trajectory):
    return 0.0


def small(tasks, **changes):
    values = {
        "steps": 3,
        "model": ModelConfig(name="tiny-random", dtype="float32", max_context=96),
        "tasks": (TasksConfig(source=f"jsonl:{tasks}"),),
        "rollout": RolloutConfig(group_size=4, groups_per_step=2, max_new_tokens=6, max_draws=3),
        "eval": EvalConfig(questions=0),
        "store": StoreConfig(checkpoint_every=2),
    }
    return RunConfig(**(values | changes))


def test_a_run_commits_every_step_at_lag_zero_and_proves_parity_once(tasks, tmp_path):
    events = []
    run_config(
        small(tasks), tmp_path / "run", reward=letters, observer=lambda k, d: events.append(k)
    )
    with Store.open(tmp_path / "run", readonly=True) as store:
        steps = store.steps()
        assert [s.step for s in steps] == [1, 2, 3]
        assert [s.version for s in steps] == [1, 2, 3]
        assert all(s.metrics["lag/max_versions"] == 0 for s in steps)
        assert steps[0].metrics["parity/mean_abs_nats"] < 1e-3
        assert steps[1].metrics["parity/mean_abs_nats"] < 1e-3, "an update was published wrongly"
        assert "parity/mean_abs_nats" not in steps[2].metrics
        trained = [o for s in steps for o in s.ordinals]
        assert len(trained) == len(set(trained)) == 6
        assert store.info().status == "finished"
        for trajectory in (t for g in store.groups(step=2) for t in g.trajectories):
            assert {v for n in trajectory.nodes for v in n.versions if v >= 0} == {1}
    assert events.count("step") == 3
    assert events.count("checkpoint") == 2


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("eta", [0, 1, 2])
def test_every_length_and_run_ahead_ends(tasks, tmp_path, steps, eta):
    """B095: no combination deadlocks, the last step included; no lag beyond max_lag."""
    config = small(tasks, steps=steps, schedule=ScheduleConfig(eta=eta, max_lag=2 * eta))
    run_config(config, tmp_path / "run", reward=letters)
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert len(store.steps()) == steps
        assert max(s.metrics["lag/max_versions"] for s in store.steps()) <= 2 * eta


def test_constant_rewards_end_the_run_with_the_draws_and_the_mean(tasks, tmp_path):
    """B094: bounded tries, then a stated end with the pass rate; nothing is lost."""
    with pytest.raises(DataError, match=r"all rewards are equal; mean reward 1\.000") as caught:
        run_config(small(tasks), tmp_path / "run", reward=constant)
    assert "treadle tasks validate" in caught.value.hint
    assert caught.value.message.count("\n  answered: ") == 3
    assert re.search(r'answered: ".*", right: "\d+", reward 1$', caught.value.message)
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert store.info().status == "failed"
        assert "all rewards are equal" in store.info().sessions[-1].cause
        assert store.frontier().num_dropped >= 6


def test_rewards_of_nothing_but_0_are_told_early_and_with_what_was_answered(
    tasks, tmp_path, caplog
):
    """What is wrong with a reward is mostly seen at once in an answer beside the right one."""
    with pytest.raises(DataError, match=r"mean reward 0\.000\)\n  answered: ") as caught:
        run_config(small(tasks), tmp_path / "run", reward=nothing)
    lines = caught.value.message.splitlines()[1:]
    assert len(lines) == 3
    assert all(line.isprintable() and len(line) < 200 for line in lines), "a model's text is data"
    assert all(re.fullmatch(r'  answered: ".*", right: "\d+", reward 0', line) for line in lines)
    warnings = [r.message for r in caplog.records if "mean reward" in r.message]
    assert len(warnings) == 1 and "exactly 0: 8 scored" in warnings[0]
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert [e.data["step"] for e in store.events() if e.kind == "alarm"] == [1]


def test_steps_that_train_on_rewards_of_0_warn_too(tasks, tmp_path, caplog):
    config = small(tasks, steps=2, learn=LearnConfig(zero_variance="keep"))
    run_config(config, tmp_path / "run", reward=nothing)
    assert len([r for r in caplog.records if "exactly 0" in r.message]) == 1


def test_an_error_of_the_loop_leaves_with_its_own_causes_alone(tasks, tmp_path):
    def broken(kind, data):
        if kind == "group":
            try:
                {}["cause"]
            except KeyError as error:
                raise DataError("an observer failed") from error

    with pytest.raises(DataError) as caught:
        run_config(small(tasks), tmp_path / "run", reward=letters, observer=broken)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("Traceback (most recent call last)") == 2
    assert "ExceptionGroup" not in text
    assert isinstance(caught.value.__cause__, KeyError)


def test_broken_parity_stops_the_run_before_anything_is_learnt(tasks, tmp_path):
    config = small(tasks, learn=LearnConfig(parity_stop=1e-12))
    with pytest.raises(ContractError, match="trainer and sampler disagree"):
        run_config(config, tmp_path / "run", reward=letters)
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert store.steps() == ()
        assert len(store.frontier().published) == 2


def test_a_resumed_run_trains_what_is_missing_and_equals_one_run_in_one_go(tasks, tmp_path):
    """B074, B079: same batches, and exactly the missing steps."""
    run_config(small(tasks, steps=5), tmp_path / "whole", reward=letters)
    run_config(small(tasks, steps=3), tmp_path / "parts", reward=letters)
    run_config(small(tasks, steps=5), tmp_path / "parts", reward=letters, resume=True)
    with (
        Store.open(tmp_path / "whole", readonly=True) as whole,
        Store.open(tmp_path / "parts", readonly=True) as parts,
    ):
        assert [s.ordinals for s in whole.steps()] == [s.ordinals for s in parts.steps()]
        assert parts.config().steps == 5, "the longer run is what the store describes now"
        for a, b in zip(whole.steps(), parts.steps(), strict=True):
            assert a.metrics["loss/total"] == b.metrics["loss/total"]
            assert a.metrics["grad/norm"] == b.metrics["grad/norm"]


def test_each_task_set_is_trained_by_its_own_algorithm(tasks, tmp_path):
    """Rows of one step, two losses, a correction; applied again from the store, bit for bit."""
    config = replace(
        small(tasks, steps=2),
        tasks=(
            TasksConfig(source=f"jsonl:{tasks}"),
            TasksConfig(source=f"jsonl:{tasks}", system="Be brief.", algorithm="gspo"),
        ),
        learn=LearnConfig(
            algorithm="dapo",
            aggregation="prompt_mean",
            correction=CorrectionConfig(weight="token", veto_low=1e-4),
        ),
    )

    def crash(kind, data):
        if kind == "step":
            raise Crash

    run_config(config, tmp_path / "whole", reward=letters)
    with pytest.raises(Crash):
        run_config(config, tmp_path / "parts", reward=letters, observer=crash)
    run_config(config, tmp_path / "parts", reward=letters, resume=True)
    with (
        Store.open(tmp_path / "whole", readonly=True) as whole,
        Store.open(tmp_path / "parts", readonly=True) as parts,
    ):
        rows = whole.samples_of_step(1)
        assert {row.taskset for row in rows} == {f"jsonl:{tasks}", f"jsonl:{tasks}#2"}
        assert rows == parts.samples_of_step(1)
        for a, b in zip(whole.steps(), parts.steps(), strict=True):
            assert a.metrics["grad/norm"] == b.metrics["grad/norm"] > 0
            assert a.metrics["correction/weight_mean"] == pytest.approx(1, abs=1e-3)
            assert a.metrics["correction/rejected_rows"] == 0
            assert a.metrics["mismatch/measured_frac"] == 1


class Crash(Exception):
    """What an observer raises to end a run in the middle."""


@pytest.mark.parametrize("eta", [0, 1])
def test_steps_after_the_last_checkpoint_are_applied_again_from_stored_samples(
    tasks, tmp_path, eta
):
    """Contract 11: the same prompts, none twice, and at eta 0 the same numbers to the bit."""
    config = small(
        tasks,
        steps=5,
        store=StoreConfig(checkpoint_every=2),
        schedule=ScheduleConfig(eta=eta, max_lag=eta),
    )
    run_config(config, tmp_path / "whole", reward=letters)

    def crash(kind, data):
        if kind == "step" and data["step"] == 3:
            raise Crash

    with pytest.raises(Crash):
        run_config(config, tmp_path / "parts", reward=letters, observer=crash)
    seen = []
    run_config(
        config,
        tmp_path / "parts",
        reward=letters,
        resume=True,
        observer=lambda kind, data: seen.append((kind, data.get("step"))),
    )
    assert ("reapply", 3) in seen and ("reapply", 2) not in seen
    with (
        Store.open(tmp_path / "whole", readonly=True) as whole,
        Store.open(tmp_path / "parts", readonly=True) as parts,
    ):
        trained = [o for s in parts.steps() for o in s.ordinals]
        assert len(trained) == len(set(trained)) == 10
        if eta == 0:
            assert [s.ordinals for s in whole.steps()] == [s.ordinals for s in parts.steps()]
            for a, b in zip(whole.steps(), parts.steps(), strict=True):
                assert a.metrics["loss/total"] == b.metrics["loss/total"]
                assert a.metrics["grad/norm"] == b.metrics["grad/norm"]


def test_old_groups_are_measured_by_the_weights_that_sampled_them_and_stored_so(tasks, tmp_path):
    """eta 2: engine and trainer agree to rounding by the same weights, however far these moved; and
    the whole run, made again from its stored samples alone, ends with the same bits."""
    config = small(
        tasks,
        steps=6,
        learn=LearnConfig(lr=1e-2, algorithm="decoupled_ppo", mismatch_share=1.0),
        schedule=ScheduleConfig(eta=2, max_lag=2),
    )
    run_config(config, tmp_path / "run", reward=letters)
    with Store.open(tmp_path / "run", readonly=True) as store:
        steps = [(s.metrics, store.samples_of_step(s.step)) for s in store.steps()]
    old = 0
    for version, (metrics, samples) in enumerate(steps):
        trained = [
            (v, late, math.isfinite(prox))
            for s in samples
            for t, v, late, prox in zip(
                s.trained,
                s.versions,
                s.overtaken or (False,) * len(s.ids),
                s.prox_logprobs or (math.nan,) * len(s.ids),
                strict=True,
            )
            if t
        ]
        assert all(known == (v < version and not late) for v, late, known in trained)
        whole = sum(not late for _, late, _ in trained) / len(trained)
        assert metrics["mismatch/measured_frac"] == pytest.approx(whole)
        assert metrics["mismatch/k3_nats"] < 1e-8
        assert ("time/proximal_s" in metrics) == any(known for *_, known in trained)
        if any(known for *_, known in trained):
            old += 1
            assert metrics["staleness/k3_nats"] > 1e-6 > 100 * metrics["mismatch/k3_nats"]
    assert old >= 2

    found = {}
    for stored in (True, False):
        policy = policy_of(load_model(config.model), config)
        trainer = Trainer(policy, config.learn, seed=config.seed)
        for i, (_, samples) in enumerate(steps):
            rows = samples if stored else [replace(s, prox_logprobs=()) for s in samples]
            trainer.step(rows, step=i)
        found[stored] = policy.fingerprint()
    assert found[True] == open_policy(tmp_path / "run").policy.fingerprint()
    assert found[False] != found[True], "a correction takes what was measured"


def test_controllers_go_on_with_the_same_bits_after_a_crash(tasks, tmp_path):
    """Step 3 is applied again after the checkpoint of step 2: dials and terms as in one go."""
    entropy = EntropyConfig(target=9.0, alarm_steps=1, bounds=(1e-4, 4e-3))
    kl = KLConfig(beta=0.1, target_nats=1e-3, horizon_rows=50)
    config = small(tasks, steps=5, learn=LearnConfig(lr=1e-2, entropy=entropy, kl=kl))
    run_config(config, tmp_path / "whole", reward=letters)

    def crash(kind, data):
        if kind == "step" and data["step"] == 3:
            raise Crash

    with pytest.raises(Crash):
        run_config(config, tmp_path / "parts", reward=letters, observer=crash)
    run_config(config, tmp_path / "parts", reward=letters, resume=True)
    with (
        Store.open(tmp_path / "whole", readonly=True) as whole,
        Store.open(tmp_path / "parts", readonly=True) as parts,
    ):
        for a, b in zip(whole.steps(), parts.steps(), strict=True):
            for name in (
                "loss/total",
                "grad/norm",
                "entropy/control",
                "entropy/error_nats",
                "kl/beta",
                "kl/reference_k3_nats",
            ):
                assert a.metrics[name] == b.metrics[name], (name, a.step)
        controls = [s.metrics["entropy/control"] for s in whole.steps()]
        betas = [s.metrics["kl/beta"] for s in whole.steps()]
        alarms = [e.data["message"] for e in whole.events() if e.kind == "alarm"]
    assert controls == [1e-3, 2e-3, 4e-3, 4e-3, 4e-3]
    assert betas[0] == 0.1 and len(set(betas)) > 1
    assert sum("at its limit of 0.004 for 1 steps" in message for message in alarms) == 1


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_critic_goes_on_with_the_same_bits_after_a_crash(tasks, tmp_path, kind):
    """One rollout per task. Step 3 is applied again after the checkpoint of step 2, from stored
    outcomes: values, advantages and both updates as in one go, and the warm-up ends when it did."""
    critic = CriticConfig(kind=kind, lam=0.9, warmup_steps=1)
    config = small(
        tasks,
        steps=5,
        learn=LearnConfig(lr=1e-2, algorithm="ppo", critic=critic),
        rollout=RolloutConfig(group_size=1, groups_per_step=6, max_new_tokens=6),
    )
    run_config(config, tmp_path / "whole", reward=letters)

    def crash(kind, data):
        if kind == "step" and data["step"] == 3:
            raise Crash

    with pytest.raises(Crash):
        run_config(config, tmp_path / "parts", reward=letters, observer=crash)
    run_config(config, tmp_path / "parts", reward=letters, resume=True)
    with (
        Store.open(tmp_path / "whole", readonly=True) as whole,
        Store.open(tmp_path / "parts", readonly=True) as parts,
    ):
        for a, b in zip(whole.steps(), parts.steps(), strict=True):
            assert a.ordinals == b.ordinals and not a.skipped
            kept = [n for n in a.metrics if n.startswith(("value/", "loss/", "grad/", "ratio/"))]
            assert "value/explained_variance" in kept and "value/clipped_frac" in kept
            assert [a.metrics[n] for n in kept] == [b.metrics[n] for n in kept], a.step
        frozen = [s.metrics["value/actor_frozen"] for s in whole.steps()]
        rewards = {t.id: t.reward.value for g in whole.groups(step=3) for t in g.trajectories}
        for sample in whole.samples_of_step(3):
            made = {x for x, t in zip(sample.advantages, sample.trained, strict=True) if t}
            assert made == {rewards[sample.trajectory_id]}, "the ledger holds outcomes"
    assert frozen == [1, 0, 0, 0, 0]


def test_rewards_that_are_all_equal_are_trained_on_under_a_critic(tasks, tmp_path):
    """Nothing is compared, so nothing is dropped; the critic learns what the reward is."""
    learn = LearnConfig(lr=1e-3, algorithm="ppo", critic=CriticConfig())
    run_config(small(tasks, steps=2, learn=learn), tmp_path / "run", reward=constant)
    with Store.open(tmp_path / "run", readonly=True) as store:
        losses = [s.metrics["value/loss"] for s in store.steps()]
        assert store.frontier().num_dropped == 0
    assert losses[1] < losses[0] == pytest.approx(0.5)


def test_another_setting_on_resume_is_refused_and_so_is_a_second_run_in_one_place(tasks, tmp_path):
    run_config(small(tasks, steps=1), tmp_path / "run", reward=letters)
    with pytest.raises(ConfigError, match=r"only `steps` may differ.*`seed` was 0, and 5 is asked"):
        run_config(small(tasks, seed=5), tmp_path / "run", reward=letters, resume=True)
    with pytest.raises(StoreError, match="holds a run already") as caught:
        run_config(small(tasks), tmp_path / "run", reward=letters)
    assert "--resume" in caught.value.hint and "resume=True" in caught.value.hint


def test_evals_before_and_after_use_the_strict_score_whatever_is_trained(tasks, tmp_path):
    """B053: a constant-free training reward leaves the eval's own score alone."""
    config = small(tasks, steps=1, eval=EvalConfig(questions=5, samples=2))
    run_config(config, tmp_path / "run", reward=letters)
    with Store.open(tmp_path / "run", readonly=True) as store:
        evals = store.evals(finished=True)
    assert [e.step for e in evals] == [0, 1]
    assert all(e.n == 5 and e.k == 2 for e in evals)
    assert {r.score for e in evals for r in e.results} <= {0.0, 1.0}


def test_an_overlong_penalty_trains_is_recorded_and_never_evaluates(tasks, tmp_path):
    """A buffer of 5 of 6 tokens: what is sampled is longer than 1 token, and loses .2 for each."""
    rollout = replace(
        small(tasks).rollout, overlong=OverlongConfig(buffer_tokens=5), max_new_tokens=6
    )
    config = small(tasks, rollout=rollout, eval=EvalConfig(questions=5, samples=2))
    run_config(config, tmp_path / "run", reward=letters)
    with Store.open(tmp_path / "run", readonly=True) as store:
        steps, evals, events = store.steps(), store.evals(finished=True), store.events()
        made = [t for s in steps for g in store.groups(step=s.step) for t in g.trajectories]
    for t in made:
        taken = -max(0, t.num_sampled_tokens - 1) / 5
        assert t.reward.parts["overlong"] == pytest.approx(taken)
        assert t.reward.value == pytest.approx(letters(t) + taken)
        assert t.reward.earned == pytest.approx(letters(t))
    assert any(t.reward.parts["overlong"] <= -0.2 for t in made)
    assert all(-1 <= s.metrics["reward/overlong_mean"] < 0 for s in steps)
    assert {r.score for e in evals for r in e.results} <= {0.0, 1.0}
    assert all("overlong" not in r.parts for e in evals for r in e.results)
    cut = [e.data["message"] for e in events if e.kind == "alarm"]
    assert any("were cut by a limit, and for 3 steps" in message for message in cut), cut


def test_prompts_that_do_not_fit_end_the_run_with_their_length_and_no_advice_about_rewards(
    tasks, tmp_path
):
    config = small(tasks, model=ModelConfig(name="tiny-random", dtype="float32", max_context=16))
    with pytest.raises(DataError, match=r"prompt of \d+ tokens, max_context 16") as caught:
        run_config(config, tmp_path / "run", reward=letters)
    assert "max_context" in caught.value.hint and "easier" not in caught.value.hint
    with Store.open(tmp_path / "run", readonly=True) as store:
        reasons = {p.reason for p in store.prompts(state="dropped")}
        assert all("max_context 16" in reason for reason in reasons) and reasons


def test_an_evaluation_leaves_prompts_that_do_not_fit_without_a_verdict(tmp_path):
    """One question in two does not fit: the rate is of the other half."""
    path = tmp_path / "mixed.jsonl"
    rows = [{"prompt": "1+" * (60 * (i % 2)) + f"{i}", "answer": "x"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small(path, steps=1, eval=EvalConfig(questions=6, samples=1))
    run_config(config, tmp_path / "run", reward=letters)
    with Store.open(tmp_path / "run", readonly=True) as store:
        results = [r for e in store.evals() for r in e.results]
        unscored = [r for r in results if r.score is None]
        assert 0 < len(unscored) < len(results)
        assert all("max_context 96" in r.error.message for r in unscored if r.error)
        assert all(r.error for r in unscored)
