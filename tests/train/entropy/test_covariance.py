"""Clip-Cov and KL-Cov: the right tokens, chosen alike however the step is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.train.entropy import canonical_order, clip_cov, covariance, kl_cov
from treadle.types import Sample

OPTIONS = {"share": 0.05, "bounds": (1.0, 5.0), "seed": 3, "step": 7}


def case(n: int = 400, seed: int = 0):
    generator = np.random.default_rng(seed)
    return (
        generator.normal(size=n).astype(np.float32),
        -np.abs(generator.normal(2, 2, size=n)).astype(np.float32),
    )


def test_covariance_by_hand() -> None:
    """A = [1, -1, 3], logp = [-1, -2, -6]: means 1 and -3."""
    c = covariance(np.array([1.0, -1.0, 3.0]), np.array([-1.0, -2.0, -6.0]))
    assert c.tolist() == [0.0, -2.0, -6.0]
    assert c.dtype == np.float64


def test_the_mean_of_it_is_the_covariance() -> None:
    a, lp = case()
    assert covariance(a, lp).mean() == pytest.approx(np.cov(a, lp, ddof=0)[0, 1], rel=1e-5)


def test_clip_cov_takes_free_tokens_of_the_window_alone() -> None:
    a, lp = case()
    c, free, rank = covariance(a, lp), np.arange(len(a)) % 3 > 0, np.arange(len(a))
    mask = clip_cov(a, lp, free, rank, **OPTIONS)
    assert mask.sum() == 20
    assert free[mask].all() and (c[mask] > 1).all() and (c[mask] < 5).all()
    every = clip_cov(a, lp, free, rank, **(OPTIONS | {"share": 1.0}))
    assert np.array_equal(every, free & (c > 1) & (c < 5)), "fewer than wanted are all taken"


def test_clip_cov_takes_at_least_one_and_none_where_none_is_in_the_window() -> None:
    a, lp = case()
    free, rank = np.ones(len(a), bool), np.arange(len(a))
    assert clip_cov(a, lp, free, rank, **(OPTIONS | {"share": 1e-9})).sum() == 1
    assert clip_cov(0 * a, lp, free, rank, **OPTIONS).sum() == 0


def test_the_random_choice_is_a_function_of_seed_and_step() -> None:
    a, lp = case()
    free, rank = np.ones(len(a), bool), np.arange(len(a))
    masks = [
        clip_cov(a, lp, free, rank, **(OPTIONS | {"seed": seed, "step": step}))
        for seed, step in ((3, 7), (3, 7), (3, 8), (4, 7))
    ]
    assert np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks[0], masks[2]) and not np.array_equal(masks[0], masks[3])


def test_kl_cov_takes_the_largest() -> None:
    a, lp = case()
    mask = kl_cov(a, lp, np.arange(len(a)), share=0.02)
    c = covariance(a, lp)
    assert mask.sum() == 8 and c[mask].min() > c[~mask].max()
    assert kl_cov(a, lp, np.arange(len(a)), share=1e-9).sum() == 1


def test_equal_covariances_are_taken_in_canonical_order() -> None:
    a, lp = np.array([1.0, 1.0, -2.0]), np.array([-1.0, -1.0, -4.0])
    c = covariance(a, lp)
    assert c[0] == c[1] < c[2]
    first = kl_cov(a, lp, np.array([0, 1, 2]), share=0.7)
    other = kl_cov(a, lp, np.array([1, 0, 2]), share=0.7)
    assert first.tolist() == [True, False, True] and other.tolist() == [False, True, True]


def sample(ordinal: int, name: str, ids: tuple[int, ...]) -> Sample:
    n = len(ids)
    given = {"advantages": (math.nan, *[1.0] * (n - 1))}
    if "advantages" not in Sample.__slots__:
        given = {"advantage": 1.0}
    return Sample(
        trajectory_id=name,
        ordinal=ordinal,
        ids=ids,
        trained=(False, *[True] * (n - 1)),
        logprobs=(math.nan, *[-1.0] * (n - 1)),
        versions=(-1, *[0] * (n - 1)),
        temperature=1.0,
        **given,
    )


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_any_order_of_rows_and_any_split_give_the_same_ranks_and_choices(random) -> None:
    samples = [sample(i // 3, f"{i // 3}/{i % 3}", tuple(range(i % 4 + 2))) for i in range(12)]
    tokens = [(i, t) for i, s in enumerate(samples) for t in range(1, len(s.ids))]
    a, lp = case(len(tokens))
    free = np.ones(len(tokens), bool)

    def chosen(order: list[int]) -> tuple[set, set]:
        """Names of chosen tokens, when rows come in this order and tokens after them."""
        rows = [samples[i] for i in order]
        places = sorted(range(len(tokens)), key=lambda k: order.index(tokens[k][0]))
        row = np.array([order.index(tokens[k][0]) for k in places])
        rank = canonical_order(rows, row, np.array([tokens[k][1] for k in places]))
        assert sorted(rank.tolist()) == list(range(len(tokens)))
        x, y = a[places], lp[places]
        one = clip_cov(x, y, free, rank, **(OPTIONS | {"bounds": (0.1, 9.0)}))
        two = kl_cov(x, y, rank, share=0.1)
        return ({places[k] for k in np.flatnonzero(m)} for m in (one, two))  # type: ignore[return-value]

    order = list(range(12))
    random.shuffle(order)
    assert [*chosen(order)] == [*chosen(list(range(12)))]
