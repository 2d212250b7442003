"""`treadle eval`: rates of a model or a run, resumable, comparable."""

import json
import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from treadle.cli.eval import _changed
from treadle.store import EvalResult, EvalRow, Store

MODEL = ["--tasks", "jsonl:tasks.jsonl", "--set", "model.dtype=float32"]
SMALL = ["--questions", "3", "--samples", "2", "--set", "rollout.max_new_tokens=6"]


def answers(run_dir: Path) -> dict[tuple[str, int], tuple[str, float]]:
    """Text and time of every stored answer."""
    with sqlite3.connect(run_dir / "run.db") as db:
        rows = db.execute("SELECT task_id, sample, answer, stored_at FROM eval_results").fetchall()
    db.close()
    return {(task, sample): (answer, time) for task, sample, answer, time in rows}


def test_a_run_is_evaluated_on_its_own_held_out_questions_by_default(treadle, trained) -> None:
    done = treadle("eval", trained, "--json")
    assert done.code == 0
    (row,) = done.json["tasksets"]
    with Store.open(trained, readonly=True) as store:
        (after,) = store.evals(step=2)
    assert row["data_hash"] == after.data_hash
    # The weights are those of the last step: the very same answers.
    with Store.open(done.json["run_dir"], readonly=True) as store:
        assert [r.answer for r in store.evals()[0].results] == [r.answer for r in after.results]
    assert done.json["step"] == 2
    assert done.json["strict"] == row["strict"]
    assert done.json["provenance"]["evaluated"]["source"] == "run tiny, step 2"


def test_every_number_carries_what_it_rests_on(treadle, workspace, model_dir) -> None:
    """B155."""
    done = treadle("eval", model_dir, *MODEL, *SMALL, "--json")
    (row,) = done.json["tasksets"]
    assert {"strict", "lenient", "n", "k", "temperature", "version", "data_hash"} <= set(row)
    assert {"error_share", "split", "settings"} <= set(row)
    assert (row["n"], row["k"], row["split"], row["version"]) == (3, 2, "val", 0)
    text = treadle("eval", model_dir, *MODEL, *SMALL).out
    for word in ("strict", "lenient", "questions", "samples", "temperature", "runs/eval-tiny-"):
        assert word in text
    (listed,) = treadle("runs", "--json").json["runs"]
    assert (listed["kind"], listed["status"]) == ("evaluation", "finished")
    why = treadle("runs", "why", done.json["run_dir"])
    assert "treadle eval" in why.out
    assert "steps" not in why.out


def test_a_killed_evaluation_makes_only_what_is_missing(treadle, workspace, model_dir) -> None:
    """B148: each answer is a transaction of its own, so a kill at half leaves half of the rows."""
    command = ["eval", model_dir, *MODEL, *SMALL, "--json"]
    whole = treadle(*command).json
    run_dir = Path(whole["run_dir"])
    before = answers(run_dir)
    assert len(before) == 6
    with sqlite3.connect(run_dir / "run.db") as db:
        db.execute("DELETE FROM eval_results WHERE sample = 1")
        db.execute("UPDATE evals SET finished_at = NULL")
    db.close()
    again = treadle(*command).json
    after = answers(run_dir)
    assert again == whole
    assert {k: text for k, (text, _) in after.items()} == {k: t for k, (t, _) in before.items()}
    redone = {key for key in after if after[key][1] != before[key][1]}
    assert redone == {key for key in before if key[1] == 1}


def test_more_samples_are_added_to_those_there(treadle, workspace, model_dir) -> None:
    """B148."""
    command = ["eval", model_dir, *MODEL, *SMALL, "--json"]
    run_dir = Path(treadle(*command).json["run_dir"])
    before = answers(run_dir)
    more = treadle(*command, "--samples", "4").json
    assert more["run_dir"] == str(run_dir)
    assert more["tasksets"][0]["k"] == 4
    after = answers(run_dir)
    assert len(after) == 12
    assert {key: after[key] for key in before} == before


def test_one_directory_never_mixes_two_settings_or_two_models(treadle, trained, model_dir) -> None:
    command = ["eval", model_dir, *MODEL, *SMALL]
    assert treadle(*command, "--run-dir", "runs/e").code == 0
    done = treadle(*command, "--run-dir", "runs/e", "--set", "tasks.0.system=Be brief.")
    assert done.code == 2
    assert "`tasks.0.system`" in done.err
    done = treadle("eval", trained, *MODEL[:2], "--run-dir", "runs/e")
    assert done.code == 2
    assert "`origin.evaluated`" in done.err
    done = treadle(*command, "--run-dir", trained)
    assert done.code == 2
    assert "holds a run, not an evaluation" in done.err


def test_a_comparison_pairs_equal_questions_and_refuses_others(treadle, trained) -> None:
    done = treadle("eval", trained, "--compare", trained, "--json")
    assert done.code == 0
    gain = done.json["compare"]["strict"]
    assert (gain["mean"], gain["n"]) == (0.0, 3)
    assert done.json["compare"]["steps"] == [2]
    done = treadle("eval", trained, "--compare", trained, "--set", "rollout.max_new_tokens=5")
    assert done.code == 2
    assert "max_new_tokens differs (6 and 5)" in done.err
    done = treadle("eval", trained, "--compare", "runs/gone")
    assert done.code == 2


def test_a_comparison_speaks_of_runs_steps_and_questions(treadle, trained, model_dir) -> None:
    base = ["eval", model_dir, *MODEL, *SMALL]
    assert treadle(*base, "--run-dir", "runs/base").code == 0
    mine = ["eval", trained, "--samples", "2", "--compare", "runs/base"]
    done = treadle(*mine)
    assert done.code == 0, done.err
    assert f"strict gain over {model_dir.name}, step 0" in done.out
    compared = treadle(*mine, "--json").json["compare"]
    assert (compared["name"], compared["run"]) == (model_dir.name, "runs/base")
    for change in compared["changed"]:
        assert change["before"] != change["after"]
        assert re.fullmatch(r"\d+ \+ 1 =", change["question"])
    done = treadle(*mine, "--questions", "2")
    assert done.code == 2
    says = f"{model_dir.name} has no answers to compare with those of tiny on jsonl:tasks.jsonl: "
    assert says in done.err
    assert re.search(r'the questions differ: 1 is in the first only \("\d+ \+ 1 ="\)', done.err)
    assert f"(first: {model_dir.name}, second: tiny)" in done.err
    assert not re.search(r"[0-9a-f]{8}", done.err), "a hash says nothing to a reader"


def test_changed_questions_are_those_whose_mean_score_moved() -> None:
    row = EvalRow(
        id=1, step=0, version=0, taskset="jsonl:a", split="val", temperature=1.0,
        data_hash="x", settings={}, finished=True, results=(),
    )  # fmt: skip
    scores = {"a": (0, 1), "b": (1, 1), "c": (1, 0), "d": (None, 0)}
    then = [result(id, i, v) for id, values in scores.items() for i, v in enumerate(values)]
    now = [result(id, i, v) for id in scores for i, v in enumerate((1, 1))]
    changed = _changed(replace(row, results=then), replace(row, results=now), Asked())
    found = {c["question"]: (c["before"], c["after"]) for c in changed}
    assert found == {"text of a": (0.5, 1), "text of c": (0.5, 1), "text of d": (0, 1)}


class Asked:
    def text(self, taskset: str, id: str) -> str:
        return f"text of {id}"


def result(id: str, sample: int, score: float | None) -> EvalResult:
    parts = {} if score is None else {"score": score}
    return EvalResult(task_id=id, sample=sample, score=score, parts=parts)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["{model}"], "no task set to evaluate on"),
        (["{model}", "--tasks", "rec.py", "--set", "model.name=other"], "cannot change the model"),
        (["{model}", "--tasks", "jsonl:gone.jsonl"], "cannot be read"),
        (["{model}", "--tasks", "jsonl:tasks.jsonl", "--split", "dev"], "no split `dev`"),
        (["runs/tiney"], "there is no run runs/tiney"),
        (["tiny-rndom", "--tasks", "jsonl:tasks.jsonl"], "unknown model"),
    ],
)
def test_mistakes_exit_2_and_leave_nothing(treadle, workspace, model_dir, argv, says) -> None:
    done = treadle("eval", *(a.format(model=model_dir) for a in argv))
    assert done.code == 2
    assert says in done.err
    assert "hint:" in done.err or "cannot" in says
    assert not Path("runs").exists()


def rows(path: str, *of: dict[str, str]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in of))
    return f"jsonl:{path}"


def test_questions_without_an_answer_are_left_out_of_the_rates_and_counted(
    treadle, workspace, model_dir
) -> None:
    of = [{"prompt": f"say {i}", "split": "val"} for i in range(4)]
    source = rows("half.jsonl", *({**r, "answer": "1"} if i % 2 else r for i, r in enumerate(of)))
    command = ["eval", model_dir, "--tasks", source, *SMALL, "--questions", "4"]
    command += ["--set", "model.dtype=float32", "--set", "tasks.0.reward=cli_rewards:letters"]
    done = treadle(*command, "--json")
    assert done.code == 0, done.err
    (row,) = done.json["tasksets"]
    assert (row["strict"]["n"], row["lenient"]["n"], row["reward"], row["ungraded"]) == (
        2,
        2,
        None,
        2,
    )
    text = treadle(*command).out
    assert "warning: 2 of 4 questions" in text
    assert "only 2 distinct held-out questions" in text, "those that the rates are of"


def test_a_set_without_answers_is_refused_or_shown_by_its_reward(
    treadle, workspace, model_dir
) -> None:
    source = rows("bare.jsonl", *({"prompt": f"say {i}"} for i in range(40)))
    command = ["eval", model_dir, "--tasks", source, *SMALL, "--set", "model.dtype=float32"]
    done = treadle(*command)
    assert done.code == 2
    assert "an `answer` to grade against" in done.err and "module:function" in done.err
    assert not Path("runs").exists()
    command += ["--set", "tasks.0.reward=cli_rewards:letters"]
    done = treadle(*command, "--json")
    assert (done.json["strict"], done.json["lenient"]) == (None, None)
    assert 0 <= done.json["reward"]["mean"] <= 1
    text = treadle(*command).out
    assert "reward" in text and "strict" not in text and "%" not in text.split("unscored")[0]


def test_a_lack_of_lenient_readings_is_null_and_few_questions_are_called_rough(
    treadle, workspace, model_dir
) -> None:
    pytest.importorskip("reasoning_gym")
    source = ["--tasks", "reasoning_gym:letter_counting", "--set", "model.dtype=float32"]
    done = treadle("eval", model_dir, *source, *SMALL, "--json")
    assert done.code == 0, done.err
    document = done.json
    assert document["tasksets"][0]["strict"] is not None
    assert document["tasksets"][0].keys() >= {"strict", "lenient", "reward"}
    assert document.keys() >= {"strict", "lenient", "reward"} and document["reward"] is None
    assert any("only 3 distinct held-out questions" in w for w in document["warnings"])
    assert "intervals are rough" in treadle("eval", model_dir, *source, *SMALL).out


def test_questions_that_the_run_was_trained_on_are_counted_and_said(treadle, trained) -> None:
    done = treadle("eval", trained, "--json").json
    assert done["overlap_with_training"] == 0
    with Store.open(trained, readonly=True) as store:
        prompt = store.task(0).messages[-1].content
    of = [{"prompt": text, "answer": "1", "split": "val"} for text in (prompt, "new")]
    rows("tasks.jsonl", *of)
    leaky = treadle("eval", trained, "--json").json
    assert leaky["overlap_with_training"] == 1
    assert any("1 held-out questions were also trained on" in w for w in leaky["warnings"])
    assert "1 held-out questions were also trained on" in treadle("eval", trained).out
    report = treadle("report", leaky["run_dir"])
    assert "1 held-out questions were also trained on" in report.out
    assert "strict" in report.out and "lenient" in report.out


def test_a_refused_directory_is_left_as_it_was(treadle, trained, model_dir) -> None:
    command = ["eval", model_dir, *MODEL, *SMALL, "--run-dir"]
    assert treadle(*command, "runs/e").code == 0
    for run_dir in (Path("runs/e"), trained):
        with Store.open(run_dir, readonly=True) as store:
            before = store.info(), store.events()
        assert treadle(*command, run_dir, "--set", "tasks.0.system=Be brief.").code == 2
        with Store.open(run_dir, readonly=True) as store:
            assert (store.info(), store.events()) == before
            assert store.info().status == "finished"
    done = treadle("train", "rec.py", "--run-dir", "runs/e", "--resume")
    assert done.code == 2
    assert "holds an evaluation" in done.err


def test_a_misspelt_run_is_suggested(treadle, trained) -> None:
    done = treadle("eval", "runs/tinny")
    assert done.code == 2
    assert "did you mean `tiny`?" in done.err
