"""Shaping terms: reference values and the ends of their range."""

import math
from dataclasses import replace

import pytest

from treadle.config import OverlongConfig, RolloutConfig
from treadle.errors import ConfigError
from treadle.reward.shaping import overlong_penalty, shaped
from treadle.types import Node, Party, Reward, Source, Trajectory


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


# --------------------------------------------------------------------------- as a setting


def turns(make, *lengths: int) -> Trajectory:
    """One trajectory of turns of these lengths, with an observation of 30 tokens between them."""
    (node,) = make().nodes

    def said(number: int, tokens: int, sampled: bool) -> Node:
        return replace(
            node,
            id=number,
            parent=number - 1 if number else None,
            source=Source.SAMPLED if sampled else Source.OBSERVATION,
            party=Party.POLICY if sampled else Party.ENVIRONMENT,
            ids=(1,) * tokens,
            trained=(sampled,) * tokens,
            logprobs=(-1.0 if sampled else math.nan,) * tokens,
            versions=(0 if sampled else -1,) * tokens,
        )

    counts = [n for length in lengths for n in (length, 30)][:-1]
    return replace(make(), nodes=tuple(said(i, n, i % 2 == 0) for i, n in enumerate(counts)))


def rollout(*, buffer_tokens: int | None = None, penalty: float = 1.0) -> RolloutConfig:
    overlong = OverlongConfig(buffer_tokens=buffer_tokens, penalty=penalty)
    return RolloutConfig(max_new_tokens=20, overlong=overlong)


@pytest.mark.parametrize(
    ("length", "taken"), [(1, 0.0), (15, 0.0), (16, 0.0), (17, -0.25), (19, -0.75), (20, -1.0)]
)
def test_the_setting_takes_the_penalty_off_as_a_part_of_its_own(make, length, taken):
    """20 tokens at most, a buffer of a fifth: 4."""
    before = Reward(value=1.0, parts={"score": 1.0})
    after = shaped(before, turns(make, length), rollout())
    assert after.value == 1.0 + taken
    assert after.parts == {"score": 1.0, "overlong": taken}
    assert str(after.parts["overlong"]) != "-0.0"
    assert after.earned == 1.0 and after.solved


def test_buffer_and_size_of_the_penalty_can_be_set(make):
    after = shaped(Reward(value=0.0), turns(make, 15), rollout(buffer_tokens=10, penalty=0.5))
    assert after.parts == {"overlong": -0.25} and after.value == -0.25
    assert after.earned == 0.0 and not after.solved


def test_it_is_the_longest_turn_that_counts_not_their_sum_nor_what_was_read(make):
    assert shaped(Reward(value=1.0), turns(make, 9, 9, 9), rollout()).value == 1.0
    assert shaped(Reward(value=1.0), turns(make, 2, 18, 3), rollout()).value == 0.5


@pytest.mark.parametrize("penalty", [0.1, 0.3, 0.7, 1 / 3, 2.9])
@pytest.mark.parametrize("value", [1.0, 0.0, 0.25])
def test_what_was_earned_is_found_again_whatever_the_sum_was_rounded_to(make, penalty, value):
    after = shaped(Reward(value=value), turns(make, 19), rollout(penalty=penalty))
    assert after.earned == value and after.solved == (value == 1.0)


def test_without_the_setting_and_without_a_score_nothing_changes(make):
    scored, unscored = Reward(value=1.0), Reward(value=None)
    assert shaped(scored, turns(make, 20), RolloutConfig(max_new_tokens=20)) is scored
    assert shaped(unscored, turns(make, 20), rollout()) is unscored


@pytest.mark.parametrize("config", [rollout(), RolloutConfig()])
def test_a_reward_with_a_part_of_that_name_is_refused_with_and_without_the_setting(make, config):
    """Read as the penalty, it would be added back to what was earned."""
    found = shaped(Reward(value=1.0, parts={"overlong": 0.5}), turns(make, 20), config)
    assert found.value is None and found.error is not None
    assert "`overlong`" in found.error.message and "another name" in found.error.hint
