"""`treadle plan`: the promised keys, the table for people, and bad usage."""

import json
import re

import pytest

COMMAND = [
    *("--concurrency", "240", "--batch", "120", "--group", "8", "--queue", "1", "--train-s", "10"),
    *("--durations", "lognormal:mean=20,sigma=1"),
]
KEYS = {
    "mean_lag",
    "p95_lag",
    "token_lag",
    "step_period_s",
    "trainer_utilization",
    "sampler_utilization",
    "rho",
}


def without(*options: str) -> list[str]:
    left = list(COMMAND)
    for option in options:
        at = left.index(option)
        del left[at : at + 2]
    return left


def test_closed_form_and_simulator_print_the_same_keys_and_nearly_the_same_numbers(treadle) -> None:
    formula = treadle("plan", "staleness", *COMMAND, "--json").json
    simulated = treadle("plan", "simulate", *COMMAND, "--steps", "200", "--json").json
    assert set(formula) >= KEYS
    assert set(simulated) - set(formula) == {"simulated"}
    assert formula["rho"] == simulated["rho"] == pytest.approx(1.0)
    assert formula["mean_lag"] == pytest.approx(simulated["mean_lag"], abs=0.4)
    assert formula["step_period_s"] == pytest.approx(simulated["step_period_s"], rel=0.05)
    assert formula["inputs"]["policy"] == {"name": "queue-drop", "queue": 1.0}
    assert formula["inputs"]["durations"]["mean_s"] == pytest.approx(20)


def test_the_table_says_which_input_matters_most(treadle) -> None:
    done = treadle("plan", "staleness", *COMMAND)
    assert done.code == 0 and done.err == ""
    for key in KEYS:
        assert key in done.out
    first = json.loads(treadle("plan", "staleness", *COMMAND, "--json").out)["sensitivity"][0]
    assert f"matters most for lag: {first['input']}" in done.out
    rows = re.findall(r"^\S.*?│.*?│.*?│ ([+-]\d\.\d\d) ", done.out, flags=re.MULTILINE)
    effects = [abs(float(row)) for row in rows]
    assert len(effects) >= 5 and effects == sorted(effects, reverse=True)


def test_a_quota_has_a_bound_which_is_twice_eta_unless_it_is_given(treadle) -> None:
    quota = [*without("--queue"), "--policy", "quota", "--eta", "4"]
    document = treadle("plan", "staleness", *quota, "--json").json
    assert (document["mean_lag"], document["lag_bound"]) == (4.0, 8)
    assert document["dropped_frac"] == 0
    strict = treadle("plan", "staleness", *quota, "--max-lag", "4", "--json").json
    assert strict["lag_bound"] == 4 and strict["step_period_s"] > document["step_period_s"]
    free = treadle("plan", "staleness", *quota, "--max-lag", "none", "--json").json
    assert free["lag_bound"] is None and free["step_period_s"] < document["step_period_s"]
    text = treadle("plan", "staleness", *quota).out
    assert "8 (no trained group is older)" in text and "max_lag" in text
    assert "the quota makes steps" in text


def test_a_simulated_quota_keeps_its_bound_and_says_how_old_the_oldest_was(treadle) -> None:
    quota = [*without("--queue"), "--policy", "quota", "--eta", "2", "--steps", "60"]
    document = treadle("plan", "simulate", *quota, "--json").json
    assert document["simulated"]["max_lag"] <= document["lag_bound"] == 4


def test_too_much_generation_under_a_queue_is_a_note(treadle) -> None:
    done = treadle("plan", "staleness", *without("--train-s"), "--train-s", "20")
    assert "of what is generated is thrown away: about 114 rollouts" in done.out


def test_durations_come_from_a_file_too(treadle, workspace) -> None:
    (workspace / "d.json").write_text(json.dumps([[1.0] * 8, [3.0] * 8]))
    argv = [*without("--durations"), "--durations", "d.json"]
    document = treadle("plan", "staleness", *argv, "--json").json
    assert document["inputs"]["durations"] == {
        "text": "d.json",
        "mean_s": 2.0,
        "tailness": 1.0,
        "p95_s": 3.0,
    }


@pytest.mark.parametrize(
    ("argv", "says", "hint"),
    [
        (without("--train-s"), "needs --train-s", "--help shows an example"),
        (without("--durations", "--group"), "needs --group, --durations", "--run RUN"),
        ([*COMMAND, "--batch", "121"], "not whole groups of 8", "--batch 120"),
        ([*COMMAND, "--durations", "lognorml:mean=2"], "says no durations", "`lognormal`"),
        ([*COMMAND, "--durations", "exp:mean=0"], "`mean` must be > 0", "exp:mean=20"),
        ([*COMMAND, "--durations", "gone.json"], "gone.json cannot be read", "path"),
        ([*COMMAND, "--queue", "0.5"], "`queue` must be >= 1", "no whole step"),
        ([*COMMAND, "--eta", "3"], "--eta says nothing about --policy queue-drop", "quota"),
        ([*COMMAND, "--max-lag", "none"], "--max-lag says nothing", "quota"),
        ([*COMMAND, "--policy", "quota", "--eta", "3"], "--queue says nothing", "--eta"),
        ([*without("--queue"), "--policy", "quota"], "needs --eta", "--eta 4"),
        (
            [*without("--queue"), "--policy", "quota", "--eta", "3", "--max-lag", "2"],
            "`max_lag` must be >= eta = 3",
            "6 is usual",
        ),
        ([*COMMAND, "--filtered", "1"], "`filtered_frac` must be", "0.3"),
        ([*COMMAND, "--concurrency", "0"], "not a number >= 1", "--help"),
        ([*COMMAND, "--train-s", "nan"], "not a number >= 0", "--help"),
        ([*COMMAND, "--train-s", "0"], "`train_s` must be > 0", ""),
        ([*COMMAND, "--policy", "drop"], "invalid choice: 'drop'", "--help"),
        ([*COMMAND, "--run", "runs/gone"], "there is no run runs/gone", "runs list"),
    ],
)
def test_bad_usage_exits_2_and_says_what_to_type(treadle, workspace, argv, says, hint) -> None:
    done = treadle("plan", "staleness", *argv, "--json")
    assert done.code == 2
    assert says in done.json["error"]["message"]
    assert hint in done.json["error"]["hint"]


def test_an_earlier_run_says_what_is_not_given(treadle, workspace) -> None:
    assert treadle("train", "rec.py", "--set", "steps=3").code == 0
    done = treadle("plan", "staleness", "--run", "runs/tiny", "--policy", "quota", "--eta", "1")
    assert done.code == 0, done.err
    assert "2 groups x 4" in done.out and "runs/tiny" in done.out
    given = ["--run", "runs/tiny", "--durations", "fixed:3", "--batch", "16", "--json"]
    document = treadle("plan", "simulate", *given, "--steps", "20").json
    inputs = document["inputs"]
    assert (inputs["batch"], inputs["group_size"], inputs["concurrency"]) == (16, 4, 8)
    assert inputs["durations"]["mean_s"] == 3 and inputs["train_s"] > 0
