"""Clip-Cov and KL-Cov: find the few tokens whose updates take most of the entropy away.

A token's share of the entropy that an update costs is c = (A - mean A)(log pi - mean log pi): a
very likely token with a very good advantage sharpens the policy and teaches little. Clip-Cov
takes the gradient of a few of them, KL-Cov holds a few of them to where they were.

Guarantees: means, counts and choices are over all trained tokens of the step, in an order of
their own (`canonical_order`), so they depend neither on the split into micro-batches nor on the
order of rows; random choices are a function of (seed, step, token).

Takes: flat vectors over the trained tokens of the step. Gives: a mask over them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.types import Sample

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def covariance(advantage: Floats, logp: Floats) -> NDArray[np.float64]:
    """c = (A - mean A)(log pi - mean log pi) of each token, in advantage x nats."""
    a, lp = advantage.astype(np.float64), logp.astype(np.float64)
    return (a - a.mean()) * (lp - lp.mean())


def canonical_order(samples: Sequence[Sample], row: Ints, position: Ints) -> Ints:
    """The rank of each token in an order that only the samples themselves decide.

    Args:
        row: index into `samples` of each token.
        position: of the token in its sample's ids.
    """
    order = sorted(
        range(len(samples)),
        key=lambda i: (samples[i].ordinal, samples[i].trajectory_id, samples[i].ids),
    )
    rank_of_row = np.empty(len(samples), dtype=np.int64)
    rank_of_row[order] = np.arange(len(samples))
    rank = np.empty(len(row), dtype=np.int64)
    rank[np.lexsort((position, rank_of_row[row]))] = np.arange(len(row))
    return rank


def clip_cov(
    advantage: Floats,
    logp: Floats,
    free: Bools,
    rank: Ints,
    *,
    share: float,
    bounds: tuple[float, float],
    seed: int,
    step: int,
) -> Bools:
    """max(1, int(share * N)) random tokens of those with lower < c < upper that are still free.

    Args:
        free: False where the loss gives the token no gradient anyway.
        rank: of `canonical_order`.
        share: of all N tokens; 2e-4 in the paper.
        bounds: of c; (1, 5) in the paper. Fewer candidates than wanted are all taken.

    Source: Clip-Cov (arXiv:2505.22617).
    """
    c = covariance(advantage, logp)
    candidates = np.flatnonzero((c > bounds[0]) & (c < bounds[1]) & free)
    # A number for every token, not for every candidate: one that enters or leaves the window by a
    # rounding must not move the choice among the others.
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, step], dtype=np.uint64)))
    draws = generator.random(len(c))[rank]
    return _first(candidates, draws, len(c), share)


def kl_cov(advantage: Floats, logp: Floats, rank: Ints, *, share: float) -> Bools:
    """The max(1, int(share * N)) tokens of largest c; equal ones in canonical order.

    Args:
        share: of all N tokens; 2e-4 to 2e-3 in the paper.

    Source: KL-Cov (arXiv:2505.22617).
    """
    c = covariance(advantage, logp)
    order = np.lexsort((rank, -c))
    places = np.empty(len(c), dtype=np.int64)
    places[order] = np.arange(len(c))
    return _first(np.arange(len(c)), places, len(c), share)


def _first(candidates: Ints, by: NDArray[np.generic], count: int, share: float) -> Bools:
    """A mask over `count` tokens: the max(1, int(share * count)) candidates of smallest `by`."""
    chosen = candidates[np.argsort(by[candidates], kind="stable")][: max(1, int(share * count))]
    mask = np.zeros(count, dtype=np.bool_)
    mask[chosen] = True
    return mask
