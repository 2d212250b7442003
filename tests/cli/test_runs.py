"""`treadle runs`: list, why, gc."""

import os
import shutil
import time
from pathlib import Path

import pytest

from treadle.cli.arguments import age
from treadle.store import Store


def test_the_list_shows_status_steps_and_reward_and_names_what_cannot_be_read(
    treadle, trained
) -> None:
    broken = Path("runs/broken")
    broken.mkdir()
    (broken / "run.db").write_text("not a database")
    done = treadle("runs", "--json")
    assert done.code == 0
    rows = {Path(row["path"]).name: row for row in done.json["runs"]}
    assert rows["tiny"]["status"] == "finished"
    assert (rows["tiny"]["steps_done"], rows["tiny"]["steps_asked"]) == (2, 2)
    with Store.open(trained, readonly=True) as store:
        assert rows["tiny"]["last_reward"] == store.steps()[-1].metrics["reward/mean"]
    assert rows["broken"]["status"] == "unreadable"
    text = treadle("runs", "list").out
    assert "2/2" in text and "unreadable" in text


def test_without_runs_the_list_says_what_makes_one(treadle, workspace) -> None:
    done = treadle("runs", "--root", "elsewhere")
    assert done.code == 0
    assert "no runs in elsewhere" in done.out
    assert treadle("runs", "--json").json["runs"] == []


def test_why_tells_of_the_last_session_and_what_to_do(treadle, trained) -> None:
    done = treadle("runs", "why", trained, "--json")
    assert done.code == 0
    assert (done.json["status"], done.json["checkpoint_step"]) == ("finished", 2)
    assert "treadle report" in done.json["hint"]
    with Store.open(trained, readonly=False) as store:
        store.add_event("alarm", {"text": "\x1b[31mred"})
        store.finish("failed", "the engine died: out of memory")
    done = treadle("runs", "why", trained)
    assert "the engine died: out of memory" in done.out
    assert "--resume" in done.out
    assert "alarm" in done.out
    assert "\x1b" not in done.out


def test_a_killed_run_is_not_called_running(treadle, trained) -> None:
    """A writer that dies by kill -9 leaves "running" behind, and no lock."""
    store = Store.open(trained, readonly=False)
    assert treadle("runs", "why", trained, "--json").json["status"] == "running"
    store._db.close()
    assert store._held is not None
    store._held.release()
    done = treadle("runs", "why", trained, "--json").json
    assert done["status"] == "interrupted"
    assert "killed" in done["cause"]


def test_gc_lists_first_and_then_removes_the_same(treadle, trained) -> None:
    shutil.copytree(trained, "runs/old")
    past = time.time() - 90 * 86_400
    for path in Path("runs/old").rglob("*"):
        os.utime(path, (past, past))
    keep = ["--keep", "1", "--older-than", "30d", "--json"]
    dry = treadle("runs", "gc", "--dry-run", *keep).json
    assert dry["dry_run"] is True
    assert Path("runs/old").is_dir()
    assert {(r["kind"], Path(r["path"]).name) for r in dry["removed"]} == {
        ("run", "old"),
        ("checkpoint", "step-00000001"),
    }
    done = treadle("runs", "gc", *keep)
    assert done.code == 0
    assert [r["path"] for r in done.json["removed"]] == [r["path"] for r in dry["removed"]]
    assert done.json["bytes"] > 0
    assert not Path("runs/old").exists()
    assert treadle("report", trained).code == 0


def test_gc_of_a_directory_that_is_not_there_is_an_error(treadle, workspace) -> None:
    assert treadle("runs", "gc").code == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7d", 604_800)]
)
def test_ages_have_units(text: str, seconds: float) -> None:
    assert age(text) == seconds
