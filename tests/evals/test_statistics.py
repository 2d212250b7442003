"""Intervals: against tables, by hand, and on simulated questions."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.evals.statistics import average, paired_gain, pass_at_k, rate, t_quantile


@pytest.mark.parametrize(
    ("df", "value"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (8, 2.3060), (30, 2.0423), (200, 1.9719)],
)
def test_t_quantiles_match_the_published_table(df, value):
    assert t_quantile(0.975, df) == pytest.approx(value, rel=6e-3 if df == 3 else 3e-4)


def test_the_question_is_the_unit_not_the_sample():
    """Worked by hand: question means .75, .25, .5; sd .25; half width 4.3027 * .25 / sqrt(3)."""
    estimate = rate({"a": [1, 1, 1, 0], "b": [0, 0, 0, 1], "c": [1, 0]})
    assert estimate.n == 3
    assert estimate.mean == pytest.approx(0.5)
    half = 0.62105
    assert estimate.ci95 == (0.0, 1.0), "cut at what a rate can be"
    wide = rate({"a": [3, 3, 3, 0], "b": [0, 0, 0, 3], "c": [3, 0]})
    assert wide.ci95 == pytest.approx((1.5 - 3 * half, 1.5 + 3 * half), rel=1e-3)


@pytest.mark.parametrize("n", [2, 30, 64])
def test_no_success_in_n_questions_bounds_the_rate_and_does_not_claim_certainty(n):
    """Wilson: 0 of n is [0, z^2 / (n + z^2)], n of n its mirror image; 30 gives .1135."""
    none = rate({str(i): [0.0, 0.0] for i in range(n)})
    every = rate({str(i): [1.0] for i in range(n)})
    high = 3.841459 / (n + 3.841459)
    assert none.mean == 0.0 and none.ci95 == pytest.approx((0.0, high), rel=1e-6)
    assert every.mean == 1.0 and every.ci95 == pytest.approx((1 - high, 1.0), rel=1e-6)


def test_equal_rewards_without_bounds_have_no_interval():
    estimate = rate({"a": [100.0], "b": [100.0]})
    assert (estimate.mean, estimate.n) == (100.0, 2)
    assert estimate.to_dict()["ci95"] == [None, None]


UNIT = st.lists(
    st.lists(st.floats(0, 1) | st.none(), min_size=1, max_size=4), min_size=2, max_size=12
)


@given(UNIT, UNIT)
def test_intervals_lie_in_the_range_of_what_they_are_about_and_hold_their_mean(one, two):
    before, after = ({str(i): v for i, v in enumerate(scores)} for scores in (one, two))
    for estimate, least in (
        (rate(before), 0),
        (average([rate(before), rate(after)]), 0),
        (paired_gain(before, after), -1),
        (average([paired_gain(before, after), paired_gain(after, before)]), -1),
    ):
        low, high = estimate.ci95
        if math.isnan(low):
            continue
        assert least - 1e-9 <= low <= estimate.mean + 1e-9
        assert estimate.mean - 1e-9 <= high <= 1 + 1e-9
        assert low < high


def test_repeating_every_sample_does_not_shrink_the_interval():
    scores = {str(i): [float(i % 3 == 0), float(i % 2)] for i in range(20)}
    repeated = {q: v * 10 for q, v in scores.items()}
    assert rate(scores) == rate(repeated)


def test_unscored_is_left_out_and_never_a_zero():
    assert rate({"a": [1.0, None], "b": [None, None], "c": [1.0]}).mean == 1.0
    assert rate({"a": [None]}).n == 0


def test_paired_gain_ignores_how_hard_the_questions_are():
    """Every question improves by exactly .25, whatever their spread. None of 10 was seen to gain
    otherwise: q = 3.8415 / 13.8415 of all might, by -1.25 to +.75."""
    before = {str(i): [1.0, 0, 0, 0] if i % 2 else [0.0, 0, 0, 0] for i in range(10)}
    after = {str(i): [1.0, 1, 0, 0] if i % 2 else [1.0, 0, 0, 0] for i in range(10)}
    gain = paired_gain(before, after)
    assert gain.mean == pytest.approx(0.25)
    q = 0.277532
    assert gain.ci95 == pytest.approx((0.25 - 1.25 * q, 0.25 + 0.75 * q), rel=1e-4)


def test_questions_that_only_one_side_has_do_not_count():
    assert paired_gain({"a": [0.0], "b": [0.0]}, {"b": [1.0], "c": [1.0]}).n == 1


def test_the_interval_covers_the_truth_about_95_times_in_100():
    rng = random.Random(0)
    hits = 0
    for _ in range(400):
        scores = {}
        for q in range(40):
            p = rng.betavariate(1, 1)
            scores[str(q)] = [float(rng.random() < p) for _ in range(4)]
        low, high = rate(scores).ci95
        hits += low <= 0.5 <= high
    assert 0.92 <= hits / 400 <= 0.98


def test_families_are_averaged_with_equal_weight():
    a, b = rate({str(i): [1.0, 0.0] for i in range(4)}), rate({str(i): [1.0] for i in range(9)})
    both = average([a, b])
    assert both.mean == pytest.approx(0.75)
    assert both.n == 13
    # By hand: .5 -+ .5 * 3.8415 / 7.8415 (4 questions) and 1 - 3.8415 / 12.8415 (9 questions).
    assert both.ci95[0] == pytest.approx(0.75 - math.hypot(0.244946, 0.299144) / 2, rel=1e-4)
    assert both.ci95[1] == pytest.approx(0.75 + 0.244946 / 2, rel=1e-4)


def test_pass_at_k_is_the_unbiased_estimate():
    assert pass_at_k({"a": [1, 0, 0, 0]}, 1) == pytest.approx(0.25)
    assert pass_at_k({"a": [1, 0, 0, 0]}, 2) == pytest.approx(0.5)
    assert pass_at_k({"a": [1.0]}, 2) != pass_at_k({"a": [1.0]}, 2)  # nan: too few samples
