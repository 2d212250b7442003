"""What runs cost and what may go."""

import os
import shutil

import pytest

from tests.store.run_builders import run_step
from treadle.config import RunConfig
from treadle.store import CheckpointRecord, Store, gc, list_runs, sizes
from treadle.store.layout import MANIFEST, checkpoint_dir
from treadle.store.lock import shared

DAY = 86400.0


def make_run(root, name: str, *, days_old: float = 0.0, checkpoints=(), status="finished"):
    run_dir = root / name
    with Store.create(run_dir, RunConfig(name=name, steps=4), provenance={}) as store:
        for step in range(1, 4):
            run_step(store, step)
        for step in checkpoints:
            path = checkpoint_dir(run_dir, step)
            path.mkdir()
            (path / "policy.safetensors").write_bytes(b"x" * 1000)
            (path / MANIFEST).write_text("{}")
            store.add_checkpoint(
                CheckpointRecord(
                    step=step, path=str(path.relative_to(run_dir)), bytes=1002, sha256="ab"
                )
            )
        store.finish(status)
    then = os.stat(run_dir / "run.db").st_mtime - days_old * DAY
    os.utime(run_dir / "run.db", (then, then))
    return run_dir


def tree(root) -> set[str]:
    return {str(p.relative_to(root)) for p in root.rglob("*") if p.name != "run.lock"}


def test_sizes_add_up(tmp_path):
    run_dir = make_run(tmp_path, "a", checkpoints=(1, 2))
    (run_dir / "report.html").write_bytes(b"y" * 10)
    size = sizes(run_dir)
    assert size.checkpoints == 2004
    assert size.database == (run_dir / "run.db").stat().st_size
    assert size.total == sum(p.stat().st_size for p in run_dir.rglob("*") if p.is_file())


def test_runs_are_listed_newest_first_with_what_they_did(tmp_path):
    make_run(tmp_path, "old", days_old=3)
    make_run(tmp_path, "new", status="failed")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "run.db").write_text("not a database, but long enough" * 100)
    os.utime(broken / "run.db", (0, 0))
    (tmp_path / "notes").mkdir()
    live = Store.create(tmp_path / "live", RunConfig(name="live"), provenance={})
    runs = {run.name: run for run in list_runs(tmp_path)}
    assert list(runs)[-2:] == ["old", "broken"]
    assert {n: r.status for n, r in runs.items()} == {
        "live": "running",
        "new": "failed",
        "old": "finished",
        "broken": "unreadable",
    }
    assert runs["live"].writer.pid == os.getpid()
    assert (runs["new"].steps_done, runs["new"].steps_asked) == (3, 4)
    assert "damaged" in runs["broken"].problem
    # Killed, as far as the ledger can say.
    live._db.close()
    live._held.release()
    assert {r.name: r.status for r in list_runs(tmp_path)}["live"] == "interrupted"
    assert list_runs(tmp_path / "missing") == ()


def test_gc_lists_what_it_would_free_and_then_frees_exactly_that(tmp_path):
    make_run(tmp_path, "a", days_old=40, checkpoints=(1,))
    make_run(tmp_path, "b", days_old=20, checkpoints=(1, 2, 3))
    make_run(tmp_path, "c", days_old=1, checkpoints=(2,))
    (tmp_path / "b" / "checkpoints" / ".tmp-step-00000004-9").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "tasks.jsonl").write_text("{}")
    before = tree(tmp_path)
    planned = gc(tmp_path, keep=1, older_than_s=30 * DAY, dry_run=True)
    assert tree(tmp_path) == before
    assert [(r.kind, r.path.name) for r in planned] == [
        ("leftover", ".tmp-step-00000004-9"),
        ("checkpoint", "step-00000001"),
        ("checkpoint", "step-00000002"),
        ("run", "a"),
    ]
    assert [r.bytes for r in planned[:3]] == [0, 1002, 1002]
    assert "40.0 days ago" in planned[3].reason
    done = gc(tmp_path, keep=1, older_than_s=30 * DAY, dry_run=False)
    # The lock that gc takes has another text than the one it finds.
    assert [(r.path, r.kind, r.reason) for r in done] == [
        (r.path, r.kind, r.reason) for r in planned
    ]
    assert {p.name for p in tmp_path.iterdir()} == {"b", "c", "data"}
    assert [p.name for p in (tmp_path / "b" / "checkpoints").iterdir()] == ["step-00000003"]
    assert gc(tmp_path, keep=1, older_than_s=30 * DAY, dry_run=True) == ()
    with Store.open(tmp_path / "b", readonly=False) as store:
        assert store.frontier().checkpoint.step == 3


def test_the_newest_runs_stay_however_old(tmp_path):
    for name, days in (("a", 400), ("b", 300), ("c", 200)):
        make_run(tmp_path, name, days_old=days)
    gone = gc(tmp_path, keep=2, older_than_s=0.0, dry_run=False)
    assert [r.path.name for r in gone] == ["a"]


def test_a_run_that_is_written_or_cannot_be_read_is_not_touched(tmp_path):
    run_dir = make_run(tmp_path, "live", days_old=99, checkpoints=(1, 2))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.db").write_text("x" * 5000)
    with Store.open(run_dir, readonly=False):
        before = tree(tmp_path)
        assert gc(tmp_path, keep=0, older_than_s=0.0, dry_run=False) == ()
        assert tree(tmp_path) == before
    gone = gc(tmp_path, keep=0, older_than_s=-1.0, dry_run=False)
    assert [r.path.name for r in gone] == ["live"]


def test_the_newest_complete_checkpoint_stays_when_a_newer_one_lost_its_mark(tmp_path):
    run_dir = make_run(tmp_path, "a", checkpoints=(1, 2, 3))
    (checkpoint_dir(run_dir, 3) / MANIFEST).unlink()
    gc(tmp_path, keep=9, older_than_s=0.0, dry_run=False)
    assert [p.name for p in sorted((run_dir / "checkpoints").iterdir())] == ["step-00000002"]


def test_without_a_complete_checkpoint_nothing_but_leftovers_goes(tmp_path):
    run_dir = make_run(tmp_path, "a", checkpoints=(1, 2))
    for step in (1, 2):
        (checkpoint_dir(run_dir, step) / MANIFEST).unlink()
    assert gc(tmp_path, keep=9, older_than_s=0.0, dry_run=False) == ()
    assert len(list((run_dir / "checkpoints").iterdir())) == 2


def test_a_checkpoint_that_someone_reads_stays(tmp_path):
    """B064"""
    run_dir = make_run(tmp_path, "a", checkpoints=(1, 2))
    with shared(checkpoint_dir(run_dir, 1) / MANIFEST):
        (kept,) = gc(tmp_path, keep=9, older_than_s=0.0, dry_run=False)
        assert kept.problem == "another process is reading it"
        assert checkpoint_dir(run_dir, 1).is_dir()
    (gone,) = gc(tmp_path, keep=9, older_than_s=0.0, dry_run=False)
    assert gone.problem == "" and not checkpoint_dir(run_dir, 1).exists()


def test_what_cannot_be_removed_is_listed_with_its_problem(tmp_path, monkeypatch):
    make_run(tmp_path, "a", days_old=9)

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        (kept,) = gc(tmp_path, keep=0, older_than_s=0.0, dry_run=False)
    assert "Permission denied" in kept.problem
    # The half removed run is no run any more, and the next collection finishes it.
    assert list_runs(tmp_path) == ()
    (left,) = gc(tmp_path, keep=0, older_than_s=0.0, dry_run=False)
    assert left.kind == "leftover"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dry_run", [True, False])
def test_gc_of_nothing_is_nothing(tmp_path, dry_run):
    assert gc(tmp_path / "missing", keep=0, older_than_s=0.0, dry_run=dry_run) == ()
    assert gc(tmp_path, keep=0, older_than_s=0.0, dry_run=dry_run) == ()
