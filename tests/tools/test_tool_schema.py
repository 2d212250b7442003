"""Signatures as JSON schemas, and arguments checked against them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal, Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import ConfigError
from treadle.tools import tool
from treadle.tools.schema import BadArguments, arguments_of, signature_of


def book(
    title: str,
    pages: int,
    price: float = 1.0,
    *,
    kind: Literal["paper", "cloth"] = "paper",
    tags: list[str] | None = None,
    sizes: dict[str, float] = {},  # noqa: B006 - never changed
    signed: bool = False,
    shelf: Optional[int] = None,  # noqa: UP045 - as users write it
) -> str:
    """Put a book
    on the shelf.

    A second paragraph.

    Args:
        title: What it is called,
            in full.
        pages (int): How many.

    Returns:
        Where it stands.
    """
    return title


def test_a_signature_and_its_docstring_become_a_schema() -> None:
    schema = tool(book).schema["function"]
    assert schema["name"] == "book"
    assert schema["description"] == "Put a book on the shelf. A second paragraph."
    parameters = schema["parameters"]
    assert parameters["required"] == ["title", "pages"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"] == {
        "title": {"type": "string", "description": "What it is called, in full."},
        "pages": {"type": "integer", "description": "How many."},
        "price": {"type": "number"},
        "kind": {"enum": ["paper", "cloth"]},
        "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "sizes": {"type": "object", "additionalProperties": {"type": "number"}},
        "signed": {"type": "boolean"},
        "shelf": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    }
    json.dumps(schema)


def test_a_function_without_a_docstring_has_an_empty_description() -> None:
    def f(a: int) -> int:
        return a

    assert tool(f).schema["function"]["description"] == ""


def _positional(a: int, /) -> int:
    return a


def _many(*a: int) -> int:
    return 0


def _keywords(**a: int) -> int:
    return 0


def _bare(a) -> int:  # type: ignore[no-untyped-def]
    return 0


def _odd(a: Callable[[], int]) -> int:
    return 0


def _keys(a: dict[int, str]) -> int:
    return 0


def _set(a: list[set[int]]) -> int:
    return 0


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (_positional, "tool `_positional`, parameter `a` is positional-only"),
        (_many, "parameter `a` is variadic positional"),
        (_keywords, "parameter `a` is variadic keyword"),
        (_bare, "parameter `a` has no annotation"),
        (_odd, "parameter `a` has annotation `collections.abc.Callable"),
        (_keys, "which has no JSON schema"),
        (_set, "which has no JSON schema"),
    ],
)
def test_a_parameter_without_a_schema_is_named(fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tool(fn)
    assert message in str(caught.value)


BOOK = signature_of(book, "book")


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ('{"title": "a", "pages": 3}', {"title": "a", "pages": 3}),
        ('{"title": "a", "pages": 3.0}', {"title": "a", "pages": 3}),
        ('{"title": "a", "pages": 3, "price": 2}', {"title": "a", "pages": 3, "price": 2.0}),
        (
            '{"title": "", "pages": 0, "kind": "cloth", "tags": ["x"], "sizes": {"h": 1}}',
            {"title": "", "pages": 0, "kind": "cloth", "tags": ["x"], "sizes": {"h": 1.0}},
        ),
        ('{"title": "a", "pages": 3, "tags": null}', {"title": "a", "pages": 3, "tags": None}),
    ],
)
def test_arguments_become_the_annotated_types(arguments: str, values: dict[str, Any]) -> None:
    got = arguments_of(arguments, BOOK)
    assert got == values
    assert [type(v) for v in got.values()] == [type(v) for v in values.values()]


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ('{"title": ', "malformed", "not valid JSON"),
        ("[1, 2]", "malformed", "must be a JSON object with the parameters' names as keys"),
        ('"x"', "malformed", "got text"),
        ("7", "malformed", "got a number"),
        ("null", "malformed", "got null"),
        ("true", "malformed", "got a truth value"),
        ('{"pages": NaN}', "malformed", "NaN is not a JSON value"),
        ("[" * 100_000, "malformed", "not valid JSON"),
        ('{"pages": ' + "9" * 5_000 + "}", "malformed", "not valid JSON"),
        ("", "arguments", "missing argument `title` (text); missing argument `pages` (an integer)"),
        ('{"title": "a", "pages": "3"}', "arguments", 'must be an integer, got text "3"'),
        ('{"title": "a", "pages": true}', "arguments", "integer, got a truth value true"),
        ('{"title": "a", "pages": 1.5}', "arguments", "must be an integer, got a number 1.5"),
        ('{"title": null, "pages": 1}', "arguments", "argument `title` must be text, got null"),
        ('{"title": "a", "pages": 1, "kind": "x"}', "arguments", 'must be one of "paper", "cloth"'),
        ('{"title": "a", "pages": 1, "tags": [1]}', "arguments", "a list, each entry text or null"),
        ('{"title": "a", "pages": 1, "page": 2}', "arguments", "unknown argument `page` (did you"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_say_why(arguments: str, kind: str, message: str) -> None:
    with pytest.raises(BadArguments) as caught:
        arguments_of(arguments, BOOK)
    assert caught.value.kind == kind
    assert message in str(caught.value)
    assert len(str(caught.value)) < 600


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(["title", "pages", "price", "kind", "tags", "sizes", "signed", "x"])


@given(st.dictionaries(NAMES, JSON) | JSON)
def test_any_json_is_either_refused_or_fits_the_signature(value: Any) -> None:
    try:
        got = arguments_of(json.dumps(value), BOOK)
    except BadArguments:
        return
    assert isinstance(got["title"], str)
    assert type(got["pages"]) is int
    assert type(got.get("price", 1.0)) is float
    assert got.get("kind", "paper") in ("paper", "cloth")
    assert all(isinstance(tag, str) for tag in got.get("tags") or [])


@given(st.text(max_size=50))
def test_any_text_is_either_refused_or_read(text: str) -> None:
    try:
        arguments_of(text, BOOK)
    except BadArguments as error:
        assert str(error)
