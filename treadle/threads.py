"""Between plain code and event loops.

`in_thread` and `within` run blocking code off the loop, in a thread that nothing ever waits for:
the default executor keeps a call that hangs in one of its few threads for ever, and the interpreter
joins them all at exit. `run` runs a coroutine from plain code, a notebook's cell included.
`contained` awaits code of others on a loop that is ours.

Takes: a function or a coroutine. Gives: its result; a caller of `within` that has waited long
enough, or is cancelled, leaves the thread behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from contextvars import ContextVar
from functools import partial
from typing import Any, ParamSpec, TypeVar

from treadle.errors import ContractError, Terminated, said

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


# --------------------------------------------------------------------------- code of others


async def contained(work: Awaitable[T]) -> T:
    """Await `work`; a task that it started and that ends like a program ends `work` alone.

    asyncio lets SystemExit and KeyboardInterrupt out of a task and so out of the loop, with
    everything else that runs there. Here the task raises a RuntimeError with that as its cause,
    and so does `work`, which is cancelled for it; a task that outlives `work` ends nothing but
    itself. Its own SystemExit is the caller's to catch, its own KeyboardInterrupt such a
    RuntimeError too. `Terminated`, and a KeyboardInterrupt that may be the user's, pass. So does
    what a plain callback of the loop raises (`call_soon` and its like): it belongs to no task.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    factory = loop.get_task_factory()
    if not isinstance(factory, _Factory):  # stays: what outlives `work` starts tasks too
        loop.set_task_factory(_Factory(factory))
    scope = _Scope(task)
    token = _SCOPE.set(scope)
    try:
        result = await work
    except BaseException as error:
        if isinstance(error, SystemExit | KeyboardInterrupt) and not _is_theirs(error):
            raise
        if scope.left is not None:
            if scope.end() and isinstance(error, asyncio.CancelledError):
                raise  # it is cancelled for another reason at the same time
            raise scope.left from scope.left.__cause__
        if isinstance(error, KeyboardInterrupt):
            raise _carried(error) from error
        raise
    finally:
        scope.open = False
        _SCOPE.reset(token)
    if scope.left is not None:
        scope.end()
        raise scope.left from scope.left.__cause__
    return result


class _Scope:
    """One call of `contained`."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.cancelling = task.cancelling()
        self.open = True
        self.left: Exception | None = None
        """What a task inside tried to end the loop with."""

    def leave(self, error: BaseException) -> Exception:
        carried = _carried(error)
        if self.open and self.left is None:
            self.left = carried
            self.task.cancel()
        return carried

    def end(self) -> bool:
        """Take the cancellation back; whether there is another one."""
        return self.task.uncancel() > self.cancelling


_SCOPE: ContextVar[_Scope | None] = ContextVar("contained", default=None)


class _Factory:
    """Makes the tasks of a loop as before, but guards those that code in a scope starts."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, /, **options: Any) -> Any:
        context = options.get("context")
        scope = _SCOPE.get() if context is None else context.get(_SCOPE)
        if scope is not None and isinstance(work, Coroutine):
            work = _Guarded(work, scope)
        if self._inner is not None:
            return self._inner(loop, work, **options)
        return asyncio.Task(work, loop=loop, **options)


class _Guarded(Coroutine[Any, Any, T]):
    """A coroutine that does not end the loop; in everything else it is the one inside."""

    def __init__(self, inner: Coroutine[Any, Any, T], scope: _Scope) -> None:
        self._inner, self._scope = inner, scope

    def send(self, value: Any, /) -> Any:
        return self._step(partial(self._inner.send, value))

    def throw(self, *error: Any) -> Any:
        return self._step(partial(self._inner.throw, *error))

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _step(self, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except (SystemExit, KeyboardInterrupt) as error:
            if not _is_theirs(error):
                raise
            raise self._scope.leave(error) from error


def _is_theirs(error: BaseException) -> bool:
    """Whether a SystemExit or KeyboardInterrupt was raised by the code itself.

    `Terminated` is a signal's. A Ctrl-C is raised into whatever runs in the main thread, unless
    asyncio has it: then the first one cancels the loop's own task, and what is raised is no news.
    """
    if isinstance(error, SystemExit):
        return not isinstance(error, Terminated)
    if threading.current_thread() is not threading.main_thread():
        return True
    handler = signal.getsignal(signal.SIGINT)
    owner = getattr(handler.func, "__self__", None) if isinstance(handler, partial) else None
    return isinstance(owner, asyncio.Runner)


# --------------------------------------------------------------------------- loops


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
