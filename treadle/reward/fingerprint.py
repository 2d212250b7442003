"""Whether two reward functions are the same code with the same settings.

Guarantees: equal in every process, whatever its hash seed and its addresses. Different where the
code differs, that of nested functions, lambdas and comprehensions included, a default, a value
that a closure holds, an argument of a `functools.partial`, the attributes of a callable object,
or a function, class or value of the reward's own module that it names.

Functions and classes of other modules count by name. Of values, numbers, text, patterns, enum
members, containers of them and attributes of data classes and callable objects count; all else
counts by its type.

Takes: a callable. Gives: a SHA-256.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from operator import itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_PLAIN = (type(None), type(Ellipsis), bool, int, float, complex, str, bytes)


def fingerprint(function: Callable[..., Any]) -> str:
    """The digest of a reward function; see the module's text for what it tells apart."""
    root: Any = function
    while isinstance(root, functools.partial):
        root = root.func
    home = getattr(root, "__module__", None) or type(root).__module__
    return _Digester(home, root).of(function)


def name_in_module(value: Any) -> str:
    """ "module:qualname" of a function or class, of the function of a partial, else of the type:
    never an address."""
    while isinstance(value, functools.partial):
        value = value.func
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', None) or '?'}:{named.__qualname__}"


class _Digester:
    """Digests of values, as one function of the module `home` sees them."""

    def __init__(self, home: str, root: Any) -> None:
        self._home = home
        self._root = root
        self._open: list[int] = []
        self._functions: dict[int, str] = {}

    def of(self, value: Any) -> str:
        if type(value) in _PLAIN:
            return _digest(type(value).__name__, hex(value) if type(value) is int else repr(value))
        if id(value) in self._open:
            return _digest("again", str(len(self._open) - self._open.index(id(value))))
        self._open.append(id(value))
        try:
            return self._within(value)
        finally:
            self._open.pop()

    def _within(self, value: Any) -> str:
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, FunctionType):
            if id(value) not in self._functions:
                self._functions[id(value)] = self._function(value)
            return self._functions[id(value)]
        if isinstance(value, MethodType):
            return _digest("method", self.of(value.__func__), self._instance(value.__self__))
        if isinstance(value, functools.partial):
            arguments = (self.of(value.args), self.of(value.keywords))
            return _digest("partial", self.of(value.func), *arguments)
        if isinstance(value, staticmethod | classmethod):
            return _digest(type(value).__name__, self.of(value.__func__))
        if isinstance(value, property):
            return _digest("property", *map(self.of, (value.fget, value.fset, value.fdel)))
        if isinstance(value, ModuleType):
            return _digest("module", value.__name__)
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, enum.Enum):
            return _digest("enum", name_in_module(value), value.name)
        if isinstance(value, re.Pattern):
            return _digest("pattern", repr(value.pattern), str(value.flags))
        if isinstance(value, str | bytes | numbers.Number | range):
            return _digest(name_in_module(type(value)), repr(value))
        if isinstance(value, tuple | list):
            return _digest(type(value).__name__, *map(self.of, value))
        if isinstance(value, set | frozenset):
            return _digest(type(value).__name__, *sorted(map(self.of, value)))
        if isinstance(value, Mapping):
            return _digest(type(value).__name__, *sorted(self._pairs(value.items())))
        if isinstance(getattr(value, "__wrapped__", None), FunctionType):  # lru_cache and its like
            return _digest("wrapped", name_in_module(type(value)), self.of(value.__wrapped__))
        if hasattr(value, "__qualname__"):  # built in
            owner = self.of(getattr(value, "__self__", None))
            return _digest("built in", name_in_module(value), owner)
        if callable(value) or dataclasses.is_dataclass(value):
            return self._instance(value)
        return _digest("value", name_in_module(type(value)))

    def _function(self, function: FunctionType) -> str:
        if function is not self._root and function.__module__ != self._home:
            return _digest("function", name_in_module(function))
        code = function.__code__
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        seen = function.__globals__
        return _digest(
            "function",
            self.of(code),
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            *self._pairs((name, *_contents(cell)) for name, cell in cells),
            *self._pairs((n, seen[n]) for n in sorted(set(_names(code))) if n in seen),
        )

    def _code(self, code: CodeType) -> str:
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        text = repr((code.co_code, code.co_exceptiontable, counts, names))
        return _digest("code", text, *map(self.of, code.co_consts))

    def _class(self, cls: type) -> str:
        if cls.__module__ != self._home:
            return _digest("class", name_in_module(cls))
        kinds = (FunctionType, staticmethod, classmethod, property)
        members = (
            (name, member)
            for name, member in sorted(vars(cls).items(), key=itemgetter(0))
            if isinstance(member, kinds) or not name.startswith("__")
        )
        return _digest(
            "class", cls.__qualname__, *map(self.of, cls.__bases__), *self._pairs(members)
        )

    def _instance(self, value: Any) -> str:
        """By class and what a pickle would keep: attributes, in slots or not."""
        if isinstance(value, type):
            return self._class(value)
        return _digest("instance", self.of(type(value)), self.of(value.__getstate__()))

    def _pairs(self, items: Iterable[tuple[Any, ...]]) -> Iterator[str]:
        return (_digest("pair", *map(self.of, item)) for item in items)


def _contents(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing was assigned yet
        return ()


def _names(code: CodeType) -> Iterator[str]:
    """Names that a function and the code nested in it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _digest(kind: str, *parts: str) -> str:
    return sha256(repr((kind, parts)).encode()).hexdigest()
