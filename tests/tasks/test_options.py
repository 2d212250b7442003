"""Options of a source against the fields of its dataclass."""

from __future__ import annotations

import datetime
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Optional

import pytest

from treadle.errors import ConfigError
from treadle.tasks.options import check_options


class Colour(enum.Enum):
    RED = "r"
    BLUE = "b"


@dataclass
class Options:
    count: int = 1
    share: float = 0.5
    kind: Literal["a", "b"] = "a"
    maybe: Optional[int] = None  # noqa: UP045 - as libraries write it
    words: list[str] = field(default_factory=list)
    pair: tuple[int, float] = (1, 1.0)
    many: tuple[str, ...] = ()
    styles: Sequence[str] = ()
    bare: tuple = ()
    colour: Colour = Colour.RED
    day: datetime.date = datetime.date(2020, 1, 1)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", 3, 3),
        ("share", 1, 1.0),
        ("kind", "b", "b"),
        ("maybe", None, None),
        ("maybe", 4, 4),
        ("words", ["x"], ["x"]),
        ("pair", [1, 2], (1, 2.0)),
        ("many", ["x", "y"], ("x", "y")),
        ("styles", ("x",), ["x"]),
        ("bare", "x", "x"),
        ("colour", "BLUE", Colour.BLUE),
        ("colour", "b", Colour.BLUE),
        ("day", "2026-02-03", datetime.date(2026, 2, 3)),
    ],
)
def test_json_values_become_the_fields_types(name: str, value: Any, expected: Any) -> None:
    got = check_options(Options, {name: value}, "x:y")[name]
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", "3", "option `count` of x:y must be an integer, got '3'"),
        ("count", 1.5, "must be an integer, got 1.5"),
        ("count", True, "must be an integer, got True"),
        ("share", "x", "must be a number"),
        ("kind", "c", "must be one of `a`, `b`, got 'c'"),
        ("maybe", "x", "must be an integer or null"),
        ("words", "abc", "must be a list of text"),
        ("words", [1], "must be a list of text"),
        ("pair", [1], "must be a list of an integer, a number"),
        ("colour", "green", "must be one of `RED`, `BLUE`"),
        ("day", "soon", "must be a date like"),
    ],
)
def test_a_wrong_type_names_option_type_and_value(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(Options, {name: value}, "x:y")
    assert message in str(caught.value)


def test_unknown_and_owned_options() -> None:
    with pytest.raises(ConfigError, match=r"unknown option `cuont`.*\n.*did you mean `count`"):
        check_options(Options, {"cuont": 1}, "x:y")
    with pytest.raises(ConfigError, match="option `count` of x:y cannot be set\nhint: because"):
        check_options(Options, {"count": 1}, "x:y", owned={"count": "because"})
