"""Shaping terms: reference values and the ends of their range."""

import pytest

from treadle.errors import ConfigError
from treadle.reward.shaping import overlong_penalty


@pytest.mark.parametrize(
    ("length", "wanted"),
    [(0, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0), (30000, -1.0), (16385, -1 / 4096)],
)
def test_reference_values_of_the_overlong_penalty(length, wanted):
    """Limit 20,480, cache 4,096; it never goes below -1, also for longer answers."""
    assert overlong_penalty(length, max_tokens=20480, cache_tokens=4096) == pytest.approx(wanted)


def test_the_factor_scales_it():
    assert overlong_penalty(18, max_tokens=20, cache_tokens=4, factor=2.0) == -1.0


@pytest.mark.parametrize("cache", [0, 21])
def test_a_cache_outside_the_limit_is_a_mistake(cache):
    with pytest.raises(ConfigError, match="between 1 and max_tokens = 20"):
        overlong_penalty(5, max_tokens=20, cache_tokens=cache)
