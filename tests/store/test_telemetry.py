"""Metrics on their own axes, spans, events, evaluations."""

import math
from dataclasses import replace

import pytest

from tests.store.run_builders import make_failed, make_trajectory
from treadle.errors import ContractError, ErrorRecord, StoreError
from treadle.store import EvalResult, Span, Store


def test_late_values_are_kept_on_their_own_axis(store):
    """B152: eval of step 5 logged after train step 6."""
    store.add_metrics("train", 5, {"reward": 0.1})
    store.add_metrics("train", 6, {"reward": 0.2})
    store.add_metrics("eval", 5, {"reward": 0.9})
    store.add_metrics("train", 4, {"reward": 0.0})
    got = [(m.axis, m.step, m.value) for m in store.metrics(name="reward")]
    assert got == [("eval", 5, 0.9), ("train", 4, 0.0), ("train", 5, 0.1), ("train", 6, 0.2)]


def test_a_value_that_is_stored_again_replaces_the_old_one(store):
    store.add_metrics("train", 1, {"loss": 1.0, "lr": 0.5})
    store.add_metrics("train", 1, {"loss": 2})
    assert [(m.name, m.value) for m in store.metrics(axis="train")] == [("loss", 2.0), ("lr", 0.5)]


def test_values_that_are_not_finite_come_back_as_they_were(store):
    store.add_metrics("train", 1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    a, b, c = (m.value for m in store.metrics())
    assert math.isnan(a) and (b, c) == (math.inf, -math.inf)


def test_a_metric_that_is_not_a_number_is_named(store):
    with pytest.raises(ContractError, match="metric loss of train is not a number: None"):
        store.add_metrics("train", 1, {"loss": None})


def test_time_is_split_by_stage(store):
    store.add_spans([Span(step=1, stage="generate", started_at=10.0, duration_s=2.0)])
    store.add_spans(
        [
            Span(step=1, stage="train", started_at=12.0, duration_s=1.0),
            Span(step=2, stage="generate", started_at=9.0, duration_s=3.0),
        ]
    )
    assert store.seconds_by_stage() == {"generate": 5.0, "train": 1.0}
    assert [s.stage for s in store.spans(step=1)] == ["generate", "train"]
    assert store.spans()[0].step == 2


def test_events_keep_their_order_and_their_data(store):
    store.add_event("alarm", {"what": "entropy", "value": math.nan})
    store.add_event("error")
    assert [e.kind for e in store.events()] == ["alarm", "error"]
    assert math.isnan(store.events(kind="alarm")[0].data["value"])


SETTINGS = {
    "step": 0,
    "version": 0,
    "taskset": "sums",
    "split": "val",
    "temperature": 0.7,
    "data_hash": "d1",
    "settings": {"max_new_tokens": 8, "top_p": 1.0, "seed": 3},
}


def answer(question: int, sample: int) -> EvalResult:
    trajectory = make_trajectory(question, sample)
    return EvalResult(
        task_id=f"add-{question}",
        sample=sample,
        score=float(question > 0),
        parts={"score": float(question > 0), "lenient": 1.0},
        answer="4 \udcff",
        num_sampled=2,
        trajectory=trajectory,
    )


def test_a_killed_eval_goes_on_with_what_is_missing(store, run_dir):
    """B148: half the answers, a kill, the rest, then more samples per question."""
    id = store.begin_eval(**SETTINGS)
    wanted = [(q, s) for q in range(4) for s in range(2)]
    for q, s in wanted[:4]:
        store.add_eval_result(id, answer(q, s))
    store.close()
    with Store.open(run_dir, readonly=False) as again:
        assert again.begin_eval(**SETTINGS) == id
        done = again.eval_done(id)
        missing = [(q, s) for q, s in wanted if (f"add-{q}", s) not in done]
        assert missing == wanted[4:]
        for q, s in missing:
            again.add_eval_result(id, answer(q, s))
        again.finish_eval(id)
        (row,) = again.evals(finished=True)
        assert (row.n, row.k, row.error_share, row.finished) == (4, 2, 0.0, True)
        assert sum(r.score for r in row.results) == 6.0
        for q in range(4):
            again.add_eval_result(id, answer(q, 2))
        assert again.evals()[0].k == 3
        assert again.eval_trajectory(id, "add-1", 2) == make_trajectory(1, 2)


def test_every_eval_carries_its_settings_and_its_error_share(store):
    """B155: temperature, k, n, version, data hash, error share."""
    id = store.begin_eval(**SETTINGS)
    hot = store.begin_eval(**SETTINGS | {"temperature": 1.0})
    other = store.begin_eval(**SETTINGS | {"data_hash": "d2"})
    later = store.begin_eval(**SETTINGS | {"step": 3, "version": 3})
    assert len({id, hot, other, later}) == 4
    failed = EvalResult(
        task_id="add-1",
        sample=0,
        score=None,
        error=ErrorRecord(kind="RewardError", where="reward", message="judge is down"),
    )
    store.add_eval_result(id, failed)
    store.add_eval_result(id, answer(0, 0))
    row = store.evals(step=0)[0]
    assert (row.temperature, row.version, row.data_hash) == (0.7, 0, "d1")
    assert row.settings == SETTINGS["settings"]
    assert (row.n, row.k, row.error_share) == (2, 1, 0.5)
    assert row.results[1] == failed
    assert row.results[0] == replace(answer(0, 0), trajectory=None)
    store.add_eval_result(id, replace(failed, score=1.0, error=None))
    assert store.evals(step=0)[0].error_share == 0.0
    with pytest.raises(StoreError, match="no stored trajectory of answer 0 to 'add-1'"):
        store.eval_trajectory(id, "add-1", 0)


def test_an_answer_to_an_eval_that_was_never_begun_is_refused(store):
    with pytest.raises(ContractError, match="FOREIGN KEY"):
        store.add_eval_result(7, answer(0, 0))


def test_an_eval_keeps_what_failed_too(store):
    id = store.begin_eval(**SETTINGS)
    failed = make_failed(0, 0)
    result = EvalResult(
        task_id="add-0", sample=0, score=None, error=failed.error, trajectory=failed
    )
    store.add_eval_result(id, result)
    assert store.eval_trajectory(id, "add-0", 0) == failed
