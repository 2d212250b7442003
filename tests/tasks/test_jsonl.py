"""JSON-lines task sets: rows, splits, order, errors with file and line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.errors import ConfigError, DataError, RewardError, TaskError
from treadle.tasks.jsonl import Jsonl

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(*rows: Any, name: str = "tasks.jsonl") -> Path:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def sums(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"{i} + 1 =", "answer": str(i + 1), **more} for i in range(count)]


def test_a_row_becomes_a_task(write: Write) -> None:
    path = write(
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "?"}],
         "answer": 3, "id": "a", "split": "val", "date": "2026-01-02", "topic": "x"},
        {"prompt": "7 + 5 =", "answer": "12", "split": "train"},
    )  # fmt: skip
    taskset = Jsonl(path, system="Be brief.", name="sums")
    task = taskset.task(0, "val")
    assert [(m.role, m.content) for m in task.messages] == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "?"),
    ]
    assert (task.id, task.taskset, task.split, task.date) == ("a", "sums", "val", "2026-01-02")
    assert task.data == {"topic": "x", "answer": "3"}
    assert taskset.gold(task) == "3"
    assert [taskset.size(s) for s in ("train", "val", "test")] == [1, 1, 0]
    assert len(taskset.provenance.sha256) == 64


def test_the_order_is_a_shuffle_by_seed_and_task_i_does_not_depend_on_the_calls_before(
    write: Write,
) -> None:
    path = write(*sums(50, split="train"))
    one, again, other = Jsonl(path, seed=1), Jsonl(path, seed=1), Jsonl(path, seed=2)
    forwards = [one.task(i).id for i in range(50)]
    backwards = [again.task(i).id for i in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) == 50
    assert forwards != [other.task(i).id for i in range(50)]
    assert forwards[:5] != [Jsonl(path, seed=1).task(i).id for i in range(45, 50)]


def test_equal_texts_are_one_task_and_never_straddle_splits(write: Write) -> None:
    rows = sums(200)
    path = write(*rows, *rows[:30], {"prompt": "  5 +  1 =", "answer": "6"})
    taskset = Jsonl(path)
    assert taskset.num_duplicates == 30
    assert taskset.conflicts == []
    by_split = {
        split: {
            " ".join(taskset.task(i, split).messages[0].content.split())
            for i in range(taskset.size(split))
        }
        for split in ("train", "val", "test")
    }
    assert sum(len(texts) for texts in by_split.values()) == len(set().union(*by_split.values()))
    assert min(len(texts) for texts in by_split.values()) > 5


def test_equal_texts_with_two_answers_are_reported(write: Write) -> None:
    taskset = Jsonl(write({"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}))
    assert taskset.conflicts == [(1, 2)]


def test_a_text_in_two_named_splits_is_an_error_with_both_lines(write: Write) -> None:
    path = write(
        {"prompt": "What is it?", "split": "train"}, {"prompt": "what is  it?", "split": "test"}
    )
    with pytest.raises(DataError, match=r"tasks.jsonl:2: this text is in split `test` here and "
                       r"`train` on line 1"):  # fmt: skip
        Jsonl(path)


def test_a_dated_split_needs_a_date_in_every_row(write: Write) -> None:
    old = sums(40, date="2026-01-01")
    new = {"prompt": "new", "answer": "1", "date": "2026-07-01"}
    taskset = Jsonl(write(*old, new), options={"test_from": "2026-06-01"})
    assert taskset.task(0, "test").messages[0].content == "new"
    assert taskset.size("test") == 1
    assert taskset.size("train") + taskset.size("val") == 40
    with pytest.raises(DataError, match=r":2: option `test_from` is set, but this row has no"):
        Jsonl(write(new, {"prompt": "x"}), options={"test_from": "2026-06-01"})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a"', r"tasks.jsonl:2: not JSON: .* at column"),
        ("[1, 2]", r"tasks.jsonl:2: a row must be an object, got list"),
        ('{"question": "a"}', r"tasks.jsonl:2: no prompt; keys of this row: `question`"),
        ('{"prompt": ""}', r"tasks.jsonl:2: no prompt: `prompt` is empty"),
        ('{"prompt": "a", "messages": []}', r"tasks.jsonl:2: both `prompt` and `messages`"),
        ('{"prompt": 3}', r"tasks.jsonl:2: `prompt` must be text, got int 3"),
        ('{"prompt": null}', r"tasks.jsonl:2: `prompt` must be text, got NoneType None"),
        ('{"prompt": "a", "answer": ["b"]}', r"tasks.jsonl:2: `answer` must be text, got list"),
        ('{"prompt": "a", "answer": NaN}', r"tasks.jsonl:2: not JSON: NaN"),
        ('{"prompt": "a", "answer": 1e999}', r"tasks.jsonl:2: not JSON: 1e999 is beyond the"),
        ('{"prompt": "a", "data": [-1e400]}', r"tasks.jsonl:2: not JSON: -1e400 is beyond the la"),
        (r'{"prompt": "a\ud800b"}', r"tasks.jsonl:2: \\ud800 is half of a surrogate pair"),
        (r'{"prompt": "a", "x": {"\uDFFF": 1}}', r"tasks.jsonl:2: \\udfff is half of a surro"),
        (r'{"messages": [{"role": "user", "content": "\udc00\ud83d"}]}', r":2: \\udc00 is half"),
        ('{"prompt": "a", "answer": true}', r"tasks.jsonl:2: `answer` must be text, got bool"),
        ('{"prompt": "a", "split": "validation"}', r"tasks.jsonl:2: unknown split `validation`"),
        ('{"prompt": "a", "date": "soon"}', r"tasks.jsonl:2: 'soon' is not a date"),
        ('{"messages": []}', r"tasks.jsonl:2: `messages` must be a list with at least one"),
        ('{"messages": [{"role": "bot", "content": ""}]}', r":2: messages\[0\] has role 'bot'"),
        ('{"messages": [{"role": "user"}]}', r":2: messages\[0\] must have text as `content`"),
        ('{"prompt": "b", "id": "x"}', r"tasks.jsonl:2: id 'x' is also that of line 1"),
        ("[" * 100_000, r"tasks.jsonl:2: not JSON"),
    ],
)
def test_a_row_that_cannot_be_used_names_file_and_line(
    write: Write, row: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        Jsonl(write({"prompt": "a", "id": "x"}, row))
    assert caught.value.exit_code == 2
    assert len(str(caught.value)) < 400


def test_bytes_that_are_not_utf8_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"bad.jsonl:2: not UTF-8: byte 12 is 0xff"):
        Jsonl(path)


def test_a_byte_order_mark_blank_lines_and_a_missing_last_newline_are_read(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "split": "val"}\r\n\r\n  \n{"prompt": "\xc3\xa9"}'
    )
    taskset = Jsonl(path)
    assert sum(taskset.size(s) for s in ("train", "val", "test")) == 2


def test_an_empty_file_is_an_empty_task_set_and_a_missing_one_says_where_it_looked(
    write: Write, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="empty task set"):
        Jsonl(write(""))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        Jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="relative to"):
        Jsonl("absent.jsonl")


def test_an_index_outside_and_an_empty_split_are_told_apart(write: Write) -> None:
    taskset = Jsonl(write(*sums(3, split="train")))
    with pytest.raises(IndexError, match="has 3 tasks, not 3"):
        taskset.task(3)
    with pytest.raises(IndexError):
        taskset.task(-1)
    with pytest.raises(TaskError, match=r"split `val` .* is empty; sizes: train 3, val 0, test 0"):
        taskset.task(0, "val")
    with pytest.raises(DataError, match=r"no split `vla`.*\n.*did you mean `val`"):
        taskset.task(0, "vla")


def test_a_file_that_changes_while_it_is_open_is_noticed(write: Write) -> None:
    path = write(*sums(3, split="train"))
    taskset = Jsonl(path)
    write(*sums(4, split="train"))
    with pytest.raises(TaskError, match="changed since it was opened"):
        taskset.task(0)


def test_unknown_options_and_wrong_types_are_config_errors(write: Write) -> None:
    path = write(*sums(2))
    with pytest.raises(ConfigError, match=r"unknown option `test_form`.*\n.*`test_from`"):
        Jsonl(path, options={"test_form": "2026-01-01"})
    with pytest.raises(ConfigError, match=r"option `test_from` of .* must be text, got 2026"):
        Jsonl(path, options={"test_from": 2026})


def test_grading_is_strict_and_lenient(write: Write) -> None:
    taskset = Jsonl(write({"prompt": "7 + 5 =", "answer": "12", "split": "train"}))
    task = taskset.task(0)
    assert taskset.grade(task, " 12\n") == {"score": 1.0, "lenient": 1.0}
    assert taskset.grade(task, "It is 12.") == {"score": 0.0, "lenient": 1.0}
    assert taskset.grade(task, "12 or 13") == {"score": 0.0, "lenient": 0.0}


def test_a_row_without_an_answer_is_not_graded_as_wrong(write: Write) -> None:
    taskset = Jsonl(write({"prompt": "Write a poem.", "split": "train"}))
    task = taskset.task(0)
    assert taskset.gold(task) is None
    with pytest.raises(RewardError, match="no `answer` to grade against"):
        taskset.grade(task, "roses")


def test_grading_does_not_read_the_file(write: Write, tmp_path: Path) -> None:
    task = Jsonl(write({"prompt": "a", "answer": "b", "split": "train"})).task(0)
    away = Jsonl(tmp_path / "absent.jsonl", for_grading=True)
    assert away.grade(task, "b")["score"] == 1.0


def test_escapes_of_whole_characters_and_of_backslashes_are_read(write: Write) -> None:
    rows = Jsonl(write(r'{"prompt": "\ud83d\ude00 \\ud800", "answer": 1e30, "split": "train"}'))
    task = rows.task(0)
    assert task.messages[0].content == "\U0001f600 \\ud800"
    assert task.data["answer"] == "1e+30"
