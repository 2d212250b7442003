"""Checkpoints are complete or absent, come back bit for bit, and stay few."""

import json
import logging
import math
import os
import resource
import shutil
import signal
import sys

import pytest
import torch

from treadle.errors import WeightsError
from treadle.store import layout, lock
from treadle.weights import checkpoint
from treadle.weights.checkpoint import discard_newer, load_latest, save
from treadle.weights.tree import DATA


def state_of(step: int) -> dict:
    return {
        "policy": {"a": torch.full((3,), float(step)), "b": torch.tensor(step)},
        "counters": {"step": step},
    }


def names(run_dir) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


def same(a, b) -> bool:
    """Equal types, dtypes, shapes and bits."""
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        wide = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return torch.equal(*wide)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and repr(a) == repr(b)


def test_everything_a_run_holds_comes_back_bit_for_bit(tmp_path):
    base = torch.randn(4, 6)
    state = {
        "policy": {
            "fp32": base,
            "bf16": torch.randn(5).bfloat16(),
            "fp16": torch.randn(5).half(),
            "fp64": torch.randn(2, dtype=torch.float64),
            "scalar": torch.tensor(0.1),
            "ints": torch.arange(5),
            "bytes": torch.get_rng_state(),
            "mask": torch.tensor([True, False]),
            "empty": torch.zeros(0, 3),
            "nan": torch.tensor([math.nan, -0.0, math.inf]),
            "turned": base.t(),
            "part": base[1:3],
            "parameter": torch.nn.Parameter(torch.randn(2)),
        },
        "nested": {"by_number": {0: {"x": torch.tensor(1)}, 1: [torch.tensor(2), (3, None)]}},
        "same_name": {"a/b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}},
        "alone": torch.tensor([7]),
        "data": {"lr": 0.1 + 0.2, "betas": (0.9, 0.95), "nan": math.nan, "big": 2**80},
    }
    save(tmp_path, 3, state, keep=2)
    loaded = load_latest(tmp_path)
    assert (loaded.checkpoint.step, loaded.skipped) == (3, ())
    assert same(state, loaded.state)


def test_tensors_that_share_memory_come_back_apart_and_equal(tmp_path):
    whole = torch.arange(6.0)
    save(tmp_path, 0, {"p": {"all": whole, "tied": whole, "head": whole[:2]}}, keep=1)
    p = load_latest(tmp_path).state["p"]
    assert torch.equal(p["all"], whole) and torch.equal(p["tied"], whole)
    assert torch.equal(p["head"], whole[:2])
    p["all"][0] = 9
    assert p["tied"][0] == p["head"][0] == 0


def trained(steps: int, start: dict | None = None) -> tuple[torch.nn.Linear, dict]:
    """A toy run whose every number depends on its state: weights, moments, and RNG."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    done, generator = 0, torch.Generator().manual_seed(1)
    if start is not None:
        model.load_state_dict(start["policy"])
        optimiser.load_state_dict(start["optimiser"])
        generator.set_state(start["rng"])
        done = start["counters"]["step"]
    for _ in range(done, steps):
        optimiser.zero_grad()
        model(torch.randn(5, 8, generator=generator)).pow(2).mean().backward()
        optimiser.step()
    state = {
        "policy": model.state_dict(),
        "optimiser": optimiser.state_dict(),
        "rng": generator.get_state(),
        "counters": {"step": steps},
    }
    return model, state


def test_ten_steps_equal_five_saved_loaded_and_five_more(tmp_path):
    """B074: weights, moments, lr and random state."""
    _, half = trained(5)
    save(tmp_path, 5, half, keep=2)
    _, resumed = trained(10, load_latest(tmp_path).state)
    _, quiet = trained(10)
    assert same(resumed, quiet)


def test_fifty_saves_leave_at_most_three_on_the_disk(tmp_path):
    """B115: keep = 2."""
    for step in range(50):
        saved = save(tmp_path, step, state_of(step), keep=2)
        assert len(names(tmp_path)) <= 3
        assert saved.kept_back == ()
    assert names(tmp_path) == ["step-00000048", "step-00000049"]
    assert saved.removed == ("step-00000047",)
    assert load_latest(tmp_path).state["counters"] == {"step": 49}


def test_the_one_before_the_newest_stays_until_the_ledger_can_have_committed(tmp_path):
    """With keep = 1, a crash between save and commit must find the old one."""
    for step in (10, 20, 30):
        save(tmp_path, step, state_of(step), keep=1)
    assert names(tmp_path) == ["step-00000020", "step-00000030"]
    loaded = load_latest(tmp_path, at_most=29)
    assert loaded.checkpoint.step == 20
    assert loaded.skipped == ("step-00000030: the ledger has committed 29 steps only",)
    assert discard_newer(tmp_path, 29) == ("step-00000030",)
    assert names(tmp_path) == ["step-00000020"]


def test_the_record_is_what_is_on_the_disk(tmp_path):
    record = save(tmp_path, 7, state_of(7), keep=1).record
    path = record.at(tmp_path)
    assert path == tmp_path / "checkpoints" / "step-00000007"
    assert record.bytes == sum(p.stat().st_size for p in path.iterdir())
    assert load_latest(tmp_path).checkpoint == record


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    save(tmp_path, 4, state_of(4), keep=2)
    save(tmp_path, 4, state_of(5), keep=2)
    assert names(tmp_path) == ["step-00000004"]
    assert load_latest(tmp_path).state["counters"] == {"step": 5}


@pytest.fixture
def full_disk():
    """Files of this process end at 60 kB: the write fails as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.mark.parametrize("part", [{"w": torch.zeros(50_000)}, {"text": "x" * 100_000}])
def test_a_full_disk_leaves_the_old_checkpoint_and_names_it(tmp_path, full_disk, part):
    """B115"""
    save(tmp_path, 1, state_of(1), keep=2)
    with pytest.raises(WeightsError, match="no space left on the disk") as caught:
        save(tmp_path, 2, state_of(2) | {"large": part}, keep=2)
    assert "the checkpoint of step 1 (checkpoints/step-00000001) is intact" in str(caught.value)
    assert "treadle runs gc" in caught.value.hint
    assert names(tmp_path) == ["step-00000001"]
    assert same(load_latest(tmp_path).state, state_of(1))


def test_a_full_disk_at_the_first_save_says_that_there_is_none(tmp_path, full_disk):
    with pytest.raises(WeightsError, match="there is no earlier checkpoint"):
        save(tmp_path, 0, {"large": torch.zeros(50_000)}, keep=2)


def test_a_run_that_grew_too_large_stops_before_the_next_save(tmp_path):
    save(tmp_path, 1, state_of(1), keep=2, max_gib=1e-6)
    with pytest.raises(
        WeightsError, match=r"GiB \(ledger 0.00, .* more than store.max_gib = 1e-06"
    ):
        save(tmp_path, 2, state_of(2) | {"text": "x" * 2000}, keep=2, max_gib=1e-6)
        save(tmp_path, 3, state_of(3), keep=2, max_gib=1e-6)
    assert load_latest(tmp_path).checkpoint is not None


def test_a_folder_that_cannot_be_removed_is_a_warning(tmp_path, monkeypatch, caplog):
    """B115"""
    for step in (1, 2):
        save(tmp_path, step, state_of(step), keep=2)

    def refuse(path, *args, **kwargs):
        if kwargs.get("ignore_errors"):
            return
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(shutil, "rmtree", refuse)
        saved = save(tmp_path, 3, state_of(3), keep=2)
    assert saved.record.step == 3
    assert "Permission denied" in saved.kept_back[0]
    assert "could not remove the old checkpoint" in caplog.text
    assert load_latest(tmp_path).checkpoint.step == 3
    save(tmp_path, 4, state_of(4), keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_weights_that_someone_reads_live_until_they_are_released(tmp_path):
    """B064: 5 newer versions are published while a consumer sleeps."""
    save(tmp_path, 1, state_of(1), keep=1)
    path = layout.checkpoint_dir(tmp_path, 1)
    with lock.shared(path / layout.MANIFEST):
        for step in range(2, 7):
            saved = save(tmp_path, step, state_of(step), keep=1)
        assert saved.kept_back == ("step-00000001: another process is reading it",)
        assert sorted(p.name for p in path.iterdir())[0] == "manifest.json"
    save(tmp_path, 7, state_of(7), keep=1)
    assert names(tmp_path) == ["step-00000006", "step-00000007"]


def test_a_consumer_that_was_slow_gets_the_newest(tmp_path, monkeypatch):
    """B064: what it saw is gone when it looks inside."""
    save(tmp_path, 1, state_of(1), keep=1)
    verify, slept = checkpoint._verify, []

    def sleepy(run_dir, path, step):
        if not slept:
            slept.append(step)
            shutil.rmtree(path)
            for newer in range(2, 7):
                save(tmp_path, newer, state_of(newer), keep=1)
        return verify(run_dir, path, step)

    monkeypatch.setattr(checkpoint, "_verify", sleepy)
    loaded = load_latest(tmp_path)
    assert slept == [1]
    assert loaded.checkpoint.step == 6


def damage(path, how: str) -> None:
    weights = path / "policy.safetensors"
    if how == "no mark":
        (path / layout.MANIFEST).unlink()
    elif how == "half a mark":
        mark = (path / layout.MANIFEST).read_text()
        (path / layout.MANIFEST).write_text(mark[: len(mark) // 2])
    elif how == "half a file":
        os.truncate(weights, weights.stat().st_size // 2)
    elif how == "flipped byte":
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    elif how == "missing file":
        weights.unlink()
    elif how == "newer format":
        mark = json.loads((path / layout.MANIFEST).read_text())
        (path / layout.MANIFEST).write_text(json.dumps(mark | {"format": 9}))
    elif how == "renamed":
        shutil.copytree(path, layout.checkpoint_dir(path.parents[1], 3))
        shutil.rmtree(path)
    else:
        raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("no mark", "step-00000002: not complete, manifest.json is missing"),
        ("half a mark", "step-00000002: manifest.json is damaged"),
        ("half a file", "step-00000002: policy.safetensors has"),
        ("flipped byte", "step-00000002: policy.safetensors is damaged"),
        ("missing file", "step-00000002: policy.safetensors is missing"),
        ("newer format", "step-00000002: format 9, this Treadle reads format 1"),
        ("renamed", "step-00000003: manifest.json is that of step 2"),
    ],
)
def test_the_newest_good_one_is_used_and_the_others_are_named(tmp_path, how, why):
    """B116, B172: every file of the index must be there and right."""
    for step in (1, 2):
        save(tmp_path, step, state_of(step), keep=2)
    damage(layout.checkpoint_dir(tmp_path, 2), how)
    loaded = load_latest(tmp_path)
    assert loaded.checkpoint.step == 1
    assert same(loaded.state, state_of(1))
    assert len(loaded.skipped) == 1 and loaded.skipped[0].startswith(why)
    shutil.rmtree(layout.checkpoint_dir(tmp_path, 1))
    loaded = load_latest(tmp_path)
    assert (loaded.checkpoint, loaded.state) == (None, {})
    assert loaded.skipped[0].startswith(why)


def test_a_stray_file_is_not_loaded(tmp_path):
    """B172: the index decides, not the folder."""
    save(tmp_path, 1, state_of(1), keep=1)
    path = layout.checkpoint_dir(tmp_path, 1)
    shutil.copy(path / "policy.safetensors", path / "stray.safetensors")
    (path.parent / "step-notes").mkdir()
    (path.parent / "step-00000009").write_text("a file")
    loaded = load_latest(tmp_path)
    assert list(loaded.state) == ["policy", "counters"]
    assert "step-00000009" in loaded.skipped[0]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_at_every_file_boundary_leaves_the_newest_complete_one(tmp_path):
    """B116: kill -9 before each operation on files that a save makes."""
    seen = []
    for step in (1, 2):
        save(tmp_path / "start", step, state_of(step), keep=1)
    for at in range(200):
        run_dir = tmp_path / str(at)
        shutil.copytree(tmp_path / "start", run_dir)
        child = os.fork()
        if child == 0:
            kill_before(at)
            save(run_dir, 3, state_of(3), keep=1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        step = load_latest(run_dir).checkpoint.step
        assert same(load_latest(run_dir).state, state_of(step))
        seen.append(step)
        save(run_dir, 4, state_of(4), keep=1)
        assert len(names(run_dir)) == 2
        if os.WIFEXITED(status):
            assert step == 3
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    else:
        raise AssertionError("the save never ended")
    assert len(seen) > 15
    assert seen == sorted(seen) and set(seen) == {2, 3}


def kill_before(at: int) -> None:
    """Kill this process before its `at`-th operation on files, as CPython reports them."""
    count = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"):
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.addaudithook(hook)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"counters": {"rng": object()}},
            r"checkpoint\.trees\.counters\.rng is a builtins\.object",
        ),
        ({"a/b": {}}, "'a/b' cannot be a part"),
        ({"p": {"z": torch.zeros(2).to_sparse()}}, "tensor z of p is torch.float32 in layout"),
        ({"p": {"z": torch.zeros(2, dtype=torch.complex64)}}, "torch.complex64"),
    ],
)
def test_what_cannot_be_kept_is_named_before_anything_changes(tmp_path, state, message):
    save(tmp_path, 1, state_of(1), keep=1)
    with pytest.raises(WeightsError, match=message):
        save(tmp_path, 2, state, keep=1)
    assert names(tmp_path) == ["step-00000001"]


def test_a_run_without_a_checkpoint_has_none(tmp_path):
    loaded = load_latest(tmp_path)
    assert (loaded.checkpoint, loaded.state, loaded.skipped) == (None, {}, ())
    with pytest.raises(ValueError, match="keep must be >= 1"):
        save(tmp_path, 0, {}, keep=0)


def test_the_state_file_names_the_tensors_it_needs(tmp_path):
    path = save(tmp_path, 1, state_of(1), keep=1).record.at(tmp_path)
    data = json.loads((path / DATA).read_text())
    assert data["trees"]["counters"] == {"step": 1}
    assert [name for name, _ in (p["$tuple"] for p in data["tensors"]["policy"])] == ["a", "b"]
