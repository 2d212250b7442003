"""Blocking code off the loop, and coroutines from plain code."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from treadle.errors import ContractError
from treadle.threads import in_thread, run, within


def test_a_call_that_hangs_is_left_behind_at_its_limit() -> None:
    release = threading.Event()

    async def main() -> None:
        with pytest.raises(ContractError, match=r"saving step 3 has not ended within 0\.05 s"):
            await within(0.05, "saving step 3", release.wait)

    asyncio.run(main())
    release.set()


def test_a_timeout_of_the_function_itself_stays_what_it_is() -> None:
    def fail() -> None:
        raise TimeoutError("the disk said so")

    async def main() -> None:
        with pytest.raises(TimeoutError, match="the disk said so"):
            await within(5.0, "x", fail)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await in_thread(next, iter(()))
        assert await within(5.0, "x", lambda: 7) == 7

    asyncio.run(main())


async def seven() -> int:
    await asyncio.sleep(0)
    return 7


async def nothing_there() -> None:
    raise KeyError("nothing there")


def test_a_coroutine_runs_from_plain_code_and_from_a_running_loop() -> None:
    async def cell() -> int:
        return run(seven())

    assert run(seven()) == 7
    assert asyncio.run(cell()) == 7

    async def broken_cell() -> None:
        with pytest.raises(KeyError, match="nothing there"):
            run(nothing_there())

    asyncio.run(broken_cell())


def test_an_interrupted_cell_cancels_the_coroutine_and_waits_for_its_clean_up() -> None:
    seen: list[str] = []
    # A shell starts what it runs in the background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    async def long() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        finally:
            time.sleep(0.05)
            seen.append("cleaned up")

    async def cell() -> None:
        run(long())

    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(cell())
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["cleaned up"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_what_would_only_end_a_thread_reaches_the_caller(error: BaseException) -> None:
    def leave() -> None:
        raise error

    async def main() -> None:
        with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
            await asyncio.wait_for(in_thread(leave), 20.0)
        assert caught.value.__cause__ is error
        with pytest.raises(RuntimeError, match=type(error).__name__):
            await within(20.0, "x", leave)

    asyncio.run(main())
