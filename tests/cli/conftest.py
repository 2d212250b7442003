"""The command line in process, on a tiny random model and a file of sums."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from treadle.cli.main import main
from treadle.models import tiny

REWARDS = '''
def letters(trajectory):
    """A random model's replies differ in this, so groups have something to compare."""
    answer = trajectory.answer
    return sum(c.isalpha() for c in answer) / max(1, len(answer))

def none(trajectory):
    trajectory.answer

def nan(trajectory):
    return float("nan")

def text(trajectory):
    return "1.0"

def raising(trajectory):
    raise KeyError("gold")

def broken_tool(number: int) -> str:
    """Always fails."""
    raise OSError("the disk of the tool is gone")
'''

RECIPE = """
from treadle.config import (
    EvalConfig, LearnConfig, ModelConfig, RolloutConfig, RunConfig, StoreConfig, TasksConfig,
)

def recipe():
    return RunConfig(
        name="tiny",
        steps=2,
        model=ModelConfig(name={model!r}, dtype="float32", max_context=128),
        tasks=(TasksConfig(source="jsonl:tasks.jsonl", reward="cli_rewards:letters"),),
        rollout=RolloutConfig(group_size=4, groups_per_step=2, max_new_tokens=6),
        eval=EvalConfig(questions=3, samples=2),
        store=StoreConfig(checkpoint_every=1),
    )
"""


@dataclass
class Done:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are several times slower on two threads than on one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def treadle(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command line in this process."""

    def call(*argv: object) -> Done:
        capsys.readouterr()
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return call


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny.build_random(path, hidden=32, heads=2, intermediate=48, max_context=256)
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """A directory with rec.py, tasks.jsonl and cli_rewards.py; read only."""
    path = tmp_path_factory.mktemp("files")
    (path / "cli_rewards.py").write_text(REWARDS)
    (path / "rec.py").write_text(RECIPE.format(model=str(model_dir)))
    rows = [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(60)]
    (path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Path) -> Path:
    """A working directory of its own, with a copy of these files."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    # One place for all tests: a module is imported once per process.
    monkeypatch.syspath_prepend(files)
    return tmp_path


@pytest.fixture(scope="session")
def trained_once(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run of rec.py; read only."""
    run_dir = tmp_path_factory.mktemp("trained") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(files)
        patch.syspath_prepend(files)
        assert main(["train", "rec.py", "--run-dir", str(run_dir)]) == 0
    return run_dir


@pytest.fixture
def trained(trained_once: Path, workspace: Path) -> Path:
    """A copy of the finished run, as runs/tiny of the working directory."""
    shutil.copytree(trained_once, workspace / "runs" / "tiny")
    return Path("runs/tiny")
