"""Between plain code and event loops.

`in_thread` and `within` run blocking code off the loop, in a thread that nothing ever waits for:
the default executor keeps a call that hangs in one of its few threads for ever, and the interpreter
joins them all at exit. `run` runs a coroutine from plain code, a notebook's cell included.

Takes: a function or a coroutine. Gives: its result; a caller of `within` that has waited long
enough, or is cancelled, leaves the thread behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

from treadle.errors import ContractError, said

P = ParamSpec("P")
T = TypeVar("T")

POLL_S = 0.2
"""Between looks at whether the outer task of `run` was cancelled."""


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a daemon thread of its own; raises what it raises.

    What only ends a thread or a loop there (SystemExit, KeyboardInterrupt, StopIteration) arrives
    as a RuntimeError with that as its cause: the caller is neither of the two.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # pyright: ignore[reportArgumentType]

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as caught:
            error = _carried(caught)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, daemon=True, name=f"in_thread {function!r}").start()
    return await future


def _carried(error: BaseException) -> Exception:
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    carried = RuntimeError(f"{type(error).__name__}: {said(error)}")
    carried.__cause__ = error
    return carried


async def within(
    limit_s: float, what: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """`in_thread`, but for at most `limit_s` seconds. Raises ContractError beyond them."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await in_thread(function, *args, **kwargs)
    except TimeoutError:
        if not limit.expired():
            raise
        raise ContractError(
            f"{what} has not ended within {limit_s:g} s",
            hint="is a disk, a network file system or a task source stuck?",
        ) from None


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, and also where this thread runs a loop already, as a notebook does.

    There `main` gets a thread and a loop of its own; Ctrl-C cancels it, waits for its clean-up,
    and is raised. So does a Ctrl-C that the outer loop took for itself, by cancelling its task.
    """
    if asyncio._get_running_loop() is None:
        return asyncio.run(main)
    done: Future[T] = Future()
    begun: Future[Callable[[], object]] = Future()

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        begun.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await main

    def work() -> None:
        try:
            done.set_result(asyncio.run(cancellable()))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=work, name="run", daemon=True)
    thread.start()
    outer = asyncio.current_task()
    before = outer.cancelling() if outer else 0
    try:
        while not wait([done], POLL_S).done:
            if outer and outer.cancelling() > before:
                raise KeyboardInterrupt
        return done.result()
    except KeyboardInterrupt:
        with contextlib.suppress(RuntimeError, TimeoutError):  # its loop is closed, or never began
            begun.result(timeout=5.0)()
        thread.join()
        raise
