"""Every number that a run stores is defined, and the docs say what the code says (B152)."""

import json
from pathlib import Path

import pytest

from tests.evals.length_reward import by_length
from treadle.api import run_config
from treadle.config import (
    EntropyConfig,
    EvalConfig,
    KLConfig,
    LearnConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    TasksConfig,
)
from treadle.evals.definitions import STAGES, define, definitions
from treadle.evals.page import render
from treadle.evals.report import CURVES, summarise
from treadle.rollout.metrics import METRICS as ROLLOUT
from treadle.store import Store
from treadle.train.metrics import METRICS as TRAIN

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Two steps of the real path on the tiny random model."""
    folder = tmp_path_factory.mktemp("small")
    tasks = folder / "tasks.jsonl"
    tasks.write_text(
        "".join(
            json.dumps({"prompt": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(60)
        )
    )
    config = RunConfig(
        name="small",
        steps=2,
        model=ModelConfig(name="tiny-random", dtype="float32", max_context=128),
        tasks=(TasksConfig(source=f"jsonl:{tasks}"),),
        rollout=RolloutConfig(group_size=4, groups_per_step=2, max_new_tokens=6),
        learn=LearnConfig(entropy=EntropyConfig(), kl=KLConfig()),
        eval=EvalConfig(questions=3, samples=2),
    )
    run_config(config, folder / "run", reward=by_length)
    return folder / "run"


def test_every_metric_of_a_run_has_a_definition_a_unit_and_a_good_direction(run_dir):
    known = definitions()
    with Store.open(run_dir, readonly=True) as store:
        names = {metric.name for metric in store.metrics()}
        stages = set(store.seconds_by_stage())
    assert len(names) > 40
    assert {"entropy/control", "kl/reference_k3_nats"} <= names
    assert [name for name in names if define(name, known) is None] == []
    assert stages <= set(STAGES)
    assert all(d.text and d.unit and d.good for d in known.values())


def test_the_docs_have_a_row_for_every_metric_and_for_nothing_else():
    rows = {}
    for line in DOCS.read_text().splitlines():
        if line.startswith("| `") and "/" in line.split("`")[1]:
            name, unit, good, text = (c.strip() for c in line.strip("|").split(" | "))
            rows[name.strip("`")] = (unit, good, text.replace("\\|", "|"))
    known = definitions()
    assert set(ROLLOUT) | set(TRAIN) <= set(known)
    assert rows == {name: (d.unit, d.good, d.text) for name, d in known.items()}
    assert all(f"| `{stage}` | {text} |" in DOCS.read_text() for stage, text in STAGES.items())


def test_every_curve_of_the_report_is_a_metric_that_a_real_run_stores(run_dir):
    with Store.open(run_dir, readonly=True) as store:
        report = summarise(store)
        page = render(store)
    train = report["train"]
    empty = {c for c in CURVES if not any(v is not None for v in train[c])}
    # A reward function of Python code knows nothing of the task set's own scores.
    # Nothing was demonstrated and nobody taught.
    assert empty == {"strict", "lenient", "ce_nats", "teacher_kl_nats"}
    assert "part/length" in train
    assert report["eval"]["gain"]["n"] == 3
    assert report["status"] == "finished"
    assert "not defined in docs" not in page


def test_an_evaluation_that_arrives_late_stays_on_its_own_axis(tmp_path):
    """B152: the evaluation of step 5 is stored after the metrics of train step 6."""
    with Store.create(tmp_path / "run", RunConfig(), provenance={}) as store:
        store.add_metrics("train", 6, {"reward/mean": 0.6})
        store.add_metrics("eval", 5, {"reward/mean": 0.5})
        found = {(m.axis, m.step): m.value for m in store.metrics()}
    assert found == {("train", 6): 0.6, ("eval", 5): 0.5}
