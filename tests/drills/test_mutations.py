"""Every planted bug is noticed by a test of its room."""

from __future__ import annotations

import pytest

from tests.drills.mutations import BUGS, Bug, noticed


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_makes_a_test_fail(bug: Bug) -> None:
    assert noticed(bug)


def test_there_are_enough_of_them_and_each_has_a_name() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 15
