"""Means with intervals that respect how the answers were drawn.

Several samples of one question are not independent: the question is the unit. So a rate is the
mean over questions of the mean over their samples, and its standard error comes from the spread
between questions (clustered by task). Two evaluations of the same questions are compared by
their difference per question (paired), which removes the questions' own spread.

Intervals are 95%, Student's t over questions, cut at the bounds of what is measured: a rate of
scores in [0, 1] lies there, its gain in [-1, 1]. Where all n questions have one value c, their
spread says nothing. Then none of n was seen to differ, so at most

    q = z^2 / (n + z^2)

of all questions do (Wilson's score interval for 0 of n), each by no more than the bounds [a, b]
allow, and the interval is [c - q (c - a), c + q (b - c)]. For 0 or n successes that is Wilson's.

Several task sets are averaged with equal weight; their errors are added in quadrature, those
downwards and those upwards apart. Unscored answers are left out, never counted as 0.

Takes: scores per question. Gives: `Estimate`s.

Sources: E. B. Wilson, Probable inference, the law of succession, and statistical inference (JASA
    22, 1927); G. Y. Zou and A. Donner, Construction of confidence limits about effect measures
    (Statistics in Medicine 27, 2008), for sums of parts whose intervals are not symmetric.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean with its uncertainty; `n` distinct questions."""

    mean: float
    ci95: tuple[float, float]
    """Lower and upper bound; (nan, nan) with fewer than two questions, and where all questions
    have one value and nothing bounds what is measured."""
    n: int

    def to_dict(self) -> dict[str, object]:
        """JSON values; NaN becomes null."""
        finite = [None if math.isnan(v) else v for v in (self.mean, *self.ci95)]
        return {"mean": finite[0], "ci95": finite[1:], "n": self.n}


_SAME = 1e-12
"""Question means this close are equal: they differ by rounding."""

Scores = Mapping[str, Sequence[float | None]]
"""Question id -> scores of its samples; None = unscored."""


def rate(scores: Scores) -> Estimate:
    """Mean over questions of the mean over their scored samples."""
    means = [fmean(values) for values in _scored(scores).values()]
    return _estimate(means, (0.0, 1.0) if _are_rates(means) else None)


def paired_gain(before: Scores, after: Scores) -> Estimate:
    """Mean of (after - before) over the questions that both have."""
    first, second = _scored(before), _scored(after)
    pairs = [(fmean(first[q]), fmean(second[q])) for q in first if q in second]
    bounds = (-1.0, 1.0) if _are_rates([value for pair in pairs for value in pair]) else None
    return _estimate([after - before for before, after in pairs], bounds)


def average(estimates: Iterable[Estimate]) -> Estimate:
    """Equal-weight mean of independent estimates; `n` adds up.

    The interval is normal: each part has its own t quantile already.
    """
    parts = list(estimates)
    if not parts:
        return Estimate(mean=math.nan, ci95=(math.nan, math.nan), n=0)
    mean = fmean(e.mean for e in parts)
    below = math.sqrt(sum((e.mean - e.ci95[0]) ** 2 for e in parts)) / len(parts)
    above = math.sqrt(sum((e.ci95[1] - e.mean) ** 2 for e in parts)) / len(parts)
    return Estimate(mean=mean, ci95=(mean - below, mean + above), n=sum(e.n for e in parts))


def pass_at_k(scores: Scores, k: int, *, threshold: float = 1.0) -> float:
    """Unbiased share of questions solved by at least one of k samples.

    1 - C(n-c, k)/C(n, k) per question with n samples of which c pass (arXiv:2107.03374). NaN
    when no question has k scored samples.
    """
    shares: list[float] = []
    for values in _scored(scores).values():
        n, c = len(values), sum(v >= threshold for v in values)
        if n >= k:
            shares.append(1.0 - math.comb(n - c, k) / math.comb(n, k))
    return fmean(shares) if shares else math.nan


def _scored(scores: Scores) -> dict[str, list[float]]:
    kept = {q: [v for v in values if v is not None] for q, values in scores.items()}
    return {q: values for q, values in kept.items() if values}


def _are_rates(values: Sequence[float]) -> bool:
    return all(0 <= value <= 1 for value in values)


def _estimate(values: Sequence[float], bounds: tuple[float, float] | None) -> Estimate:
    """Of one value per question; `bounds` = what a value can be, None = anything."""
    n = len(values)
    if n == 0:
        return Estimate(mean=math.nan, ci95=(math.nan, math.nan), n=0)
    mean = fmean(values)
    if n == 1:
        return Estimate(mean=mean, ci95=(math.nan, math.nan), n=1)
    least, most = bounds or (-math.inf, math.inf)
    if max(values) - min(values) > _SAME:
        half = t_quantile(0.975, n - 1) * math.sqrt(variance(values) / n)
        return Estimate(mean=mean, ci95=(max(least, mean - half), min(most, mean + half)), n=n)
    if bounds is None:
        return Estimate(mean=mean, ci95=(math.nan, math.nan), n=n)
    z2 = NormalDist().inv_cdf(0.975) ** 2
    others = z2 / (n + z2)
    return Estimate(
        mean=mean, ci95=(mean - others * (mean - least), mean + others * (most - mean)), n=n
    )


def t_quantile(p: float, df: int) -> float:
    """Student's t quantile, p in (0.5, 1).

    Exact for df 1 and 2; else the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5),
    within 0.6% at df = 3 and 0.02% from df = 8 for p = 0.975.
    """
    if df == 1:
        return math.tan(math.pi * (p - 0.5))
    if df == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    g4 = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + g1 / df + g2 / df**2 + g3 / df**3 + g4 / df**4
