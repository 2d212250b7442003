"""The public API: what is checked before a run, and what a resumed run may not change."""

import asyncio
import json
import subprocess
import sys

import pytest

import treadle as td
from tests.test_loop import letters, small, tasks  # noqa: F401 - a fixture
from treadle.api import check_provenance, reward_provenance, run_config
from treadle.errors import ConfigError
from treadle.models.load import load
from treadle.store import Store
from treadle.types import Provenance


def test_importing_treadle_imports_no_torch_and_names_load_on_use():
    """B146: the nouns work on any machine."""
    code = (
        "import sys, treadle as td; td.Task, td.RunConfig, td.Reward; assert 'torch' not in "
        "sys.modules, 'torch was imported'; assert 'train' in dir(td)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_td_train_tunes_threads_before_torch_is_imported():
    code = (
        "import treadle as td; td.train; from treadle import machine; t = machine.tune(); "
        "import torch; assert not [n for n in t.skipped if 'OMP' in n], t.skipped"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rooms_that_are_verbs_answer_calls_and_stay_modules():
    from treadle.reward import GraderPool

    assert td.reward(letters) is letters
    assert td.reward.GraderPool is GraderPool
    with pytest.raises(ConfigError, match="marks a function"):
        td.reward(3)


def test_train_takes_what_is_not_named_from_the_config(tasks, tmp_path):  # noqa: F811
    config = small(tasks, steps=2)
    run = td.train(tasks=str(tasks), reward=letters, config=config, run_dir=tmp_path / "run")
    with run.store() as store:
        stored = store.config()
        assert (stored.steps, stored.model.name) == (2, "tiny-random")
        assert stored.model.dtype == "float32"
        assert len(store.steps()) == 2
    assert "steps" in run.report()
    assert json.dumps(run.results())
    merged = run.export(tmp_path / "merged", form="merged")
    assert load(str(merged), max_context=64).path == merged


def test_train_shows_the_progress_of_the_command_line_unless_told_not_to(
    tasks,  # noqa: F811
    tmp_path,
    capsys,
):
    given = {"tasks": tasks, "reward": letters, "config": small(tasks, steps=2)}
    seen = []
    td.train(**given, run_dir=tmp_path / "told", observer=lambda k, d: seen.append(k))
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("  ")[0] for line in err.splitlines()] == ["step 1/2", "step 2/2"]
    assert seen.count("step") == 2
    td.train(**given, run_dir=tmp_path / "silent", progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_run_of_python_code_says_how_python_code_goes_on(tasks, tmp_path):  # noqa: F811
    def crash(kind, data):
        raise OSError("stop")

    config = small(tasks, steps=2)
    with pytest.raises(OSError, match="stop"):
        td.train(
            tasks=tasks, reward=letters, config=config, run_dir=tmp_path / "run", observer=crash
        )
    run = td.Run(tmp_path / "run")
    assert f"td.train(..., run_dir='{tmp_path}/run', resume=True)" in run.report()
    assert "RECIPE" not in run.report()


def test_train_works_inside_a_running_loop_as_in_a_notebook(tasks, tmp_path):  # noqa: F811
    async def cell():
        return td.train(
            tasks=str(tasks), reward=letters, config=small(tasks, steps=1), run_dir=tmp_path / "run"
        )

    with asyncio.run(cell()).store() as store:
        assert len(store.steps()) == 1


def test_a_resumed_run_refuses_another_reward(tasks, tmp_path):  # noqa: F811
    run_config(small(tasks, steps=1), tmp_path / "run", reward=letters)
    with Store.open(tmp_path / "run", readonly=True) as store:
        before = store.info(), store.events()
    with pytest.raises(ConfigError, match="the run began with reward"):
        run_config(small(tasks, steps=2), tmp_path / "run", resume=True)
    with Store.open(tmp_path / "run", readonly=True) as store:
        assert len(store.steps()) == 1
        assert (store.info(), store.events()) == before, "a refusal leaves no trace"
        assert store.info().status == "finished"


def test_changed_provenance_is_named():
    began = {"model": Provenance(source="a", license="x", sha256="1" * 64)}
    check_provenance(began, began)
    other = {"model": Provenance(source="a", license="x", sha256="2" * 64)}
    with pytest.raises(ConfigError, match="began with model a 111"):
        check_provenance(began, other)


def test_a_reward_is_known_by_its_code():
    config = td.RunConfig()
    assert reward_provenance(letters, config) == reward_provenance(letters, config)
    one, two = (lambda t: 1.0), (lambda t: 2.0)
    assert reward_provenance(one, config).sha256 != reward_provenance(two, config).sha256


def test_a_path_and_a_single_setting_are_taken_as_they_are(tasks, tmp_path):  # noqa: F811
    config = small(tasks, steps=3)
    run = td.train(
        tasks=tasks, reward=letters, config=config, settings="steps=1", run_dir=tmp_path / "run"
    )
    with run.store() as store:
        assert store.config().steps == 1
        assert store.config().tasks[0].source == f"jsonl:{tasks}"


@pytest.mark.parametrize(
    ("changes", "says", "hint"),
    [
        ({"steps": "3"}, "`steps` must be an integer, got '3'", "without the quotes: 3"),
        ({"steps": 2.5}, "`steps` must be an integer, got 2.5", ""),
        ({"steps": 0}, "`steps` must be >= 1, got 0", ""),
        ({"model": 5}, "`model.name` must be text, got 5", ""),
        ({"reward": 5}, "`reward` is not a function: 5", "a function of one trajectory"),
        ({"reward": lambda: 1.0}, "`reward` cannot be called with one trajectory", "one trajecto"),
        ({"tasks": 5}, "`tasks` cannot be 5", "a path to a JSONL file"),
        ({"tasks": [5]}, "`tasks` cannot be 5", "a path to a JSONL file"),
        ({"tasks": {"source": "x"}}, "`tasks` cannot be {'source': 'x'}", "a path to a JSONL file"),
        ({"settings": 5}, "`settings` cannot be 5", "learn.lr=1e-4"),
        ({"settings": {"steps": 3}}, "`settings` cannot be {'steps': 3}", "learn.lr=1e-4"),
        ({"settings": [5]}, "`settings` cannot be 5", "learn.lr=1e-4"),
        ({"settings": "steps"}, "`steps` is not an assignment", "--set"),
        ({"config": {"steps": 3}}, "`config` cannot be {'steps': 3}", "td.RunConfig"),
        ({"run_dir": 5}, "`run_dir` cannot be 5", "a path"),
        ({"progress": "no"}, "`progress` cannot be 'no'", "False"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named_before_anything_runs(
    tasks,  # noqa: F811
    tmp_path,
    monkeypatch,
    changes,
    says,
    hint,
):
    monkeypatch.chdir(tmp_path)
    given = {"tasks": str(tasks), "reward": letters, "config": small(tasks), "run_dir": "run"}
    with pytest.raises(ConfigError) as caught:
        td.train(**given | changes)
    assert says in caught.value.message
    assert hint in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_several_task_sets_may_be_paths_and_configs(tasks, tmp_path):  # noqa: F811
    other = tmp_path / "more.jsonl"
    other.write_text('{"prompt": "1+1", "answer": "2"}\n')
    run = td.train(
        tasks=[other, td.TasksConfig(source=f"jsonl:{tasks}")],
        reward=letters,
        config=small(tasks, steps=1),
        run_dir=tmp_path / "run",
    )
    with run.store() as store:
        assert [t.source for t in store.config().tasks] == [f"jsonl:{other}", f"jsonl:{tasks}"]


def test_an_evaluation_directory_is_no_place_to_train(tasks, tmp_path):  # noqa: F811
    origin = {"evaluated": Provenance(source="model toy", license="x", sha256="1" * 64)}
    config = small(tasks)
    with Store.create(tmp_path / "eval", config, provenance=origin) as store:
        store.finish("finished")
    for resume in (True, False):
        with pytest.raises(ConfigError, match="holds an evaluation, of model toy, not a run"):
            run_config(config, tmp_path / "eval", reward=letters, resume=resume)
    with Store.open(tmp_path / "eval", readonly=True) as store:
        assert (store.info().status, len(store.info().sessions)) == ("finished", 1)


def test_a_reward_function_pays_for_what_the_set_cannot_grade_and_is_not_called_strict(tmp_path):
    path = tmp_path / "half.jsonl"
    rows = [{"prompt": f"{i}+1", "split": s} for s in ("train", "val") for i in range(40)]
    for i, row in enumerate(rows):
        row["prompt"] += row["split"]
        if i % 2:
            row["answer"] = str(i)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = small(path, steps=1, eval=td.EvalConfig(questions=12, samples=1))
    run = td.train(tasks=str(path), reward=scored, config=config, run_dir=tmp_path / "run")
    row = run.results()["eval"]["after"]["tasksets"][f"jsonl:{path}"]
    assert 0 < row["ungraded"] < 12
    assert row["strict"]["n"] == row["lenient"]["n"] == 12 - row["ungraded"]
    assert row["strict"]["mean"] <= 1


def scored(trajectory):
    return {"score": 3 + letters(trajectory), "lenient": 4.0}
