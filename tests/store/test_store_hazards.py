"""One writer, many readers, and files that are not what they should be."""

import os
import random
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.run_builders import make_group, make_task, rows_of, run_step
from treadle.config import RunConfig
from treadle.errors import ContractError, StoreError
from treadle.store import Store
from treadle.store.lock import writer

ROOT = Path(__file__).parents[2]


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


OPEN = """
import sys
from treadle.errors import StoreError
from treadle.store import Store
for readonly in (True, False):
    try:
        Store.open(sys.argv[1], readonly=readonly)
        print("open")
    except StoreError as error:
        print(error)
"""


def test_a_second_controller_is_refused_and_told_who_writes(store, run_dir):
    out = python(OPEN, run_dir).stdout
    assert out.startswith("open\n")
    assert f"is being written by process {os.getpid()} on {os.uname().nodename}" in out
    assert "hint: wait for it or stop it" in out
    with pytest.raises(StoreError, match="is being written by process"):
        Store.open(run_dir, readonly=False)
    holder = writer(run_dir)
    assert holder is not None and holder.pid == os.getpid()
    store.close()
    assert writer(run_dir) is None
    assert python(OPEN, run_dir).stdout == "open\nopen\n"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_outlives_the_controller_does_not_keep_the_run_locked(store, run_dir):
    """Graders are forked; the lock must end with the controller, not with them."""
    waits, ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.read(waits, 1)
        os._exit(0)
    try:
        store.close()
        Store.open(run_dir, readonly=False).close()
    finally:
        os.close(waits)
        os.close(ends)
        os.waitpid(child, 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_cannot_write_through_its_parents_store(store):
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"nothing"
        try:
            store.add_event("from the child")
        except StoreError as error:
            said = str(error).encode()
        store.close()
        os.write(writes, said)
        os._exit(0)
    os.waitpid(child, 0)
    assert b"was opened by process" in os.read(reads, 4096)
    os.close(reads)
    os.close(writes)
    store.add_event("from the parent")
    assert [e.kind for e in store.events()] == ["from the parent"]


def test_a_reader_sees_one_moment_while_the_run_goes_on(store, run_dir):
    run_step(store, 1)
    with Store.open(run_dir, readonly=True) as reader:
        groups = reader.groups()
        first = next(groups)
        run_step(store, 2)
        assert first == make_group(0)
        assert reader.frontier().step == 2


def test_a_directory_without_a_run_is_named_and_left_alone(tmp_path):
    for readonly in (True, False):
        with pytest.raises(StoreError, match=r"there is no run in .* \(run.db is missing\)"):
            Store.open(tmp_path / "nothing", readonly=readonly)
        with pytest.raises(StoreError, match="there is no run in"):
            Store.open(tmp_path, readonly=readonly)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("readonly", [True, False])
@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        (
            "PRAGMA user_version = 99",
            "store schema 99; this Treadle reads schema 2",
            "newer Treadle",
        ),
        (
            "PRAGMA user_version = 1",
            "store schema 1; this Treadle reads schema 2",
            "the Treadle that wrote it",
        ),
        ("PRAGMA application_id = 7", "database of another program", "made by `treadle train`"),
    ],
)
def test_another_schema_or_another_programs_file_is_refused(
    store, run_dir, change, message, hint, readonly
):
    store.close()
    db = sqlite3.connect(run_dir / "run.db")
    db.execute(change)
    db.close()
    before = (run_dir / "run.db").read_bytes()
    with pytest.raises(StoreError, match=message) as caught:
        Store.open(run_dir, readonly=readonly)
    assert hint in caught.value.hint
    assert (run_dir / "run.db").read_bytes() == before


def test_text_in_place_of_a_database_is_refused(tmp_path):
    (tmp_path / "run.db").write_text("hello, " * 1000)
    with pytest.raises(StoreError, match="is damaged"):
        Store.open(tmp_path, readonly=True)


def test_a_damaged_file_is_noticed_before_a_run_goes_on(store, run_dir):
    for step in range(1, 6):
        run_step(store, step, groups_per_step=4)
    store.close()
    path = run_dir / "run.db"
    whole = path.read_bytes()
    rng, noticed = random.Random(0), 0
    for _ in range(8):
        page = rng.randrange(2, len(whole) // 4096) * 4096
        path.write_bytes(whole[:page] + rng.randbytes(4096) + whole[page + 4096 :])
        try:
            with Store.open(run_dir, readonly=False) as damaged:
                for step in range(1, 6):
                    damaged.samples_of_step(step)
        except StoreError as error:
            noticed += "damaged" in str(error)
    assert noticed >= 7  # a page may be free


def test_a_full_disk_stops_the_run_and_leaves_what_was_committed(store, run_dir):
    run_step(store, 1)
    store._db._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (pages,) = store._db._db.execute("PRAGMA page_count").fetchone()
    # SQLite's own limit fails as a full disk does, at the same places.
    store._db._db.execute(f"PRAGMA max_page_count = {pages + 4}")
    with pytest.raises(StoreError, match=r"the disk of .*run.db is full") as caught:
        for step in range(2, 100):
            run_step(store, step, groups_per_step=4)
    assert "treadle runs gc" in caught.value.hint
    done = store.frontier().step
    store._db._db.execute("PRAGMA max_page_count = 1000000")
    store.close()
    with Store.open(run_dir, readonly=False) as again:
        assert again.frontier().step == done >= 1
        for ordinal in again.frontier().returned:
            again.start_group(ordinal, make_task(ordinal))
            again.publish_group(make_group(ordinal))
        ordinals = again.frontier().published
        again.commit_step(
            done + 1,
            version=done + 1,
            ordinals=ordinals,
            samples=[s for o in ordinals for s in rows_of(again.group(o))],
            metrics={},
        )


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot make the run directory") as caught:
        Store.create(tmp_path / "file" / "run", RunConfig(), provenance={})
    assert "--run-dir" in caught.value.hint


def test_the_environment_is_not_stored(run_dir, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_a_secret_value")
    with Store.create(run_dir, RunConfig(), provenance={}, facts={"cores": 2}) as store:
        run_step(store, 1)
        store.finish("failed", "the last lines \udcff")
    for file in run_dir.rglob("*"):
        if file.is_file():
            assert b"hf_a_secret_value" not in file.read_bytes()
    with Store.open(run_dir, readonly=True) as reader:
        assert reader.info().sessions[0].cause.startswith("the last lines")
        assert reader.info().facts == {"cores": 2}


def test_a_finished_run_is_one_plain_file_and_can_be_read_where_nobody_may_write(store, run_dir):
    run_step(store, 1)
    store.close()
    assert sorted(p.name for p in run_dir.iterdir()) == ["checkpoints", "run.db", "run.lock"]
    run_dir.chmod(0o555)
    try:
        with Store.open(run_dir, readonly=True) as reader:
            assert reader.frontier().step == 1
    finally:
        run_dir.chmod(0o755)


def test_unknown_ids_are_named(store):
    with pytest.raises(StoreError, match="no trajectory '3/1'"):
        store.trajectory("3/1")
    with pytest.raises(StoreError, match="prompt 3 was never started"):
        store.group(3)
    with pytest.raises(StoreError, match="step 4 was not committed"):
        store.samples_of_step(4)
    store.start_group(0, make_task(0))
    with pytest.raises(StoreError, match="it has no group"):
        store.group(0)


def test_a_closed_store_says_so(store):
    store.close()
    store.close()
    with pytest.raises(StoreError, match="is closed"):
        store.frontier()


def test_a_session_ends_in_one_of_three_ways(store):
    with pytest.raises(ValueError, match="'completed'"):
        store.finish("completed")


def test_a_task_that_is_not_data_is_refused_before_it_is_sampled(store):
    with pytest.raises(StoreError, match="oracle is a builtins"):
        store.start_group(0, replace(make_task(0), data={"oracle": object()}))
    with pytest.raises(ContractError):
        store.publish_group(make_group(0))


def test_the_store_needs_no_torch():
    code = "import sys, treadle.store; print('torch' in sys.modules)"
    assert python(code).stdout == "False\n"
