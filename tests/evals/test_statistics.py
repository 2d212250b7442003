"""Intervals: against tables, by hand, and on simulated questions."""

import math
import random

import pytest

from treadle.evals.statistics import average, paired_gain, pass_at_k, rate, t_quantile


@pytest.mark.parametrize(
    ("df", "value"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (8, 2.3060), (30, 2.0423), (200, 1.9719)],
)
def test_t_quantiles_match_the_published_table(df, value):
    assert t_quantile(0.975, df) == pytest.approx(value, rel=6e-3 if df == 3 else 3e-4)


def test_the_question_is_the_unit_not_the_sample():
    """Worked by hand: question means 1, 0, .5; sd .5; half width 4.3027 * .5 / sqrt(3)."""
    estimate = rate({"a": [1, 1, 1, 1], "b": [0, 0], "c": [1, 0]})
    assert estimate.n == 3
    assert estimate.mean == pytest.approx(0.5)
    assert estimate.ci95[1] - 0.5 == pytest.approx(4.3027 * 0.5 / math.sqrt(3), rel=1e-3)


def test_repeating_every_sample_does_not_shrink_the_interval():
    scores = {str(i): [float(i % 3 == 0), float(i % 2)] for i in range(20)}
    repeated = {q: v * 10 for q, v in scores.items()}
    assert rate(scores) == rate(repeated)


def test_unscored_is_left_out_and_never_a_zero():
    assert rate({"a": [1.0, None], "b": [None, None], "c": [1.0]}).mean == 1.0
    assert rate({"a": [None]}).n == 0


def test_paired_gain_ignores_how_hard_the_questions_are():
    """Every question improves by exactly .25: the interval is a point, whatever their spread."""
    before = {str(i): [1.0, 0, 0, 0] if i % 2 else [0.0, 0, 0, 0] for i in range(10)}
    after = {str(i): [1.0, 1, 0, 0] if i % 2 else [1.0, 0, 0, 0] for i in range(10)}
    gain = paired_gain(before, after)
    assert gain.mean == pytest.approx(0.25)
    assert gain.ci95 == pytest.approx((0.25, 0.25))


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


def test_pass_at_k_is_the_unbiased_estimate():
    assert pass_at_k({"a": [1, 0, 0, 0]}, 1) == pytest.approx(0.25)
    assert pass_at_k({"a": [1, 0, 0, 0]}, 2) == pytest.approx(0.5)
    assert pass_at_k({"a": [1.0]}, 2) != pass_at_k({"a": [1.0]}, 2)  # nan: too few samples
