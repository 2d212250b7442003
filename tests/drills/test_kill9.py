"""Contract 11 under SIGKILL: nothing lost, nothing trained twice, the same bits."""

import pytest

from tests.drills.kill9 import drill


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_run_killed_twenty_times_equals_one_that_was_left_alone(tmp_path):
    result = drill(kills=20, steps=40, seed=1, root=tmp_path)
    assert result["ok"], result
