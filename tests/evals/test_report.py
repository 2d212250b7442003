"""The report: gains by hand, what is missing or partial, what must not be compared."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.evals.eval_runs import (
    FAMILIES,
    PROVENANCE,
    add_eval,
    config,
    evaluate_all,
    task,
    train,
    train_step,
    trajectory,
    whole_run,
)
from treadle.config import EvalConfig, TasksConfig
from treadle.evals.page import render
from treadle.evals.report import as_text, summarise
from treadle.evals.terminal import BLOCKS, MIN_POINTS, sparkline
from treadle.store import Store
from treadle.types import Group, Provenance

ONE = (TasksConfig(source=FAMILIES[0]),)


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "run", config(tasks=ONE), provenance=PROVENANCE) as store:
        yield store


ROOT = Path(__file__).parents[2]


def both(*scores):
    """Strict and lenient the same."""
    return [(s, s) for s in scores]


# --------------------------------------------------------------------------- by hand


def test_a_gain_worked_by_hand(store):
    """Strict per question: before .5, 0, 0; after 1, .5, 0. Differences .5, .5, 0: mean 1/3,
    standard deviation .288675, half width 4.3027 * .288675 / sqrt(3) = .71711, cut at 1. Lenient:
    before 1, .5, 0; after 1, .5, .5: differences 0, 0, .5."""
    add_eval(
        store,
        0,
        {"a": [(1, 1), (0, 1)], "b": [(0, 1), (0, 0)], "c": [(0, 0), (0, 0)]},
    )
    train(store, 2)
    add_eval(
        store,
        2,
        {"a": [(1, 1), (1, 1)], "b": [(1, 1), (0, 0)], "c": [(0, 1), (0, 0)]},
    )
    found = summarise(store)["eval"]
    assert found["before"]["mean"] == pytest.approx(1 / 6)
    assert found["after"]["mean"] == pytest.approx(0.5)
    gain = found["gain"]
    assert gain["mean"] == pytest.approx(1 / 3)
    assert gain["ci95"] == pytest.approx([1 / 3 - 0.71711, 1.0], abs=1e-3)
    assert gain["n"] == 3
    assert found["before"]["lenient"]["mean"] == pytest.approx(0.5)
    assert gain["lenient"]["mean"] == pytest.approx(1 / 6)
    assert gain["tasksets"][FAMILIES[0]]["strict"]["mean"] == pytest.approx(1 / 3)
    assert gain["reason"] == ""


def test_every_number_carries_its_settings(store):
    """B155."""
    add_eval(store, 0, {"a": both(1, None), "b": both(0, 1)}, temperature=1.0)
    before = summarise(store)["eval"]["before"]
    for row in (before, before["tasksets"][FAMILIES[0]]):
        assert row["temperature"] == 1.0
        assert (row["k"], row["n"], row["version"], row["step"]) == (2, 2, 0, 0)
        assert (row["split"], row["data_hash"], row["error_share"]) == ("val", "aa", 0.25)
    assert before["tasksets"][FAMILIES[0]]["settings"] == {"max_new_tokens": 24}


def test_task_sets_weigh_the_same_and_questions_are_counted_once(tmp_path):
    """Two sets of 1 and 3 questions, one text in both: mean (1 + 0) / 2, n = 3 of 4."""
    with Store.create(tmp_path / "run", config(), provenance=PROVENANCE) as store:
        add_eval(store, 0, {"a": both(1)}, taskset=FAMILIES[0], texts={"a": "the  same Text"})
        add_eval(
            store,
            0,
            {"x": both(0), "y": both(0), "z": both(0)},
            taskset=FAMILIES[1],
            texts={"x": "The same text"},
        )
        before = summarise(store)["eval"]["before"]
    assert before["mean"] == 0.5
    assert before["n"] == 3


def test_a_set_without_a_lenient_reading_counts_there_with_its_strict_rate(tmp_path):
    with Store.create(tmp_path / "run", config(), provenance=PROVENANCE) as store:
        add_eval(store, 0, {"a": [(0, 1)]}, taskset=FAMILIES[0])
        add_eval(store, 0, {"x": [(0.5, None)]}, taskset=FAMILIES[1])
        before = summarise(store)["eval"]["before"]
    assert before["tasksets"][FAMILIES[1]]["lenient"] is None
    assert before["lenient"]["mean"] == pytest.approx(0.75)


def test_unscored_answers_are_left_out_and_said(store):
    add_eval(store, 0, {"a": both(1, None), "b": both(None, None)})
    report = summarise(store)
    assert report["eval"]["before"]["mean"] == 1.0
    assert report["eval"]["before"]["n"] == 1
    assert any("75.0% of the answers before" in w for w in report["warnings"])


# --------------------------------------------------------------------------- rates and rewards


def test_rates_are_of_the_questions_that_the_task_set_graded(store):
    """A reward of 7 for a row without an answer is neither a strict nor a lenient success."""
    add_eval(store, 0, {"a": [(0, 1)], "b": [(1, 1)], "x": [(7, None)]}, ungraded="x")
    train(store, 1)
    add_eval(store, 1, {"a": [(1, 1)], "b": [(1, 1)], "x": [(9, None)]}, ungraded="x")
    report = summarise(store)
    before, gain = report["eval"]["before"], report["eval"]["gain"]
    assert (before["mean"], before["n"], before["measure"]) == (0.5, 2, "strict")
    assert (before["lenient"]["mean"], before["lenient"]["n"]) == (1.0, 2)
    row = before["tasksets"][FAMILIES[0]]
    assert (row["strict"]["n"], row["lenient"]["n"], row["reward"], row["ungraded"]) == (
        2,
        2,
        None,
        1,
    )
    assert (gain["mean"], gain["n"]) == (0.5, 2)
    assert any("1 of 3 questions before" in w and "cannot grade" in w for w in report["warnings"])


def test_a_set_that_grades_nothing_shows_its_reward_as_a_reward(store, tmp_path):
    add_eval(store, 0, {"a": [(50, None)], "b": [(150, None)]}, ungraded="ab")
    train(store, 1)
    add_eval(store, 1, {"a": [(100, None)], "b": [(200, None)]}, ungraded="ab")
    report = summarise(store)
    evals = report["eval"]
    assert (evals["after"]["mean"], evals["after"]["measure"]) == (150.0, "reward")
    assert evals["after"]["lenient"]["mean"] is None
    row = evals["after"]["tasksets"][FAMILIES[0]]
    assert (row["strict"], row["lenient"], row["reward"]["mean"]) == (None, None, 150.0)
    assert (evals["gain"]["mean"], evals["gain"]["measure"]) == (50.0, "reward")
    held_out = as_text(report).partition("training, steps")[0]
    for word in ("strict", "lenient", "skill"):
        assert word not in held_out
    assert "reward" in held_out and "150.000" in held_out
    assert any("cannot grade its tasks" in w for w in report["warnings"])
    page = render(store)
    assert "reward gain" in page and "strict gain" not in page and "lenient before" not in page


def test_a_mean_over_task_sets_is_of_rates_as_long_as_one_set_grades(tmp_path):
    with Store.create(tmp_path / "run", config(), provenance=PROVENANCE) as store:
        add_eval(store, 0, {"a": both(1), "b": both(0)}, taskset=FAMILIES[0])
        add_eval(store, 0, {"x": [(40, None)]}, taskset=FAMILIES[1], ungraded="x")
        report = summarise(store)
    assert (report["eval"]["before"]["mean"], report["eval"]["before"]["n"]) == (0.5, 2)
    assert "mean of 2" not in as_text(report)


def test_an_evaluation_of_a_trained_run_is_the_one_side_of_its_report(tmp_path):
    evaluated = Provenance(source="run fake, step 60", license="apache-2.0", sha256="cd" * 32)
    origin = {**PROVENANCE, "evaluated": evaluated}
    with Store.create(tmp_path / "eval", config(tasks=ONE), provenance=origin) as store:
        add_eval(store, 60, {"a": both(1), "b": both(0)})
        store.add_event("overlap with training", {"questions": ["a text", "b text"]})
        store.finish("finished")
        report, page = summarise(store), render(store)
    evals = report["eval"]
    assert (evals["after"]["mean"], evals["after"]["step"], evals["after"]["n"]) == (0.5, 60, 2)
    assert evals["before"]["mean"] is None and evals["gain"]["mean"] is None
    assert evals["overlap_with_training"] == 2
    text = as_text(report)
    assert "0.500 [0.000, 1.000]" in text and "no before/after gain" not in text
    assert "gain, paired" not in text
    assert any("2 held-out questions were also trained on" in w for w in report["warnings"])
    assert any("only 2 distinct held-out questions" in w for w in report["warnings"])
    assert "strict before" not in page and "0.500" in page


# --------------------------------------------------------------------------- what is not there


def test_without_an_evaluation_after_there_is_no_gain_and_the_reason_is_said(store):
    """B121: the final point is not silently missing, and no earlier one takes its place."""
    add_eval(store, 0, {"a": both(0)})
    train(store, 1)
    add_eval(store, 1, {"a": both(1)})
    train(store, 1, first=2)
    report = summarise(store)
    assert report["eval"]["after"]["mean"] is None
    assert report["eval"]["gain"] == {
        "mean": None,
        "ci95": [None, None],
        "n": 0,
        "measure": "strict",
        "lenient": {"mean": None, "ci95": [None, None], "n": 0},
        "reason": f"step 2 was not evaluated on {FAMILIES[0]}",
        "tasksets": {},
    }
    assert [e["step"] for e in report["eval"]["all"]] == [0, 1]
    assert f"step 2 was not evaluated on {FAMILIES[0]}" in as_text(report)


def test_a_partial_evaluation_is_labelled_and_never_used(tmp_path):
    with Store.create(tmp_path / "run", config(), provenance=PROVENANCE) as store:
        evaluate_all(store, 0, 0.5, 0.5)
        train(store, 1)
        evaluate_all(store, 1, 0.9, 0.9, tasksets=FAMILIES[:1])
        add_eval(store, 1, {"val-0": both(1)}, taskset=FAMILIES[1], finished=False)
        report = summarise(store)
    after = report["eval"]["after"]
    assert after["mean"] is None
    assert list(after["tasksets"]) == [FAMILIES[0]]
    assert after["partial"][FAMILIES[1]]["n"] == 1
    assert "cut off after 1 answers" in after["reason"]
    assert list(report["eval"]["gain"]["tasksets"]) == [FAMILIES[0]]
    assert "partial, after: gcd has 1 questions so far" in as_text(report)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data_hash": "bb"}, "the questions differ: the same texts with other answers"),
        ({"temperature": 0.5}, "temperature differs (1.0 and 0.5)"),
        ({"split": "test"}, "split differs (val and test)"),
    ],
)
def test_what_was_asked_differently_is_not_subtracted(store, change, reason):
    add_eval(store, 0, {"a": both(0)})
    train(store, 1)
    add_eval(store, 1, {"a": both(1)}, **change)
    gain = summarise(store)["eval"]["gain"]
    assert gain["mean"] is None
    assert reason in gain["reason"]


def test_the_pair_that_fits_is_found_among_several_evaluations(store):
    """A later evaluation of another split must not hide the one that the run made."""
    add_eval(store, 0, {"a": both(0)})
    train(store, 1)
    add_eval(store, 1, {"a": both(1)})
    add_eval(store, 1, {"z": both(0)}, split="test", data_hash="cc")
    assert summarise(store)["eval"]["gain"]["mean"] == 1.0


def test_an_empty_run_says_why(store):
    """B151."""
    report = summarise(store)
    assert report["steps"] == {"done": 0, "wanted": 3, "skipped": 0}
    assert report["train"]["step"] == []
    assert report["eval"]["before"]["mean"] is None
    assert report["timing"]["step_s_median"] is None
    text = as_text(report)
    assert "no step is committed yet" in text
    json.dumps(report, allow_nan=False)


def test_evaluations_that_are_off_are_called_off(tmp_path):
    off = config(eval=EvalConfig(questions=0))
    with Store.create(tmp_path / "run", off, provenance=PROVENANCE) as store:
        assert summarise(store)["eval"]["gain"]["reason"] == (
            "evaluations are off (eval.questions is 0)"
        )


# --------------------------------------------------------------------------- leaks and format


def test_a_held_out_question_that_was_trained_on_is_counted_by_its_text(store):
    trained = task(FAMILIES[0], 0)
    same = trained.messages[-1].content.upper() + "  "
    add_eval(store, 0, {"a": both(0), "b": both(0)}, texts={"b": same})
    assert summarise(store)["eval"]["overlap_with_training"] == 0
    store.start_group(0, trained)
    report = summarise(store)
    assert report["eval"]["overlap_with_training"] == 1
    assert any("1 held-out questions were also trained on" in w for w in report["warnings"])


def test_format_is_not_sold_as_skill(store):
    """The strict rate rises on every question, the lenient one on none."""
    add_eval(store, 0, {str(i): [(0, float(i % 2))] for i in range(12)})
    train(store, 1)
    add_eval(store, 1, {str(i): [(0.9 + i / 1000, float(i % 2))] for i in range(12)})
    report = summarise(store)
    assert report["eval"]["gain"]["lenient"]["mean"] == 0.0
    assert any("learnt the form of an answer" in w for w in report["warnings"])
    assert "= lenient +0.000 (skill) +0.905 (form of the answer)" in as_text(report)


# --------------------------------------------------------------------------- the run


def test_a_whole_run_reads_back(tmp_path):
    run = whole_run(tmp_path / "run", steps=4)
    with Store.open(run, readonly=True) as store:
        report = summarise(store)
    train = report["train"]
    assert train["step"] == [1, 2, 3, 4]
    for curve in ("reward", "strict", "lenient", "entropy_nats", "kl_k3_nats", "grad_norm"):
        assert all(isinstance(v, float) for v in train[curve]), curve
    assert report["timing"]["stages_s"] == {"generate": 16.0, "train": 12.0, "commit": 2.0}
    assert report["timing"]["step_s_median"] == 7.5
    assert report["groups"]["trained"] == 8
    assert report["groups"]["reasons"] == {"all rewards are equal": report["groups"]["dropped"]}
    assert report["tokens"]["sampled"] > report["tokens"]["trained"] > 0
    assert report["tokens"]["sampled_per_s"] == pytest.approx(report["tokens"]["sampled"] / 16)
    assert report["provenance"]["model"]["license"] == "apache-2.0"
    text = as_text(report)
    assert "strict rate" in text and "mean of 2" in text and "treadle sample" in text
    free = [line for line in text.splitlines() if "warning" not in line and str(run) not in line]
    assert max(map(len, free)) <= 110


def test_a_killed_run_is_interrupted_and_a_resumed_one_says_so(tmp_path):
    run = tmp_path / "run"
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[2])\n"
        "from tests.evals.eval_runs import *\n"
        "store = Store.create(sys.argv[1], config(), provenance=PROVENANCE)\n"
        "train(store, 1); os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(run), str(ROOT)], check=False)
    with Store.open(run, readonly=True) as store:
        killed = summarise(store)
    assert (killed["status"], killed["cause"]) == ("interrupted", "its process was killed")
    assert "--resume" in as_text(killed)
    with Store.open(run, readonly=False) as store:
        assert summarise(store)["status"] == "running"
        train(store, 2, first=2)
        store.finish("finished")
    with Store.open(run, readonly=True) as store:
        report = summarise(store)
    assert report["status"] == "finished"
    assert report["timing"]["resumes"] == 1
    assert report["train"]["step"] == [1, 2, 3]
    assert "resumed 1 times" in as_text(report)


def test_a_skipped_step_is_a_step_and_shown_as_skipped(tmp_path):
    """B153: equal rewards at step 3 of 5; the count of steps does not drift."""
    settings = config(steps=5)
    with Store.create(tmp_path / "run", settings, provenance=PROVENANCE) as store:
        train(store, 2)
        ordinal = store.frontier().next_ordinal
        of = task(FAMILIES[0], ordinal)
        store.start_group(ordinal, of)
        flat = tuple(trajectory(ordinal, s, of, 2, skill=1, form=1) for s in range(4))
        group = Group(ordinal=ordinal, task=of, version=2, trajectories=flat)
        train_step(store, 3, [group], skipped=True, reason="all advantages are 0")
        train(store, 2, first=4)
        report = summarise(store)
    assert report["steps"] == {"done": 5, "wanted": 5, "skipped": 1}
    assert report["train"]["skipped"] == [None, None, "all advantages are 0", None, None]
    assert any("1 of 5 steps were skipped" in w for w in report["warnings"])


def test_alarms_reach_the_reader(store):
    for step in range(1, 6):
        store.add_event("alarm", {"step": step, "message": "0 tool calls were read"})
    found = summarise(store)["warnings"]
    assert "step 1: 0 tool calls were read" in found
    assert "2 more alarms after these" in found


def test_no_text_of_a_model_moves_the_cursor_of_a_terminal(tmp_path):
    evil = "toy:\x1b[2J\x07gcd\u202egnp\r\nfake: line"
    run = tmp_path / "run"
    settings = config(tasks=(TasksConfig(source=evil),), name="\x1b]0;title\x07")
    with Store.create(run, settings, provenance=PROVENANCE) as store:
        add_eval(store, 0, {"a": both(0)}, taskset=evil)
        store.start_group(0, task(evil, 0))
        store.drop_group(0, "every trajectory failed: \x1b[31mred")
        train(store, 1)
        store.finish("failed", "boom \x1b[0m\nhint: \u2066x")
        text = as_text(summarise(store))
    assert all(c.isprintable() or c == "\n" for c in text)
    assert "\\x1b[31mred" in text


def test_a_sparkline_goes_from_low_to_high_and_leaves_gaps():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, None, 7]) == "▁ █"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert len(sparkline([float(i) for i in range(1000)])) == 40
    assert sparkline([]) == ""


def test_a_curve_of_few_steps_is_numbers_and_is_not_drawn(tmp_path):
    """Two or three points of noise look like a trend."""
    for steps in (MIN_POINTS - 1, MIN_POINTS):
        with Store.open(whole_run(tmp_path / f"{steps}", steps=steps), readonly=True) as store:
            report = summarise(store)
        rewards = report["train"]["reward"]
        lines = as_text(report).splitlines()
        (line,) = [line for line in lines if line.startswith("  reward ")]
        mean = sum(rewards) / steps
        assert f"first {rewards[0]:.3g}, last {rewards[-1]:.3g}, mean {mean:.3g}" in line
        assert any(block in line for block in BLOCKS) == (steps == MIN_POINTS)


def test_a_header_leaves_out_what_is_not_known(tmp_path):
    origins = {
        "reward": Provenance(source="score", license=""),
        "tasks.0": Provenance(source="made here", license="cc-by-4.0"),
    }
    with Store.create(tmp_path / "run", config(), provenance=origins) as store:
        lines = as_text(summarise(store)).splitlines()
    assert "  reward: score" in lines
    assert "  tasks.0: made here, cc-by-4.0" in lines


@pytest.mark.parametrize(
    ("began", "says"),
    [
        ("treadle train my.py", "treadle train my.py --run-dir {run} --resume"),
        ("td.train", "td.train(..., run_dir='{run}', resume=True)"),
        ("td.open_run", ""),
    ],
)
def test_how_to_go_on_is_how_it_began(tmp_path, began, says):
    facts = {"started_by": began}
    with Store.create(tmp_path / "run", config(), provenance=PROVENANCE, facts=facts) as store:
        store.finish("failed", "boom")
        report = summarise(store)
    assert report["go_on"] == says.format(run=tmp_path / "run")
    assert ("go on" in as_text(report)) == bool(says)


def test_reporting_needs_no_torch():
    code = "import sys, treadle.evals.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_number_that_json_cannot_say_is_null(store):
    store.start_group(0, task(FAMILIES[0], 0))
    group = Group(
        ordinal=0,
        task=task(FAMILIES[0], 0),
        version=0,
        trajectories=tuple(trajectory(0, s, task(FAMILIES[0], 0), 0) for s in range(4)),
    )
    store.publish_group(group)
    store.commit_step(
        1, version=1, ordinals=[0], samples=[], metrics={"grad/norm": math.nan, "reward/mean": 1}
    )
    report = summarise(store)
    assert report["train"]["grad_norm"] == [None]
    json.dumps(report, allow_nan=False)
