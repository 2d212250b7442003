"""Demonstrations from conversations: what is learnt of a row, and which rows are refused, where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.config import TasksConfig
from treadle.errors import ConfigError, DataError, RewardError
from treadle.tasks import Demonstrations, open_taskset
from treadle.tasks.chat import Chat


def says(role: str, content: Any = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TURNS = [says("user", "a"), says("assistant", "b"), says("user", "c"), says("assistant", "d")]


def chat(path: Path, *rows: Any, **options: Any) -> Chat:
    file = path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Chat(file, options=options)


def test_all_assistant_turns_are_learnt_and_what_lies_between_is_shown(tmp_path: Path) -> None:
    source = chat(tmp_path, {"messages": TURNS})
    task = source.task(0)
    assert [m.content for m in task.messages] == ["a"]
    assert [m.content for m in source.demonstration(task).turns] == ["b", "c", "d"]


def test_the_last_turn_alone_is_learnt_where_that_is_asked(tmp_path: Path) -> None:
    source = chat(tmp_path, {"messages": [*TURNS, says("user", "bye")]}, learn="last")
    task = source.task(0)
    assert [m.content for m in task.messages] == ["a", "b", "c"]
    assert [m.content for m in source.demonstration(task).turns] == ["d"]


def test_tool_calls_are_read_in_the_form_that_providers_write(tmp_path: Path) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rows = {
        "messages": [
            says("user", "1+1"),
            says("assistant", None, tool_calls=[call]),
            says("tool", "2", tool_call_id="x"),
            says("assistant", "2", reasoning_content="so"),
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    source = chat(tmp_path, rows)
    shown = source.demonstration(source.task(0))
    assert shown.turns[0].tool_calls[0].arguments == '{"a": 1}'
    assert shown.turns[1].tool_call_id == "x" and shown.turns[2].reasoning == "so"
    assert shown.tools[0]["function"]["name"] == "add"


def calling(**fields: Any) -> dict[str, Any]:
    """A row whose turn to learn calls `f`."""
    call = {"id": "x", "type": "function", "function": {"name": "f", **fields}}
    return {"messages": [TURNS[0], says("assistant", None, tool_calls=[call])]}


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": " "}])
def test_a_call_without_arguments_has_none(tmp_path: Path, arguments: dict[str, Any]) -> None:
    source = chat(tmp_path, calling(**arguments))
    (turn,) = source.demonstration(source.task(0)).turns
    assert turn.tool_calls[0].arguments == "{}"


def test_a_failed_call_may_be_shown_where_it_is_not_learnt(tmp_path: Path) -> None:
    """What follows it teaches to recover."""
    row = calling(arguments="{nope")
    row["messages"] += [says("tool", "error", tool_call_id="x"), says("assistant", "sorry")]
    assert chat(tmp_path, row, learn="last").size("train") == 1


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [says("user", "a")]}, "no assistant turn"),
        ({"messages": [says("assistant", "a")]}, r"messages\[0\] is an assistant's"),
        ({"messages": [*TURNS[:1], says("assistant", " ")]}, r"messages\[1\].* is empty"),
        ({"messages": [*TURNS[:2], says("assistant", "x")]}, r"messages\[2\] follows an assistant"),
        (
            {"messages": [says("user", ["a"]), TURNS[1]]},
            r"messages\[0\] must have text as `content",
        ),
        ({"messages": [says("human", "a"), TURNS[1]]}, r"messages\[0\] has role 'human'"),
        ({"messages": [{"content": "a"}, TURNS[1]]}, r"messages\[0\] has role None"),
        ({"messages": ["hello"]}, r"messages\[0\] must be an object"),
        ({"messages": [says("user", "a", weightt=1), TURNS[1]]}, "unknown key `weightt`"),
        ({"messages": [TURNS[0], says("assistant", "", tool_calls=[{}])]}, "names no function"),
        ({"messages": [says("user", "a", tool_calls=[{"name": "f"}]), TURNS[1]]}, "only an assis"),
        (calling(arguments="{nope"), r"messages\[1\]: tool_calls\[0\] .* no JSON object: '\{nope'"),
        (calling(arguments="[1]"), "no JSON object"),
        (calling(arguments=[1]), "no JSON object"),
        (calling(arguments='{"a": NaN}'), "NaN is not a JSON value"),
        (calling(arguments=0), "no JSON object"),
        (calling(argumentz="{}"), r"tool_calls\[0\]: unknown key `argumentz`"),
        ({"messages": TURNS, "id": ""}, "`id` must be text, got ''"),
        ({"messages": TURNS, "tools": ["add"]}, "`tools` must be a list of specs"),
        ({"messages": TURNS, "split": "dev"}, "unknown split `dev`"),
        ({"messages": TURNS, "reward": 1}, "unknown key `reward`"),
        ([1], "a row must be an object"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_message(tmp_path: Path, row: Any, what: str) -> None:
    with pytest.raises(DataError, match=rf"chat\.jsonl:2: .*{what}|chat\.jsonl:2: {what}"):
        chat(tmp_path, {"messages": TURNS}, row)


def test_equal_rows_are_one_and_the_order_is_a_function_of_the_seed(tmp_path: Path) -> None:
    rows = [{"messages": [says("user", str(i % 9)), says("assistant", "x")]} for i in range(20)]
    source = chat(tmp_path, *rows)
    assert source.size("train") == 9 and source.num_duplicates == 11
    ids = [source.task(i).id for i in range(9)]
    assert len(set(ids)) == 9
    assert ids == [Chat(source.path).task(i).id for i in range(9)]
    assert ids != [Chat(source.path, seed=1).task(i).id for i in range(9)]
    with pytest.raises(IndexError):
        source.task(9)


def test_a_held_out_row_is_not_learnt_and_a_file_of_them_is_refused(tmp_path: Path) -> None:
    source = chat(tmp_path, {"messages": TURNS}, {"messages": TURNS[:2], "split": "val"})
    assert (source.size("train"), source.size("val")) == (1, 1)
    with pytest.raises(DataError, match="no row is in split `train`"):
        chat(tmp_path, {"messages": TURNS, "split": "val"})


def test_demonstrations_are_opened_by_name_and_never_graded(tmp_path: Path) -> None:
    path = chat(tmp_path, {"messages": TURNS}).path
    source = open_taskset(TasksConfig(source=f"chat:{path}", system="Be brief."), 0)
    assert isinstance(source, Demonstrations)
    assert source.task(0).messages[0].content == "Be brief."
    with pytest.raises(RewardError):
        source.grade(source.task(0), "b")
    with pytest.raises(ConfigError, match=r"tasks\.reward"):
        TasksConfig(source=f"chat:{path}", reward="lenient")


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(["role", "content", "tool_calls", "function", "name"]), x
            )
        ),
        max_leaves=8,
    )
)
def test_any_json_is_read_or_refused_with_its_line(tmp_path_factory: Any, value: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "chat.jsonl"
    path.write_text(json.dumps({"messages": value}) + "\n")
    try:
        Chat(path)
    except DataError as error:
        assert "chat.jsonl:1" in error.message
