"""recipes/15_own_tasks: what a newcomer copies works as it stands."""

import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.evals.eval_runs import task, trajectory

FOLDER = Path(__file__).parents[2] / "recipes" / "15_own_tasks"


@pytest.fixture
def own(tmp_path, monkeypatch) -> Path:
    for name in ("my_recipe.py", "tasks.jsonl"):
        shutil.copy(FOLDER / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_its_tasks_are_sound_and_its_reward_trains(treadle, own) -> None:
    assert treadle("tasks", "validate", "jsonl:tasks.jsonl").code == 0
    settings = ("steps=2", "model.name=tiny-random", "model.dtype=float32", "eval.questions=4")
    done = treadle("train", "my_recipe.py", "--json", *(a for s in settings for a in ("--set", s)))
    assert done.code == 0, done.err
    assert done.json["run"] == "runs/mine"
    assert done.json["steps"]["done"] == 2
    assert done.json["provenance"]["reward"]["source"] == "my_recipe:close"
    assert done.json["trajectories"]["unscored"] == 0


def test_its_reward_pays_for_letters_in_their_place() -> None:
    close = runpy.run_path(str(FOLDER / "my_recipe.py"))["close"]
    of = replace(task("toy:x", 0), data={"answer": "cba"})
    pays = {"cba": 1, " cba\n": 1, "cbx": 2 / 3, "cbaa": 3 / 4, "": 0, "abc": 1 / 3, "xyz": 0}
    for answer, reward in pays.items():
        assert close(trajectory(0, 0, of, 0, answer=answer)) == reward, answer
