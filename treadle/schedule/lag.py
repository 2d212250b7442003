"""One definition of lag (contract 4).

The version of a token is the policy version that sampled it. Its lag is

    (version served when its step begins to train) - (its own version)

in versions, time in queues included. With one publication per step, synchronous training has
lag 0 everywhere. A group's lag is the largest of its tokens' lags: that of its oldest token.

Takes: versions. Gives: lags in versions, >= 0.
"""

from collections.abc import Iterable

from treadle.errors import ContractError


def token_lags(versions: Iterable[int], *, training_version: int) -> tuple[int, ...]:
    """Lag of every sampled token; entries of -1 (not sampled) are left out.

    Raises ContractError when a token is newer than the weights that train on it.
    """
    lags = tuple(training_version - v for v in versions if v >= 0)
    if any(lag < 0 for lag in lags):
        raise ContractError(
            f"a token was sampled by version {training_version - min(lags)}, newer than the "
            f"version {training_version} that trains on it",
            hint="a version must be published before it samples",
        )
    return lags


def group_lag(oldest_version: int, *, training_version: int) -> int:
    """Lag of a group, from the oldest version of any of its tokens."""
    return token_lags([oldest_version], training_version=training_version)[0]
