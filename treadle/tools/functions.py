"""Python functions as tools of a model.

    @tool
    def add(a: int, b: int) -> int:
        '''Add two integers.'''
        return a + b

Guarantees: whatever a model writes as arguments, a call returns a ToolResult and the rollout goes
on: malformed, missing, unknown and wrong-typed arguments are an error text as that call's result
and the function does not run; an exception of the function is one as well, and so is one of turning
its result into text. Every call is bounded by `limit_s`, never blocks the event loop, and its text
is capped.

A Python function that never returns cannot be killed inside this process. Its call ends at the
limit with an error text, its thread is left behind and counted; after MAX_STUCK of them further
calls of that tool raise ToolError, so that the loss stays bounded and visible. Code that may
hang belongs in a sandbox or another process.

Takes: functions with typed signatures, calls. Gives: JSON schemas, ToolResult.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import inspect
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from treadle.errors import ConfigError, Terminated, ToolError, did_you_mean, said
from treadle.threads import contained
from treadle.tools.importing import import_object
from treadle.tools.schema import BadArguments, arguments_of, docs_of, schema_of, signature_of

MAX_RESULT_CHARS = 8_192
"""A longer result is cut and says so; one call must not eat the context."""

MAX_STUCK = 16
"""Calls of one tool that may still run after their limit."""

ErrorKind = Literal["", "malformed", "arguments", "unknown", "raised", "timeout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolResult:
    """The answer to one call: what the model reads."""

    text: str
    is_error: bool = False
    kind: ErrorKind = ""
    """What went wrong; empty when nothing did."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tool:
    """A function that a model may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    fn: Callable[..., Any]
    limit_s: float = 30.0
    """Wall clock per call."""
    _signature: dict[str, inspect.Parameter]
    _stuck: list[threading.Thread] = field(default_factory=list, init=False)

    @property
    def schema(self) -> dict[str, Any]:
        """What a chat template renders: {"type": "function", "function": {...}}."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}

    @property
    def num_stuck(self) -> int:
        """Calls that still run although their limit is over."""
        self._stuck[:] = [thread for thread in self._stuck if thread.is_alive()]
        return len(self._stuck)

    async def call(self, arguments: str) -> ToolResult:
        """Run one call as the model wrote it. `arguments` is JSON text; "" means {}.

        Raises:
            ToolError: the function raised one itself, or MAX_STUCK earlier calls still run:
                a failure that is no answer to the model.
        """
        try:
            values = arguments_of(arguments, self._signature)
        except BadArguments as error:
            kind: ErrorKind = "malformed" if error.kind == "malformed" else "arguments"
            return _error(kind, f"{self.name} was not run: {error}")
        try:
            text = await self._run(values)
        except TimeoutError:
            return _error("timeout", f"{self.name} did not finish within {self.limit_s:g} s")
        except _Raised as error:
            return _error("raised", f"{self.name} raised {error}")
        return ToolResult(text=_capped(text))

    async def _run(self, values: dict[str, Any]) -> str:
        if inspect.iscoroutinefunction(self.fn):
            work: asyncio.Future[str] = asyncio.ensure_future(_attributed(self.fn, values))
            thread = None
        else:
            if self.num_stuck >= MAX_STUCK:
                raise ToolError(
                    f"tool {self.name}: {MAX_STUCK} earlier calls still run after their limit of "
                    f"{self.limit_s:g} s",
                    hint="the function hangs; bound it, or run it in a sandbox",
                )
            work, thread = _in_thread(self.name, self.fn, values)
        try:
            done, _ = await asyncio.wait({work}, timeout=self.limit_s)
        finally:
            if not work.done():
                work.cancel()
                if thread is not None:
                    self._stuck.append(thread)
        if not done:
            raise TimeoutError
        return work.result()


class Tools:
    """The tools of a rollout, by name."""

    def __init__(self, tools: Iterable[Tool] = ()) -> None:
        """Raises ConfigError when two tools have one name."""
        self._tools: dict[str, Tool] = {}
        for each in tools:
            if each.name in self._tools:
                raise ConfigError(f"two tools are named `{each.name}`")
            self._tools[each.name] = each

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The `schema` of each tool, in the order given."""
        return [each.schema for each in self]

    @property
    def num_stuck(self) -> int:
        return sum(each.num_stuck for each in self)

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Run a call as the model wrote it; an unknown name is an error text too.

        Raises ToolError as `Tool.call` does.
        """
        if name not in self._tools:
            hint = did_you_mean(name, self._tools) if self._tools else "there are no tools"
            return _error("unknown", f"there is no tool `{name[:80]}` ({hint})")
        return await self._tools[name].call(arguments)


def tool(fn: Callable[..., Any], *, name: str = "", limit_s: float = 30.0) -> Tool:
    """A Tool from a function, async or not. Use it as a decorator or call it.

    Args:
        fn: Its annotations become the schema, its docstring the description; an `Args:` section
            describes the parameters.
        name: What the model calls it; the function's name when empty.
        limit_s: Wall clock per call, in seconds.

    Raises:
        ConfigError: a parameter without an annotation, or with one that has no JSON schema.
    """
    name = name or getattr(fn, "__name__", type(fn).__name__)
    if limit_s <= 0:
        raise ConfigError(f"tool `{name}`: limit_s must be > 0, got {limit_s}")
    signature = signature_of(fn, name)
    description, described = docs_of(fn)
    return Tool(
        name=name,
        description=description,
        parameters=schema_of(signature, described),
        fn=fn,
        limit_s=limit_s,
        _signature=signature,
    )


def load_tools(specs: Iterable[str], *, limit_s: float | None = None) -> Tools:
    """The tools that "module:function" texts name; each is a function or a Tool.

    Raises:
        ConfigError: one cannot be imported, is not a function, or has no schema.
    """
    tools = []
    for i, spec in enumerate(specs):
        found = import_object(spec, f"rollout.tools.{i}")
        if not isinstance(found, Tool):
            if not callable(found):
                raise ConfigError(f"`rollout.tools.{i}`: `{spec}` is not a function: {found!r}")
            found = tool(found)
        tools.append(found if limit_s is None else dataclasses.replace(found, limit_s=limit_s))
    return Tools(tools)


# --------------------------------------------------------------------------- running


class _Raised(Exception):
    """What a tool's function raised, as text."""


async def _attributed(fn: Callable[..., Any], values: dict[str, Any]) -> str:
    try:
        return _text(await contained(fn(**values)))
    except (ToolError, Terminated):
        raise
    except (Exception, SystemExit, GeneratorExit, BaseExceptionGroup) as error:
        raise _Raised(_first_line(error)) from error


def _in_thread(
    name: str, fn: Callable[..., Any], values: dict[str, Any]
) -> tuple[asyncio.Future[str], threading.Thread]:
    """Run in a thread of its own: a stuck call must not use up a shared pool's workers.

    Its result becomes text there too, because that runs code of the result.
    """
    outcome: Future[str] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            result = context.run(lambda: _text(fn(**values)))
        except ToolError as error:
            failure: BaseException = error
        except BaseException as error:
            failure = _Raised(_first_line(error))
        else:
            outcome.set_result(result)
            return
        outcome.set_exception(failure)

    thread = threading.Thread(target=work, name=f"tool {name}", daemon=True)
    # Running, so that giving up on the result never races with setting it.
    outcome.set_running_or_notify_cancel()
    waiting = asyncio.wrap_future(outcome)
    thread.start()
    return waiting, thread


def _first_line(error: BaseException) -> str:
    text = said(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(value: Any) -> str:
    """Text as it is, what JSON can say as JSON, else `str`; raises what that raises."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)


def _capped(text: str) -> str:
    if len(text) <= MAX_RESULT_CHARS:
        return text
    return f"{text[:MAX_RESULT_CHARS]}\n[truncated: {len(text):,} characters in all]"


def _error(kind: ErrorKind, text: str) -> ToolResult:
    return ToolResult(text=_capped(f"error: {text}"), is_error=True, kind=kind)
