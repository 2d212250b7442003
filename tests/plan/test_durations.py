"""Duration samples: means against closed forms and draws, the parser against hostile text."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import ConfigError, DataError, TreadleError
from treadle.plan import durations as D


def harmonic(n: int) -> float:
    return sum(1 / k for k in range(1, n + 1))


def test_exponential_moments_and_longest_of_a_group_are_exact():
    found = D.exponential(20)
    assert found.mean_s == pytest.approx(20, rel=1e-6)
    assert found.mean_square == pytest.approx(2 * 20**2, rel=1e-3)
    for size in (1, 2, 8, 16, 1024):
        assert found.tailness(size) == pytest.approx(harmonic(size), rel=1e-4)


def test_lognormal_moments_are_exact_and_the_mean_is_the_mean_not_the_median():
    found = D.lognormal(20, 1)
    assert found.mean_s == pytest.approx(20, rel=1e-5)
    assert found.mean_square == pytest.approx(400 * math.e, rel=1e-4)
    assert found.quantile(0.5) == pytest.approx(20 * math.exp(-0.5), rel=5e-3)


def test_the_longest_of_two_lognormals_by_hand():
    """E[max of 2] = 2 * mean * Phi(sigma / sqrt 2)."""
    for sigma in (0.3, 1.0, 2.0):
        phi = 0.5 * math.erfc(-sigma / math.sqrt(2) / math.sqrt(2))
        found = D.lognormal(7, sigma).mean_longest_s(2)
        assert found == pytest.approx(2 * 7 * phi, rel=1e-4)


def test_the_longest_as_a_token_sees_it_by_hand():
    """Two values 1 and 3, groups of 2: E[L max] = (1*1 + 3*3 + 1*3 + 3*3) / 4, E[L] = 2."""
    sample = D.measured([1, 3])
    assert sample.mean_longest_s(2) == pytest.approx((1 + 3 + 3 + 3) / 4)
    assert sample.token_weighted_longest_s(2) == pytest.approx(22 / 4 / 2)
    assert sample.token_weighted_longest_s(1) == pytest.approx((1 + 9) / 2 / 2)


@pytest.mark.parametrize(
    "text",
    ["exp:mean=3", "lognormal:mean=3,sigma=0.8", "lognormal:mean=3,sigma=1.2,clip=24", "fixed:3"],
)
def test_draws_have_the_means_that_are_said(text):
    found = D.parse(text)
    drawn = found.draw(np.random.default_rng(1), 40_000, 8)
    assert drawn.shape == (40_000, 8)
    assert drawn.mean() == pytest.approx(found.mean_s, rel=0.01)
    longest = drawn.max(axis=1)
    assert longest.mean() == pytest.approx(found.mean_longest_s(8), rel=0.02)
    by_token = (drawn * longest[:, None]).mean() / drawn.mean()
    assert by_token == pytest.approx(found.token_weighted_longest_s(8), rel=0.03)
    for p in (0.1, 0.5, 0.95):
        assert np.quantile(drawn, p) == pytest.approx(found.quantile(p), rel=0.02)


def test_draws_depend_on_the_generator_alone():
    found = D.parse("lognormal:mean=3,sigma=1")
    one, two = (found.draw(np.random.default_rng(5), 10, 4) for _ in range(2))
    assert np.array_equal(one, two)


def test_a_clip_caps_draws_and_means_and_the_mean_is_said_before_it():
    found = D.parse("exp:mean=10,clip=10")
    assert found.mean_s == pytest.approx(10 * (1 - math.exp(-1)), rel=1e-3)
    assert found.draw(np.random.default_rng(0), 1000, 2).max() == 10
    assert found.quantile(0.99) == 10


def test_a_heavier_spread_keeps_the_mean_and_is_the_lognormal_of_the_larger_sigma():
    found = D.lognormal(20, 1).spread(1.2)
    assert found.mean_s == pytest.approx(20, rel=1e-5)
    assert found.tailness(8) == pytest.approx(D.lognormal(20, 1.2).tailness(8), rel=1e-3)
    drawn = found.draw(np.random.default_rng(0), 100_000, 1)
    assert drawn.mean() == pytest.approx(20, rel=0.02)


def test_scaling_time_scales_every_mean():
    base, twice = D.lognormal(20, 1), D.lognormal(20, 1).scaled(2)
    assert twice.mean_longest_s(8) == pytest.approx(2 * base.mean_longest_s(8))
    assert twice.tailness(8) == pytest.approx(base.tailness(8))


def test_whole_groups_keep_what_is_alike_within_them():
    """Groups of equal durations have no tail, whatever the spread between groups."""
    groups = [[1.0] * 4, [9.0] * 4]
    kept, loose = D.measured_groups(groups), D.measured([v for g in groups for v in g])
    assert kept.tailness(4) == pytest.approx(1.0)
    assert loose.tailness(4) == pytest.approx((1 / 16 + 9 * 15 / 16) / 5)
    drawn = kept.draw(np.random.default_rng(0), 50, 4)
    assert (drawn == drawn[:, :1]).all()
    assert kept.token_weighted_longest_s(4) == pytest.approx((1 + 81) / 2 / 5)
    with pytest.raises(ConfigError, match="groups of 4, the group size asked for is 8"):
        kept.tailness(8)


@pytest.mark.parametrize(
    ("name", "content", "mean_s"),
    [
        ("a.json", "[1, 2, 3.0]", 2.0),
        ("a.json", "[[1, 2], [3, 6]]", 3.0),
        ("a.csv", "1\n2\n\n3\n", 2.0),
        ("a.csv", "duration_s\n1\n3\n", 2.0),
        ("a.csv", "id,seconds,reward\na,1,0\nb,5,1\n", 3.0),
        ("a.csv", "\ufeffseconds\n4\n", 4.0),
    ],
)
def test_files_of_seconds(tmp_path, name, content, mean_s):
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert D.parse(str(tmp_path / name)).mean_s == pytest.approx(mean_s)


def test_a_file_may_be_clipped(tmp_path):
    (tmp_path / "a.json").write_text("[1, 100]")
    assert D.parse(f"{tmp_path / 'a.json'},clip=9").mean_s == pytest.approx(5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "says no durations"),
        ("20", "says no durations"),
        ("lognorml:mean=20", "says no durations"),
        ("lognormal:mean=20", "needs `sigma`"),
        ("lognormal:mean=20,sigma=1,skew=2", "has no `skew`"),
        ("exp:mean=20,sigma=1", "has no `sigma`"),
        ("exp:mean=20,mean=30", "given twice"),
        ("exp:mean=-1", "must be > 0"),
        ("exp:mean=nan", "must be a number"),
        ("exp:mean=1e400", "must be a number"),
        ("exp:mean=1e12", "at most"),
        ("exp:", "must be a number"),
        ("fixed:0", "must be > 0"),
        ("lognormal:mean=20,sigma=40", "between 0 and 3"),
        ("exp:mean=20,clip=0", "`clip` must be > 0"),
        ("gone.json", "cannot be read"),
        ("a\0b.json", "cannot be read"),
    ],
)
def test_text_that_says_nothing_is_refused(text, says):
    with pytest.raises((ConfigError, DataError), match=says) as error:
        D.parse(text)
    assert error.value.exit_code == 2


def test_a_misspelt_kind_is_told_the_right_one():
    with pytest.raises(ConfigError) as error:
        D.parse("lognorml:mean=20,sigma=1")
    assert "did you mean `lognormal`?" in error.value.hint


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "[]", "expected a list"),
        ("a.json", "{}", "expected a list"),
        ("a.json", "[1, ", "not JSON"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", "[1, -2, NaN]", "2 of 3 durations are not between"),
        ("a.json", "[0, 0]", "every duration is 0"),
        ("a.json", "[1, true]", "entry 2 is no number"),
        ("a.json", '[1, "2"]', "entry 2 is no number"),
        ("a.json", "[[1, 2], [3]]", "groups have 1, 2 durations"),
        ("a.json", "[[]]", "groups have 0 durations"),
        ("a.json", "[1, 1e999]", "1 of 2 durations"),
        ("a.json", f"[{'9' * 400}]", "1 of 1 durations"),
        ("a.csv", "", "no durations"),
        ("a.csv", "a,b\n1,2\n", "no column of duration_s"),
        ("a.csv", "1\nx\n", "row 2 has no number"),
        ("a.csv", "duration_s,b\n1,2\n,3\n", "row 3 has no number"),
        ("a.csv", "seconds\n", "no durations"),
    ],
)
def test_files_that_hold_no_durations_are_refused(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=says) as error:
        D.parse(str(tmp_path / name))
    assert error.value.hint


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        D.parse(str(tmp_path / "a.csv"))


pieces = st.sampled_from(
    ["lognormal", "exp", "fixed", ":", ",", "=", "mean", "sigma", "clip", "1", "-1", "nan", "1e9",
     "inf", ".json", ".csv", " ", "\0", "\n", "é", "0", "2.5"]
)  # fmt: skip


@given(st.one_of(st.text(max_size=60), st.lists(pieces, max_size=12).map("".join)))
def test_any_text_is_durations_or_a_usage_error(text):
    try:
        found = D.parse(text)
    except TreadleError as error:
        assert error.exit_code == 2
    else:
        assert found.mean_s > 0 and math.isfinite(found.mean_longest_s(8))


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
                    lambda inner: st.lists(inner, max_size=4), max_leaves=8))  # fmt: skip
def test_any_json_is_durations_or_a_data_error(tree):
    try:
        found = D._from_json(json.dumps(tree), "a.json")
    except DataError:
        return
    assert found.mean_s > 0 and (np.diff(found.values_s) >= 0).all()


@given(
    st.lists(st.floats(0.01, 1e6), min_size=1, max_size=40), st.integers(1, 20), st.integers(1, 20)
)
def test_the_longest_grows_with_the_group_and_stays_within_the_sample(sample, size, more):
    found = D.measured(sample)
    one, two = found.mean_longest_s(size), found.mean_longest_s(size + more)
    slack = 1 + 1e-9
    assert found.mean_s <= one * slack and one <= two * slack <= max(sample) * slack**2
    assert found.token_weighted_longest_s(size) * slack >= found.mean_s
