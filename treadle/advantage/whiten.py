"""To mean 0 and deviation 1 over a whole batch, counting only what is trained.

Guarantees: what is not counted never enters arithmetic and comes back as NaN; the result does not
depend on the order of the values; values that are all equal give exactly 0.

Takes: values and how often each counts. Gives: values of the same shape, dimensionless.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treadle.advantage.judged import equal
from treadle.errors import ContractError

EPSILON = 1e-8
"""Added to the variance, inside of the root, in squared units of the values."""


def whiten(values: ArrayLike, counts: ArrayLike) -> NDArray[np.float64]:
    """(x - mean) / sqrt(variance + EPSILON), the variance with denominator N - 1.

    Args:
        values: finite where counted; anything, NaN included, elsewhere.
        counts: of the same shape, >= 0: a trained mask for tokens, or the number of trained tokens
            that share a value. N is their sum over the batch of all ranks: of a micro-batch or a
            rank the result would depend on the split.

    Source: the masked whitening of PPO implementations (TRL, verl), after GAE (arXiv:1506.02438).
    """
    weights = np.asarray(counts, dtype=np.float64)
    used = weights > 0
    x = np.where(used, np.asarray(values, dtype=np.float64), 0.0)
    if not np.isfinite(x).all():
        raise ContractError(
            f"{int((~np.isfinite(x)).sum())} of {int(used.sum())} values to be whitened over the "
            "batch are not finite"
        )
    total = math.fsum(weights.ravel().tolist())
    if equal(x[used].tolist()):
        return np.where(used, 0.0, np.nan)
    mean = math.fsum((x * weights).ravel().tolist()) / total
    centred = np.where(used, x - mean, 0.0)
    variance = math.fsum((centred * centred * weights).ravel().tolist()) / (total - 1)
    return np.where(used, centred / math.sqrt(variance + EPSILON), np.nan)
