"""Tool calls in text: what is read, what is kept although broken, what raises the alarm."""

from __future__ import annotations

import json

import pytest

from treadle.render import markers
from treadle.render.tool_syntax import hermes, llama3, mistral, xml

ONE = '<tool_call>{{"name": "add", "arguments": {}}}</tool_call>'


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ("[1, 2]", "[1, 2]"),
        ("7", "7"),
        ('"x"', "x"),
        ('""', ""),
        ("null", ""),
        ('"{\\"a\\": 1}"', '{"a": 1}'),
    ],
)
def test_arguments_of_any_json_type_are_kept(written: str, kept: str) -> None:
    """B098: lists, numbers and text are for the tool to refuse; empty text means no arguments."""
    assert hermes(ONE.format(written)) == ("", [("add", kept)])


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", "arguments": {"a": }',
        '{"name": "add", "arguments": {"a": 1}',
        '{"name": "add", "arguments": {"a": 1}} and more',
        '{"name": "add" "arguments": {}}',
    ],
)
def test_malformed_calls_keep_their_name_and_arguments_that_no_tool_accepts(body: str) -> None:
    """B098"""
    ((name, arguments),) = hermes(f"<tool_call>{body}</tool_call>")[1]
    assert name == "add"
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)


@pytest.mark.parametrize("body", ["", "[1, 2]", '{"arguments": {}}', '{"name": 3}', "[" * 100_000])
def test_a_call_without_a_name_is_a_call_of_nothing(body: str) -> None:
    ((name, arguments),) = hermes(f"<tool_call>{body}</tool_call>")[1]
    assert (name, arguments) == ("", body)


def test_an_unclosed_call_is_read_to_the_end() -> None:
    text = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}'
    assert hermes(text) == ("so", [("add", '{"a": 1}')])


def test_text_without_calls_is_returned_as_it_is() -> None:
    for parse in (hermes, xml, mistral, llama3):
        assert parse("  the answer is {42}\n") == ("  the answer is {42}\n", [])


def test_parameters_between_tags_become_json() -> None:
    text = (
        "ok\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\ntwo lines\nof text\n</parameter>\n</function>\n</tool_call>"
    )
    assert xml(text) == ("ok", [("add", '{"a": 1, "b": "two lines\\nof text"}')])
    assert xml("<tool_call>junk</tool_call>") == ("", [("", "junk")])


def test_a_list_after_the_mistral_mark_is_several_calls() -> None:
    text = 'x [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "sub"}]'
    assert mistral(text) == ("x", [("add", '{"a": 1}'), ("sub", "")])
    assert mistral("[TOOL_CALLS] oops") == ("", [("", "oops")])


def test_a_turn_that_is_one_json_call_is_a_call() -> None:
    text = '<|python_tag|>{"name": "add", "parameters": {"a": 1}}'
    assert llama3(text) == ("", [("add", '{"a": 1}')])
    assert llama3('{"name": "add", "param')[1][0][0] == "add"
    assert llama3('{"answer": 1}') == ('{"answer": 1}', [])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f"}</tool_call>',
        "<function=f>",
        '<function_call> {"name": "f"}',
        "[TOOL_CALLS] []",
        "<|python_tag|>f()",
        '<invoke name="f">',
        "<|tool_calls_section_begin|>",
        "Thought: hm\nAction: search",
        '{"name": "f", "arguments": {}}',
        "```tool_code\nf()\n```",
    ],
)
def test_marks_of_other_families_are_noticed(text: str) -> None:
    """B014"""
    assert markers(text) > 0


def test_ordinary_text_has_no_marks() -> None:
    assert markers('I call the function f(x) = 2x an action. {"name": "Bob", "age": 3}') == 0
