"""`treadle doctor`, `models` and `tasks`: looking before training."""

import json
from pathlib import Path

import pytest

from treadle.cli import recipes
from treadle.errors import ConfigError


def test_doctor_warns_with_what_to_do_and_still_exits_0(treadle, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    done = treadle("doctor", "--json")
    assert done.code == 0
    assert {"ok", "checks", "facts", "tuning", "probe", "models"} <= set(done.json)
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = treadle("doctor").out
        assert "hint: treadle models pull smollm2-135m" in " ".join(text.split())
        assert max(map(len, text.splitlines())) <= min(columns, 100)
    assert [line for line in text.splitlines() if line.startswith(("ok    load", "warn  load"))]


def test_models_are_listed_and_the_tiny_one_is_made_on_request(
    treadle, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "cache"))
    listed = {m["name"]: m for m in treadle("models", "--json").json["models"]}
    assert {"smollm2-135m", "tiny-random"} <= set(listed)
    assert listed["tiny-random"]["present"] is False
    done = treadle("models", "pull", "tiny-random", "--json")
    assert done.code == 0
    assert Path(done.json["path"]).is_relative_to(tmp_path)
    assert "tiny-random" in treadle("models").out
    done = treadle("models", "pull", "tiny-rnadom")
    assert done.code == 2
    assert "did you mean `tiny-random`" in done.err


def test_tasks_are_shown_with_their_gold_answers(treadle, workspace) -> None:
    done = treadle("tasks", "show", "jsonl:tasks.jsonl", "-n", "2", "--json")
    assert done.code == 0
    assert len(done.json["tasks"]) == 2
    for shown in done.json["tasks"]:
        number = shown["task"]["messages"][0]["content"].split()[0]
        assert shown["gold"] == str(int(number) + 1)
    assert " + 1 =" in treadle("tasks", "show", "rec.py").out
    done = treadle("tasks", "show", "jsonl:tasks.jsonl", "-n", "1000")
    assert done.code == 2


def test_validation_passes_sound_sets_and_fails_those_that_pay_for_nothing(
    treadle, workspace
) -> None:
    done = treadle("tasks", "validate", "jsonl:tasks.jsonl", "-n", "20")
    assert done.code == 0
    rows = [{"prompt": f"Is {i} a number?", "answer": "yes"} for i in range(40)]
    Path("yes.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = treadle("tasks", "validate", "jsonl:yes.jsonl", "-n", "20", "--json")
    assert done.code == 1
    (report,) = done.json["tasksets"]
    assert report["ok"] is False
    assert any(c["status"] == "fail" for c in report["checks"])


def test_a_sources_options_are_set_without_a_prefix(treadle, workspace) -> None:
    done = treadle(
        "tasks", "show", "jsonl:tasks.jsonl", "--set", "options.license=CC0-1.0", "--json"
    )
    assert done.code == 0
    done = treadle("tasks", "show", "jsonl:tasks.jsonl", "--set", "options.licence=CC0-1.0")
    assert done.code == 2
    assert "`license`" in done.err


def test_recipes_are_found_by_name_folder_file_and_function(workspace) -> None:
    assert recipes.load("10_first_run").name == "first-run"
    assert recipes.load("rec.py") == recipes.load("rec.py:recipe")
    (workspace / "recipes" / "mine").mkdir(parents=True)
    (workspace / "rec.py").rename(workspace / "recipes" / "mine" / "recipe.py")
    assert recipes.load("mine") == recipes.load("recipes/mine")
    assert "mine" in recipes.names()
    with pytest.raises(ConfigError) as caught:
        recipes.load("mien")
    assert "`mine`" in caught.value.hint
