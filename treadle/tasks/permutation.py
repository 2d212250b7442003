"""A pure, seekable shuffle: the place of item i among n, without building a list.

A four-round Feistel network over the smallest even number of bits that covers n, walked until
it lands inside [0, n). It is a bijection of [0, n) for every key, costs a few microseconds, and
needs no memory, so an order of a billion rows is as cheap as one of ten.

Takes: an index and a key. Gives: the index at its shuffled place.

Source: cycle-walking cipher, "prefix and cycle walking" in Black and Rogaway, Ciphers with
    Arbitrary Finite Domains (CT-RSA 2002). Quality is that of a shuffle, not of a cipher.
"""

from __future__ import annotations

import hashlib

ROUNDS = 4


def permute(index: int, n: int, *key: int | str) -> int:
    """The `index`-th item of the shuffled range(n). Pure function of its arguments.

    Raises:
        IndexError: `index` is not in [0, n).
    """
    if not 0 <= index < n:
        raise IndexError(f"index {index} is outside of {n} items")
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    secret = "/".join(map(str, key)).encode()
    # The network covers fewer than 4n values, so the walk takes under 4 steps on average.
    while True:
        left, right = index >> half, index & mask
        for number in range(ROUNDS):
            left, right = right, left ^ (_mix(secret, number, right) & mask)
        index = left << half | right
        if index < n:
            return index


def _mix(secret: bytes, number: int, value: int) -> int:
    block = number.to_bytes(1, "big") + value.to_bytes(16, "big")
    return int.from_bytes(hashlib.blake2b(block, key=_key(secret), digest_size=8).digest(), "big")


def _key(secret: bytes) -> bytes:
    return secret if len(secret) <= 64 else hashlib.blake2b(secret, digest_size=64).digest()
