"""A disk that is full when a checkpoint is saved: the one before stays, and nothing is lost."""

import resource
import shutil
import subprocess
from pathlib import Path

import pytest

from treadle.cli.main import main
from treadle.store import Store
from treadle.weights import restore


def fill(run_dir: Path, room: int) -> Path:
    """Leave about `room` bytes on the disk of a run."""
    filler = run_dir.parent / "filler"
    filler.write_bytes(bytes(max(0, shutil.disk_usage(run_dir).free - room)))
    return filler


@pytest.fixture
def small_disk(workspace: Path):
    """A directory on a disk of 2 MiB, where one can be mounted."""
    path = workspace / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


FULL = ["--set", "model.lora=null", "--set", "eval.questions=0", "--set", "steps=1"]
"""Every parameter is trained: three files of about 100 KiB."""


def check_nothing_is_lost(treadle, run_dir: Path, done) -> None:
    """After a checkpoint that failed: the one before is named, intact, and resume goes on."""
    assert done.code == 1
    assert done.json["error"]["kind"] == "WeightsError"
    message = done.json["error"]["message"]
    assert "cannot save the checkpoint of step 2" in message
    assert "the checkpoint of step 1 (checkpoints/step-00000001) is intact" in message
    assert restore.open_policy(run_dir).checkpoint.step == 1
    with Store.open(run_dir, readonly=True) as store:
        assert store.frontier().step == 2  # committed before it was saved
        trained = [s.ordinals for s in store.steps()]
    assert "intact" in treadle("runs", "why", run_dir, "--json").json["cause"]
    again = treadle(
        "train", "rec.py", "--run-dir", run_dir, "--resume", "--set", "steps=3", "--json"
    )
    assert again.code == 0
    assert again.json["new_steps"] == 1
    assert "step 2 of 2 re-applied" in again.err
    with Store.open(run_dir, readonly=True) as store:
        assert [s.ordinals for s in store.steps()][:2] == trained


def test_a_disk_that_is_full_at_a_checkpoint_loses_nothing(treadle, workspace, small_disk) -> None:
    """B115."""
    run_dir = small_disk / "tiny"
    assert main(["train", "rec.py", "--run-dir", str(run_dir), *FULL]) == 0
    filler = fill(run_dir, 200 << 10)
    done = treadle(
        "train", "rec.py", "--run-dir", run_dir, "--resume", "--set", "steps=2", "--json"
    )
    filler.unlink()
    assert "no space left" in done.json["error"]["message"]
    check_nothing_is_lost(treadle, run_dir, done)


def test_a_file_that_may_not_grow_at_a_checkpoint_loses_nothing(treadle, workspace) -> None:
    """B115, where nothing can be mounted: the limit is above the ledger, below the moments."""
    run_dir = Path("runs/tiny")
    assert main(["train", "rec.py", *FULL]) == 0
    biggest = max(p.stat().st_size for p in run_dir.rglob("*.safetensors"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (biggest - 4096, before[1]))
    try:
        done = treadle("train", "rec.py", "--resume", "--set", "steps=2", "--json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    check_nothing_is_lost(treadle, run_dir, done)
