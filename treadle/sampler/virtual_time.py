"""An asyncio loop on a clock of its own: hours of waiting pass in the time that the work takes.

Guarantees: `loop.time()`, `asyncio.sleep` and every timeout follow the virtual clock, which jumps
to the next timer whenever nothing is ready; equal programs give equal schedules, bit for bit;
a program in which everybody waits for something that no timer will bring ends with ContractError
instead of hanging.

Left out: sockets, signals, threads and subprocesses. Nothing outside may wake such a loop.

Takes: a coroutine. Gives: its result, and the virtual seconds it took (`loop.time()`, from 0).
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from treadle.errors import ContractError

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module. `run_virtual` is the usual way in."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Leap(self))

    def time(self) -> float:
        return self._now_s

    def leap(self, seconds: float) -> None:
        self._now_s += seconds


class _Leap(selectors.SelectSelector):
    """Where a real selector would block, it moves the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise ContractError(
                f"everything waits at {self._loop.time():.3f} s of virtual time and no timer is "
                "set: nothing can ever happen again",
                hint="a wait without a bound, or a wait for another thread",
            )
        if timeout > 0:
            self._loop.leap(timeout)
        return []


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on a `VirtualLoop` that starts at 0 s."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
