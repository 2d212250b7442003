"""Random seeds as a pure function of where in the run they are used (contract 11).

Takes: (seed, ordinal, sample, turn). Gives: 63-bit seeds that do not depend on batch, order,
retries or process.
"""

from __future__ import annotations

from hashlib import blake2b


def derive(seed: int, *path: int) -> int:
    """A seed in [0, 2**63) for a place in the run, e.g. derive(seed, ordinal, sample, turn)."""
    text = "/".join(str(p) for p in (seed, *path))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
