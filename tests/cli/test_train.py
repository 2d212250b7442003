"""`treadle train`: the run, its resumption (B079), and the plan."""

import re
import shlex
from pathlib import Path

from treadle.store import Store
from treadle.weights import restore


def test_a_run_prints_one_document_and_a_line_per_step_elsewhere(treadle, workspace) -> None:
    done = treadle("train", "rec.py", "--json")
    assert done.code == 0
    for side in ("before", "after", "gain"):
        assert {"mean", "ci95", "n"} <= set(done.json["eval"][side])
    assert done.json["new_steps"] == 2
    assert done.json["steps"]["done"] == 2
    steps = [line for line in done.err.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/2", "2/2"]
    for word in ("reward", "solved", "length", "entropy", " s ", "tok/s", "dropped"):
        assert word in steps[0]
    evals = [line for line in done.err.splitlines() if line.startswith("eval at step")]
    assert [line.split()[3] for line in evals] == ["0", "2"]
    assert all("strict" in line and "lenient" in line for line in evals)


def test_a_taken_run_directory_is_refused_before_anything_is_loaded(treadle, trained) -> None:
    before = (trained / "run.db").read_bytes()
    done = treadle("train", "rec.py", "--json", "--set", "model.name=nowhere")
    assert done.code == 1
    assert done.json["error"]["kind"] == "StoreError"
    assert "--resume" in done.json["error"]["hint"]
    assert (trained / "run.db").read_bytes() == before


def test_resuming_a_finished_run_trains_nothing_and_says_so(treadle, trained) -> None:
    """B079."""
    done = treadle("train", "rec.py", "--resume", "--json")
    assert done.code == 0
    assert "nothing was trained" in done.err
    assert "--set steps=12" in done.err
    assert done.json["new_steps"] == 0
    assert not re.search("complete", done.err)
    with Store.open(trained, readonly=True) as store:
        assert len(store.info().sessions) == 1


def test_a_target_below_what_is_done_is_refused(treadle, trained) -> None:
    """B079."""
    done = treadle("train", "rec.py", "--resume", "--set", "steps=1")
    assert done.code == 2
    assert "has 2 steps already, and 1 are asked for" in done.err


def test_a_higher_target_trains_exactly_the_difference(treadle, trained) -> None:
    """B079: counters continue."""
    done = treadle("train", "rec.py", "--resume", "--set", "steps=4", "--json")
    assert done.code == 0
    assert done.json["new_steps"] == 2
    with Store.open(trained, readonly=True) as store:
        assert [s.step for s in store.steps()] == [1, 2, 3, 4]
        assert [p.ordinal for p in store.prompts()] == list(range(len(store.prompts())))
        updates = [s.metrics["optim/updates"] for s in store.steps()]
    assert updates == [1, 2, 3, 4]
    steps = [line.split()[1] for line in done.err.splitlines() if line.startswith("step ")]
    assert steps == ["3/4", "4/4"]


def test_a_resumed_run_keeps_its_settings_and_names_those_of_the_recipe_that_differ(
    treadle, trained, workspace
) -> None:
    recipe = (workspace / "rec.py").read_text()
    (workspace / "rec.py").write_text(recipe.replace("max_new_tokens=6", "max_new_tokens=7"))
    done = treadle("train", "rec.py", "--resume")
    assert done.code == 0
    assert "  rollout.max_new_tokens = 6 (recipe: 7)" in done.err
    done = treadle("train", "rec.py", "--resume", "--set", "learn.lr=1", "--set", "steps=9")
    assert done.code == 2
    assert "only `steps` may differ" in done.err
    assert "`learn.lr` was 0.0003, and 1.0 is asked for" in done.err


def test_a_dtype_that_the_machine_chose_is_no_other_setting(treadle, workspace) -> None:
    recipe = (workspace / "rec.py").read_text()
    assert recipe.count('dtype="float32"') == 1
    (workspace / "rec.py").write_text(recipe.replace('dtype="float32"', 'dtype="auto"'))
    assert treadle("train", "rec.py", "--set", "steps=1").code == 0
    with Store.open(Path("runs/tiny"), readonly=True) as store:
        assert store.config().model.dtype != "auto"
    done = treadle("train", "rec.py", "--resume", "--set", "model.dtype=auto")
    assert done.code == 0
    assert "keeps the settings" not in done.err
    assert "nothing was trained" in done.err


def test_a_length_given_on_resume_holds_for_later_plain_resumes(
    treadle, trained, monkeypatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("treadle.loop.save_run", crash)
        done = treadle("train", "rec.py", "--resume", "--set", "steps=4", "--json")
    assert (done.code, done.json["error"]["message"]) == (1, "no disk")
    done = treadle("train", "rec.py", "--resume", "--json")
    assert done.code == 0
    assert (done.json["steps"]["done"], done.json["steps"]["wanted"]) == (4, 4)
    assert "keeps the settings" not in done.err
    assert "has finished its 4 steps before" in treadle("train", "rec.py", "--resume").err


def test_a_larger_limit_of_disk_is_taken_on_resume_and_kept(treadle, trained) -> None:
    settings = ["--set", "steps=3", "--set", "store.max_gib=33"]
    assert treadle("train", "rec.py", "--resume", *settings).code == 0
    with Store.open(trained, readonly=True) as store:
        assert (store.config().store.max_gib, store.config().steps) == (33, 3)


def test_after_a_failure_the_command_that_goes_on_is_the_one_that_was_used(
    treadle, workspace, monkeypatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("treadle.loop.save_run", crash)
        assert treadle("train", "rec.py", "--run-dir", "runs/a b").code == 1
    command = "treadle train rec.py --run-dir 'runs/a b' --resume"
    assert f"  {command}   go on" in treadle("report", "runs/a b").out
    assert treadle("report", "runs/a b", "--json").json["go_on"] == command
    why = treadle("runs", "why", "runs/a b").out
    assert command in why
    assert why.count("no disk") == 1
    assert treadle(*shlex.split(command)[1:]).code == 0


def crash(*args: object, **kwargs: object) -> None:
    raise OSError("no disk")


def test_there_must_be_a_run_to_resume(treadle, workspace) -> None:
    done = treadle("train", "rec.py", "--resume")
    assert done.code == 2
    assert "there is no run runs/tiny" in done.err
    assert not Path("runs").exists()


def test_a_dry_run_writes_nothing_and_shows_config_and_plan(treadle, workspace) -> None:
    before = sorted(p.name for p in workspace.iterdir())
    done = treadle("train", "rec.py", "--dry-run", "--json", "--set", "eval.questions=50")
    assert done.code == 0
    plan = done.json["plan"]
    assert done.json["config"]["eval"]["questions"] == 50
    assert plan["compute"]["dtype"] == "float32"
    assert plan["step"]["sampled_tokens_max"] == 2 * 4 * 6
    memory = plan["memory"]
    assert sum(memory["parts_bytes"].values()) == memory["total_bytes"]
    assert plan["run_dir"]["state"] == "new"
    found = plan["tasks"][0]["held_out_questions"]
    assert 0 < found < 50
    assert f"has {found} distinct questions, 50 are asked for" in plan["cautions"][0]
    assert plan["template"]["problems"] == []
    assert sorted(p.name for p in workspace.iterdir()) == before


def test_the_plan_as_text_has_every_setting_as_set_takes_it(treadle, trained) -> None:
    done = treadle("train", "rec.py", "--dry-run")
    assert done.code == 0
    assert "  rollout.group_size = 4" in done.out
    assert '  tasks.0.reward = "cli_rewards:letters"' in done.out
    assert "holds a run: finished, 2 steps done" in done.out
    algorithm = "cispo = advantage group_mean, loss cispo (ratio_max 5.0,"
    assert f"  algorithm       jsonl:tasks.jsonl: {algorithm}" in done.out
    for part in ("compute", "memory", "disk", "evaluation", "chat template"):
        assert f"\n  {part}" in done.out


def test_the_plan_shows_the_algorithm_of_each_task_set_with_its_numbers(treadle, workspace) -> None:
    settings = ("learn.algorithm=dr_grpo", "learn.correction.veto_low=1e-4", "rollout.overlong={}")
    done = treadle(
        "train", "rec.py", "--dry-run", "--json", *(p for s in settings for p in ("--set", s))
    )
    assert done.json["plan"]["step"]["overlong"] == {"free_tokens": 5, "penalty": 1.0}
    (found,) = done.json["plan"]["algorithms"].values()
    assert found == {
        "name": "dr_grpo",
        "advantage": "group_mean",
        "loss": "ppo_clip",
        "loss_options": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0},
        "aggregation": "seq_mean_token_sum_norm",
        "norm_tokens": 6,
        "correction": {"veto_low": 1e-4},
    }


def test_the_plan_counts_what_the_optimiser_will_own(treadle, trained) -> None:
    adapter = treadle("train", "rec.py", "--dry-run", "--json").json["plan"]["model"]
    policy = restore.open_policy(trained).policy
    assert adapter["trained_parameters"] == sum(p.numel() for p in policy.parameters().values())
    full = treadle("train", "rec.py", "--dry-run", "--json", "--set", "model.lora=null")
    model = full.json["plan"]["model"]
    assert model["trained_parameters"] == model["shape"]["parameters"]


def test_the_plan_shows_what_a_reference_costs(treadle, workspace) -> None:
    sizes = []
    for lora in ('{"rank": 4, "alpha": 8}', "null"):
        settings = ("--set", "learn.kl.beta=0.1", "--set", f"model.lora={lora}")
        plan = treadle("train", "rec.py", "--dry-run", "--json", *settings).json["plan"]
        sizes.append((plan["memory"]["parts_bytes"]["reference"], plan["model"]["shape"]))
    assert sizes[0][0] == 0
    assert sizes[1][0] == 4 * sizes[1][1]["parameters"]


def test_the_plan_shows_what_a_critic_costs(treadle, workspace) -> None:
    found = []
    for kind in ("head", "model"):
        settings = ("--set", "learn.algorithm=ppo", "--set", f"learn.critic.kind={kind}")
        plan = treadle("train", "rec.py", "--dry-run", "--json", *settings).json["plan"]
        found.append((plan["model"]["critic_parameters"], plan["memory"]["parts_bytes"]["critic"]))
    hidden, trained = plan["model"]["shape"]["hidden"], plan["model"]["trained_parameters"]
    tokens = plan["step"]["sampled_tokens_max"]
    assert found[0] == (hidden + 1, 16 * (hidden + 1) + 4 * hidden * tokens)
    assert found[1][0] == trained + hidden + 1 and found[1][1] > 16 * found[1][0]
    told = treadle("train", "rec.py", "--dry-run", *settings).out
    assert f"and a critic of {found[1][0]:,}" in told and "critic" in told.split("memory")[1]


def test_a_dry_run_makes_the_checks_of_a_start(treadle, workspace) -> None:
    for setting, says in (
        ("eval.split=vall", "no split `vall`"),
        ("tasks.0.reward=cli_rewards:lettres", "did you mean `letters`"),
        ("model.name=./nowhere", "no such model directory"),
        ("learn.entropy.method=adapo", "moves clip_high, but loss `cispo` has none"),
        ("learn.kl.discount=0.5", "`k3+_in_loss` has no returns"),
        ("learn.algorithm=cipso", "did you mean `cispo`"),
        ("learn.loss_options.ratio_mx=3", "did you mean `ratio_max`"),
        ("learn.algorithm=ppo", "needs values, and there is no critic"),
        ("learn.critic.kind=head", "no algorithm of this run asks a critic"),
        ("tasks.0.algorithm=gsop", "unknown algorithm `gsop` in tasks.algorithm"),
    ):
        done = treadle("train", "rec.py", "--dry-run", "--set", setting)
        assert done.code == 2, setting
        assert says in done.err
