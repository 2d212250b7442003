"""Contract 11 under SIGKILL: nothing lost, nothing trained twice, the same bits."""

import pytest

from tests.drills.kill9 import drill


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_killed_twenty_times_equals_one_that_was_left_alone(tmp_path):
    result = drill(kills=20, steps=40, seed=1, root=tmp_path)
    assert result["ok"], result


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_killed_run_with_a_minimum_and_a_curriculum_draws_what_it_would_have_drawn(tmp_path):
    result = drill(kills=8, steps=20, seed=2, root=tmp_path, mixed=True)
    assert result["ok"], result
