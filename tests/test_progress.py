"""Progress: one flushed line per step in a pipe, bars on a terminal; nothing invented."""

import io

import pytest

from treadle.config import RunConfig
from treadle.progress import StageBar, TrainProgress, step_line

METRICS = {
    "reward/mean": 0.4125,
    "reward/solved_frac": 0.125,
    "rollout/sampled_tokens_mean": 6.25,
    "policy/entropy_nats": 1.5,
    "time/generate_s": 2.0,
    "time/train_s": 1.25,
    "generate/tokens_per_s": 1234.5,
    "groups/dropped": 2.0,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Flushed(io.StringIO):
    """Remembers what was flushed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = ""

    def flush(self) -> None:
        self.seen = self.getvalue()


def test_a_line_holds_what_the_step_has() -> None:
    assert step_line(3, 90, METRICS) == (
        "step 3/90  reward 0.412  solved 12.5%  length 6.2  entropy 1.500  3.2 s  1,234 tok/s  "
        "dropped 2"
    )
    assert step_line(3, 90, {}) == "step 3/90  0.0 s  dropped 0"
    assert step_line(3, 90, {}, "not finite").endswith("NOT TRAINED: not finite")


def events(progress: TrainProgress) -> None:
    progress("resume", {"checkpoint": 10, "step": 12, "skipped": ("step-00000011: damaged",)})
    progress("reapply", {"step": 11, "last": 12})
    progress("answers", {"step": 12, "taskset": "[red]set[/red]", "done": 1, "total": 2})
    progress("group", {"group": None, "dropped": "", "ready": 1})
    progress("group", {"group": None, "dropped": "all rewards are equal", "ready": 1})
    progress("step", {"step": 13, "metrics": METRICS, "skipped": ""})
    progress("step", {"step": 14, "metrics": METRICS, "skipped": "all advantages are 0"})
    progress("checkpoint", {"step": 14, "path": "checkpoints/step-00000014"})


def test_in_a_pipe_each_step_is_a_line_and_flushed_at_once(tmp_path) -> None:
    file = Flushed()
    with TrainProgress(RunConfig(), tmp_path, file=file) as progress:
        progress("step", {"step": 13, "metrics": METRICS, "skipped": ""})
        assert file.seen.startswith("step 13/30")
        events(progress)
    lines = file.getvalue().splitlines()
    assert "\x1b" not in file.getvalue()
    assert [line.split()[0] for line in lines] == ["step", *["resume:"] * 3, "step", "step"]
    assert "step-00000011: damaged" in lines[2]
    assert lines[-1].endswith("NOT TRAINED: all advantages are 0")


def test_on_a_terminal_bars_show_steps_groups_and_answers(tmp_path) -> None:
    file = Terminal()
    with TrainProgress(RunConfig(), tmp_path, file=file) as progress:
        events(progress)
    text = file.getvalue()
    assert "steps" in text
    assert "12 steps are done" in text
    assert "step 14 was not trained: all advantages are 0" in text


def test_an_evaluation_that_cannot_be_read_does_not_end_the_run(tmp_path) -> None:
    file = io.StringIO()
    with TrainProgress(RunConfig(), tmp_path, file=file) as progress:
        progress("eval", {"step": 0, "taskset": "sums", "eval_id": 1})
    assert "cannot be read" in file.getvalue()


@pytest.mark.parametrize("file", [io.StringIO(), Terminal()])
def test_stages_are_told_once_each(file: io.StringIO) -> None:
    with StageBar(file=file) as bar:
        bar.tell("ask", None)
        bar.tell("download", 0.1)
        bar.tell("download", 0.9)
    if not file.isatty():
        assert file.getvalue() == "ask\ndownload\n"
