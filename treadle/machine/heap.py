"""Free memory that malloc keeps, given back when it has grown.

`tune` makes malloc keep freed buffers, because faulting them in again costs more than a step's
arithmetic. The price is a heap that grows by fragments: buffers of ever new sizes, of two threads,
between buffers that live on. This gives the free pages back now and then.

Takes: nothing. Gives: bytes given back.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from treadle.machine import host

SLACK_BYTES = 384 << 20
"""Growth of resident memory that passes: about what one step's buffers differ from the next's."""


class Heap:
    """One per process that trains."""

    def __init__(self, slack_bytes: int = SLACK_BYTES) -> None:
        self._slack = slack_bytes
        self._level: int | None = None
        """Resident bytes after the last release."""

    def release(self) -> int:
        """Give free memory back if resident memory has grown by more than the slack.

        Returns the bytes given back: 0 where nothing has grown, or without glibc. About 0.1 s, and
        as much again for the pages that are needed once more.
        """
        before = host.rss_bytes()
        if self._level is not None and before <= self._level + self._slack:
            return 0
        _malloc_trim()(0)
        self._level = host.rss_bytes()
        return max(0, before - self._level)


@functools.cache
def _malloc_trim() -> Callable[[int], object]:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return lambda pad: None
