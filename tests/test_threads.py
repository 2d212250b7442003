"""Blocking code off the loop, and coroutines from plain code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time

import pytest

from treadle.errors import ContractError, Terminated
from treadle.threads import contained, in_thread, run, within


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


# ----------------------------------------------------------------------- code of others


async def leaves(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def starts(error: BaseException) -> None:
    task = asyncio.create_task(leaves(error))
    await asyncio.sleep(20)
    await task


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_that_would_end_the_loop_ends_what_started_it(error: BaseException) -> None:
    async def main() -> None:
        beside = asyncio.create_task(seven())
        with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
            await contained(starts(error))
        assert caught.value.__cause__ is error
        current = asyncio.current_task()
        assert current is not None and not current.cancelling()
        assert await beside == 7 and await contained(seven()) == 7

    asyncio.run(main())


def test_a_task_that_outlives_what_started_it_ends_itself_alone() -> None:
    async def main() -> None:
        go = asyncio.Event()

        async def late() -> None:
            await go.wait()
            await asyncio.create_task(leaves(SystemExit(3)))

        async def forgets() -> asyncio.Task[None]:
            return asyncio.create_task(late())

        task = await contained(forgets())
        go.set()
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            await task
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_scope_inside_another_is_the_one_that_ends() -> None:
    async def main() -> None:
        async def outer() -> str:
            with pytest.raises(RuntimeError, match="SystemExit"):
                await contained(starts(SystemExit(3)))
            await asyncio.sleep(0)
            return "goes on"

        assert await contained(outer()) == "goes on"

    asyncio.run(main())


def test_being_cancelled_from_outside_stays_what_it_is() -> None:
    async def main() -> None:
        async def both() -> None:
            task = asyncio.create_task(leaves(SystemExit(3)))
            with contextlib.suppress(RuntimeError):
                await asyncio.shield(task)
            await asyncio.sleep(20)

        for work in (asyncio.sleep(20), both()):
            outer = asyncio.ensure_future(contained(work))
            await asyncio.sleep(0)
            outer.cancel()
            await asyncio.wait({outer})
            assert outer.cancelled()

    asyncio.run(main())


def test_a_task_cancelled_before_it_starts_leaves_nothing_unawaited() -> None:
    async def main() -> None:
        async def cancels() -> None:
            task = asyncio.create_task(leaves(SystemExit(3)))
            task.cancel()
            await asyncio.wait({task})
            assert task.cancelled() and task.get_coro().__name__ == "leaves"  # pyright: ignore

        await contained(cancels())

    asyncio.run(main())


def test_the_tasks_of_a_loop_are_made_by_its_own_factory_also_inside() -> None:
    made: list[str] = []

    def factory(loop: asyncio.AbstractEventLoop, work: object, **options: object) -> object:
        made.append(getattr(work, "__name__", ""))
        return asyncio.Task(work, loop=loop, **options)  # pyright: ignore

    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(factory)  # pyright: ignore
        with pytest.raises(RuntimeError, match="SystemExit"):
            await contained(starts(SystemExit(3)))
        assert made == ["leaves"]

    asyncio.run(main())


def test_signals_pass() -> None:
    """SIGTERM's exit always; Ctrl-C where it is raised into whatever runs."""

    async def clean_up() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def ends(error: BaseException, start: object) -> None:
        loop = asyncio.new_event_loop()
        try:
            with pytest.raises(type(error)):
                loop.run_until_complete(contained(start(error)))  # pyright: ignore
        finally:
            loop.run_until_complete(clean_up())
            loop.close()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for error in (KeyboardInterrupt(), Terminated(143)):
            for start in (leaves, starts):
                ends(error, start)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_run_whose_agent_started_tasks() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    async def waits() -> None:
        await asyncio.sleep(20)

    async def agent() -> None:
        tasks = {asyncio.create_task(waits()) for _ in range(3)}
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        await asyncio.wait(tasks)

    try:
        with pytest.raises(KeyboardInterrupt):
            run(contained(agent()))
    finally:
        signal.signal(signal.SIGINT, before)
