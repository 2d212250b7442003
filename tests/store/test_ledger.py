"""A prompt's life and the step that consumes it (contracts 6 and 11)."""

import math
import sqlite3
from dataclasses import replace

import pytest

from tests.store.run_builders import (
    PROVENANCE,
    make_failed,
    make_group,
    make_task,
    make_trajectory,
    rows_of,
    run_step,
    said,
    seen,
)
from treadle.config import RunConfig
from treadle.errors import ContractError, StoreError
from treadle.store import CheckpointRecord, Store
from treadle.types import Sample


def checkpoint(step: int) -> CheckpointRecord:
    return CheckpointRecord(step=step, path=f"checkpoints/step-{step:08d}", bytes=9, sha256="ab")


def test_a_new_run_stands_at_step_0_and_ordinal_0(store):
    frontier = store.frontier()
    assert (frontier.step, frontier.version, frontier.next_ordinal) == (0, 0, 0)
    assert frontier.checkpoint is None
    assert (frontier.num_started, frontier.started, frontier.returned) == (0, (), ())


def test_the_run_knows_what_it_is(store, run_dir):
    info = store.info()
    assert store.config() == RunConfig(steps=9)
    assert info.provenance == PROVENANCE
    assert info.status == "running"
    with pytest.raises(StoreError, match="holds a run already") as caught:
        store.close()
        Store.create(run_dir, RunConfig(), provenance={})
    assert "--resume" in caught.value.hint


def test_groups_come_back_equal_from_another_connection_while_the_run_is_open(store, run_dir):
    group = replace(
        make_group(0, 3), trajectories=(make_trajectory(0, 0, turns=3), make_failed(0, 1))
    )
    store.start_group(0, group.task)
    store.publish_group(group)
    with Store.open(run_dir, readonly=True) as reader:
        assert reader.group(0) == group
        assert list(reader.groups(state="published")) == [group]
        assert reader.trajectory("0/0") == group.trajectories[0]
        rows = reader.trajectories(ordinal=0)
        with pytest.raises(StoreError, match="opened for reading"):
            reader.start_group(1, make_task(1))
    assert [(r.id, r.num_turns, r.num_trained, r.reward) for r in rows] == [
        ("0/0", 3, 6, 0.0),
        ("0/1", 1, 2, None),
    ]
    assert rows[0].parts == {"score": 0.0, "lenient": 1.0}
    assert rows[0].stop_reason == "eos"
    assert rows[1].error is not None and rows[1].error.message == "no \ud800"
    assert (rows[0].version_min, rows[0].version_max, rows[0].state) == (0, 0, "published")


def test_a_committed_step_gives_back_the_very_samples(store):
    samples = [s for step in (1, 2, 3) for s in run_step(store, step, groups_per_step=2)]
    again = [s for step in (1, 2, 3) for s in store.samples_of_step(step)]
    assert again == samples
    frontier = store.frontier()
    assert (frontier.step, frontier.version, frontier.next_ordinal) == (3, 3, 6)
    assert frontier.num_trained == frontier.num_started == 6
    step = store.steps()[1]
    assert (step.step, step.version, step.ordinals, step.num_samples) == (2, 2, (2, 3), 4)
    assert step.metrics == {"loss": 0.5}


def test_a_group_that_its_step_left_out_is_consumed_with_the_reason_and_has_no_rows(store):
    groups = [make_group(0), make_group(1)]
    for group in groups:
        store.start_group(group.ordinal, make_task(group.ordinal))
        store.publish_group(group)
    why = {1: "its rewards spread least"}
    rows = rows_of(groups[0])
    for wrong, samples in (({7: "x"}, rows), ({0: "x"}, rows)):
        with pytest.raises(ContractError, match="leaves out groups that it does not consume, or"):
            store.commit_step(
                1, version=1, ordinals=[0, 1], samples=samples, metrics={}, left_out=wrong
            )
    store.commit_step(1, version=1, ordinals=[0, 1], samples=rows, metrics={}, left_out=why)
    assert [p.reason for p in store.prompts(state="trained")] == ["", "its rewards spread least"]
    assert store.samples_of_step(1) == rows
    assert store.frontier().num_trained == 2 and store.frontier().published == ()


def test_the_order_of_samples_is_the_trainers(store):
    store.start_group(0, make_task(0))
    group = make_group(0, 5)
    store.publish_group(group)
    samples = [rows_of(group)[i] for i in (3, 0, 4, 1, 2)]
    store.commit_step(1, version=1, ordinals=[0], samples=samples, metrics={})
    assert store.samples_of_step(1) == samples


def test_what_differs_from_token_to_token_is_kept_and_what_does_not_is_one_number(store):
    """Credit by turn, the trainer's own logprobs, marks and the task set come back bit for bit."""
    store.start_group(0, make_task(0))
    group = make_group(0)
    store.publish_group(group)
    plain, varied = rows_of(group)
    places = [i for i, t in enumerate(varied.trained) if t]
    assert len(places) > 1
    varied = replace(
        varied,
        advantages=tuple(0.1 * i if i in places else math.nan for i in range(len(varied.ids))),
        prox_logprobs=tuple(
            (math.nan if i == places[0] else -0.3 * i) if i in places else math.nan
            for i in range(len(varied.ids))
        ),
        taskset="add#2",
        overtaken=tuple(i == places[-1] for i in range(len(varied.ids))),
    )
    store.commit_step(1, version=1, ordinals=[0], samples=[plain, varied], metrics={})
    assert store.samples_of_step(1) == [plain, varied]
    db = sqlite3.connect(store.run_dir / "run.db")
    (one, none), (mean, data) = db.execute(
        "SELECT advantage, data FROM samples ORDER BY position"
    ).fetchall()
    db.close()
    assert none is None and data is not None
    assert one == plain.advantages[plain.trained.index(True)]
    assert mean == pytest.approx(sum(0.1 * i for i in places) / len(places))


def test_branches_that_share_a_trained_node_are_kept_by_reference(store):
    """A shared node is trained in one branch; only the mask of the other is stored."""
    nodes = (
        seen(0, None, (1, 2)),
        said(1, 0, (5, 6)),
        seen(2, 1, (7,), "left"),
        said(3, 2, (8,)),
        seen(4, 1, (9,), "right"),
        said(5, 4, (10, 11)),
    )
    whole = replace(make_trajectory(0, 0), nodes=nodes)
    store.start_group(0, make_task(0))
    store.publish_group(replace(make_group(0), trajectories=(whole,)))
    p, n = [p for node in nodes for p in node.logprobs], math.nan
    left = Sample(
        trajectory_id="0/0",
        ordinal=0,
        ids=(1, 2, 5, 6, 7, 8),
        trained=(False, False, True, True, False, True),
        logprobs=(n, n, p[2], p[3], n, p[5]),
        versions=(-1, -1, 0, 0, -1, 0),
        advantages=(n, n, 0.25, 0.25, n, 0.25),
        temperature=0.7,
    )
    right = replace(
        left,
        ids=(1, 2, 5, 6, 9, 10, 11),
        trained=(False, False, False, False, False, True, True),
        logprobs=(n, n, n, n, n, p[7], p[8]),
        advantages=(n, n, n, n, n, 0.25, 0.25),
        versions=(-1, -1, -1, -1, -1, 0, 0),
    )
    cut = replace(
        left,
        ids=(1, 2, 5),
        trained=left.trained[:3],
        logprobs=left.logprobs[:3],
        versions=(-1, -1, 0),
        advantages=left.advantages[:3],
    )
    store.commit_step(1, version=1, ordinals=[0], samples=[left, right, cut], metrics={})
    assert store.samples_of_step(1) == [left, right, cut]
    with sqlite3.connect(store.run_dir / "run.db") as db:
        kept = db.execute("SELECT leaf, length(data) FROM samples ORDER BY position").fetchall()
    db.close()
    assert [leaf for leaf, _ in kept] == [3, 5, None]
    assert kept[0][1] is None and kept[1][1] < kept[2][1]


def test_a_skipped_step_counts_and_says_why(store):
    """B153: all-equal rewards at step 3 of 5 leave every counter at 5."""
    for step in range(1, 6):
        if step == 3:
            for ordinal in (2, 3):
                store.start_group(ordinal, make_task(ordinal))
                store.publish_group(make_group(ordinal))
            store.drop_group(3, "zero variance")
            store.commit_step(
                3,
                version=2,
                ordinals=[2],
                samples=[],
                metrics={"groups/submitted": 2, "groups/trainable": 0},
                skipped=True,
                reason="all rewards are equal",
            )
        else:
            run_step(store, step)
    assert store.frontier().step == 5
    steps = store.steps()
    assert [(s.step, s.skipped) for s in steps] == [(i, i == 3) for i in range(1, 6)]
    assert steps[2].reason == "all rewards are equal"
    assert steps[2].metrics == {"groups/submitted": 2.0, "groups/trainable": 0.0}
    assert store.samples_of_step(3) == []


def test_a_dropped_group_keeps_its_trajectories_and_its_reason(store):
    for ordinal in range(3):
        store.start_group(ordinal, make_task(ordinal))
    store.publish_group(make_group(0))
    store.drop_group(0, "zero variance")
    failed = replace(make_group(1), trajectories=(make_failed(1, 0),))
    store.drop_group(1, "unscored", failed)
    store.drop_group(2, "task source said no \udcff")
    assert [p.reason[:8] for p in store.prompts(state="dropped")] == [
        "zero var",
        "unscored",
        "task sou",
    ]
    assert store.group(1) == failed
    assert store.trajectory("0/1") == make_trajectory(0, 1)
    frontier = store.frontier()
    assert (frontier.num_dropped, frontier.num_started, frontier.next_ordinal) == (3, 3, 3)


def test_published_groups_wait_oldest_version_first(store):
    for ordinal, version in ((0, 2), (1, 1), (2, 1)):
        store.start_group(ordinal, make_task(ordinal))
        store.publish_group(make_group(ordinal, version=version))
    assert store.frontier().published == (1, 2, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.start_group(5, make_task(5)), "the next is 2: 3 prompts would be skipped"),
        (lambda s: s.start_group(0, make_task(0)), "it is trained"),
        (lambda s: s.start_group(1, make_task(1)), "it is published"),
        (lambda s: s.publish_group(make_group(7)), "never started"),
        (lambda s: s.publish_group(make_group(0)), "trained by step 1 already"),
        (lambda s: s.drop_group(0, "late"), "trained by step 1 already"),
        (lambda s: commit(s, 1), "step 1 was committed after step 1"),
        (lambda s: commit(s, 3), "step 3 was committed after step 1"),
        (lambda s: commit(s, 2, version=0), "publishes version 0, but 1"),
        (lambda s: commit(s, 2, ordinals=[0]), "trained by step 1 already"),
        (lambda s: commit(s, 2, ordinals=[1, 1]), "consumes a group twice"),
        (lambda s: commit(s, 2, ordinals=[]), "which it does not consume"),
        (lambda s: commit(s, 2, advantage=math.nan), "advantage of trajectory 1/0 is nan"),
        (lambda s: commit(s, 2, columns={"advantages": ()}), "tokens and 0 advantages"),
        (lambda s: commit(s, 2, id="1/9"), "no stored trajectory 1/9"),
        (lambda s: commit(s, 2, id="0/0"), "no stored trajectory 0/0"),
        (lambda s: commit(s, 2, metrics={"loss": "low"}), "loss of train is not a number"),
        (lambda s: commit(s, 2, checkpoint=checkpoint(3)), "the last step is 2"),
        (lambda s: s.add_checkpoint(checkpoint(2)), "the last step is 1"),
    ],
)
def test_a_call_out_of_order_changes_nothing(store, call, message):
    """No prompt is skipped, and none is trained twice (B074)."""
    run_step(store, 1)
    store.start_group(1, make_task(1))
    store.publish_group(make_group(1))
    before = dump(store)
    with pytest.raises(ContractError, match=message):
        call(store)
    assert dump(store) == before


def commit(store, step, *, version=2, ordinals=(1,), advantage=0.5, id="1/0", columns=(), **more):
    sample = rows_of(make_group(1))[0]
    values = tuple(advantage if t else math.nan for t in sample.trained)
    sample = replace(sample, trajectory_id=id, **({"advantages": values} | dict(columns)))
    more = {"metrics": {}} | more
    store.commit_step(step, version=version, ordinals=ordinals, samples=[sample], **more)


def dump(store) -> list[str]:
    db = sqlite3.connect(store.run_dir / "run.db")
    try:
        return list(db.iterdump())
    finally:
        db.close()


def test_a_group_of_another_task_or_a_reused_trajectory_id_is_refused(store):
    store.start_group(0, make_task(0))
    with pytest.raises(ContractError, match="is of task 'add-1', but 'add-0' was started"):
        store.publish_group(replace(make_group(0), task=make_task(1)))
    twice = (make_trajectory(0, 0), make_trajectory(0, 0))
    with pytest.raises(ContractError, match=r"UNIQUE constraint failed: trajectories\.id"):
        store.publish_group(replace(make_group(0), trajectories=twice))
    assert store.frontier().started == (0,)


def test_checkpoints_of_the_ledger_say_where_to_resume(store):
    store.add_checkpoint(checkpoint(0))
    run_step(store, 1)
    run_step(store, 2, checkpoint=checkpoint(2))
    run_step(store, 3)
    frontier = store.frontier()
    assert frontier.checkpoint == checkpoint(2)
    assert [s.checkpoint for s in store.steps()] == [0, 2, 2]
    assert frontier.checkpoint.at(store.run_dir).name == "step-00000002"


def test_prompts_in_flight_at_a_crash_return_to_the_front_and_the_rest_is_kept(run_dir):
    """B074, B077: nothing generated is lost, nothing is drawn twice."""
    store = Store.create(run_dir, RunConfig(), provenance={})
    run_step(store, 1)
    for ordinal in (1, 2, 3, 4):
        store.start_group(ordinal, make_task(ordinal))
    store.publish_group(make_group(3))
    store.drop_group(4, "zero variance")
    store._db.close()  # as a crash leaves it: no session end
    store._held.release()

    with Store.open(run_dir, readonly=False) as resumed:
        frontier = resumed.frontier()
        assert (frontier.step, frontier.next_ordinal) == (1, 5)
        assert (frontier.started, frontier.returned) == ((), (1, 2))
        assert frontier.published == (3,)
        assert frontier.num_started == 3  # the returned ones gave their places back
        (event,) = resumed.events(kind="resume")
        assert event.data == {"killed": True, "returned": [1, 2]}
        assert [s.status for s in resumed.info().sessions] == ["interrupted", "running"]
        with pytest.raises(ContractError, match=r"was task 'add-1' before .* 'add-9' now"):
            resumed.start_group(1, make_task(9))
        resumed.start_group(1, make_task(1))
    # A second crash before 2 was started again must not forget it.
    with Store.open(run_dir, readonly=False) as again:
        assert again.frontier().returned == (1, 2)
        assert [p.attempts for p in again.prompts(state="returned")] == [2, 1]
        assert not again.events(kind="resume")[-1].data["killed"]
        again.finish("finished")
    with Store.open(run_dir, readonly=True) as reader:
        assert reader.info().status == "finished"
