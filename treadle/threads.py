"""Plain blocking code off the event loop, in a thread that nothing ever waits for.

The default executor would not do: a call that hangs keeps one of its few threads for ever, and the
interpreter joins them all at exit.

Takes: a function. Gives: its result; a caller that is cancelled or has waited long enough leaves
the thread behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from treadle.errors import ContractError

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run `function` in a daemon thread of its own; raises what it raises."""
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
        except StopIteration as stop:  # a future cannot carry it
            error = RuntimeError(f"StopIteration: {stop}")
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody asks any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, daemon=True, name=f"in_thread {function!r}").start()
    return await future


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
