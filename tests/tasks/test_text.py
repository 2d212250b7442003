"""Splits by text, numbers at the end of a reply, and the lenient reading."""

from __future__ import annotations

from collections import Counter
from datetime import date
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import DataError
from treadle.tasks.permutation import permute
from treadle.tasks.text import (
    as_number,
    last_number,
    normalise,
    says,
    split_by_date,
    split_of,
)

TEXT = st.text(max_size=60)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 + 5 = 12", "12"),
        ("12.", "12"),
        ("The answer is **1,234.50**!", "1234.5"),
        ("10-5", "5"),
        ("x = -5", "-5"),
        ("(-5)", "-5"),
        ("it is \u22125 degrees", "-5"),
        ("3) 4", "4"),
        ("0.5", "0.5"),
        ("about .5", "0.5"),
        ("1, 2", "2"),
        ("12,34", "34"),
        ("1,234,567", "1234567"),
        ("007", "7"),
    ],
)
def test_the_last_number_of_a_reply_by_hand(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none", "\u0661\u0662", "--", "\x00", "e.g."])
def test_a_reply_without_a_number_has_no_last_number(text: str) -> None:
    assert last_number(text) is None


@given(
    TEXT,
    st.decimals(
        allow_nan=False, allow_infinity=False, places=3, max_value=10**9, min_value=-(10**9)
    ),
)
def test_a_number_at_the_end_is_found_whatever_precedes_it(before: str, number: Decimal) -> None:
    assert last_number(f"{before} = {number}") == number
    assert says(f"{before} = {number}.", str(number))


@given(st.text(max_size=300), st.text(max_size=30))
def test_reading_any_reply_neither_raises_nor_depends_on_space_around_it(a: str, b: str) -> None:
    assert says(a, b) == says(f"  {a}\n", b)
    as_number(a)


@pytest.mark.parametrize(
    ("reply", "gold", "expected"),
    [
        ("7 + 5 = 12", "12", True),
        ("12 apples, or 13", "12", False),
        ("The answer is: **Yes**.", "yes", True),
        ("the eyes", "yes", False),
        ("Yes or no", "yes", False),
        ("it is [1,  2, 3]", "[1, 2, 3]", True),
        ("  New   York\n", "new york", True),
        ("$12.00", "12", True),
        ("anything", "", False),
        ("", "", True),
        ("[]", "[]", True),
        ("x []", "[]", False),
        ("", "12", False),
    ],
)
def test_the_lenient_reading_by_hand(reply: str, gold: str, expected: bool) -> None:
    assert says(reply, gold) is expected


def test_a_huge_reply_is_read_in_linear_time_and_without_error() -> None:
    assert last_number("1,234" * 40_000) is not None
    assert last_number("9" * 100_000) == Decimal("9" * 100_000)
    assert not says("- " * 100_000, "5")


@given(TEXT)
def test_texts_that_are_equal_but_for_case_and_space_share_a_split(text: str) -> None:
    assert split_of(text) == split_of(f"  {text}  ") == split_of(normalise(text))
    assert normalise(normalise(text)) == normalise(text)


def test_splits_take_about_80_10_10_percent_of_distinct_texts() -> None:
    counts = Counter(split_of(f"question {i}") for i in range(4_000))
    assert 3_100 < counts["train"] < 3_300
    assert 330 < counts["val"] < 470
    assert 330 < counts["test"] < 470


def test_the_split_of_a_text_never_changes_between_versions() -> None:
    """A held-out question of an old run must not become a training question of a new one."""
    found = "".join(split_of(f"{i} + {i} =")[1] for i in range(20))
    assert found == "raeaerrrrrrrrerarrar", "second letters of train, val, test"


def test_dated_splits_keep_everything_new_out_of_training() -> None:
    cut = date(2026, 6, 1)
    assert split_by_date("a", "2026-06-01", cut) == "test"
    assert split_by_date("a", "2026-06-01T10:00:00Z", cut) == "test"
    old = Counter(split_by_date(f"q{i}", "2026-05-31", cut) for i in range(500))
    assert set(old) == {"train", "val"} and old["val"] < 100
    with pytest.raises(DataError, match="'June' is not a date"):
        split_by_date("a", "June", cut)


@given(st.integers(1, 400), st.integers(0, 10**6))
def test_a_permutation_visits_every_index_once(n: int, key: int) -> None:
    assert sorted(permute(i, n, key) for i in range(n)) == list(range(n))


def test_a_permutation_is_seekable_shuffles_and_refuses_what_is_outside() -> None:
    assert permute(10**12, 10**13, "a") == permute(10**12, 10**13, "a")
    moved = sum(permute(i, 1000, "a") != i for i in range(1000))
    assert moved > 950
    same = sum(permute(i, 1000, "a") == permute(i, 1000, "b") for i in range(1000))
    assert same < 20
    for index in (-1, 5):
        with pytest.raises(IndexError, match="outside of 5 items"):
            permute(index, 5, "a")
