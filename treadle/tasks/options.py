"""Checks the `options` of a task set against the fields of the dataclass that takes them.

Guarantees: an option that the source does not have, or of another type than its field, is a
ConfigError with the option, the value and the nearest known option; nothing is ignored.

Takes: a dict from a config. Gives: keyword arguments of the right types.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from treadle.errors import ConfigError, did_you_mean

_NAMES = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    datetime.date: "a date like 2026-01-31",
    datetime.time: "a time like 09:30",
    types.NoneType: "null",
}


def check_options(
    cls: type[Any], options: Mapping[str, Any], source: str, owned: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Keyword arguments for `cls`, converted from JSON values.

    Args:
        cls: A dataclass; its fields are the options.
        options: What the user wrote.
        source: Named in errors, e.g. "reasoning_gym:gcd".
        owned: Fields that the user may not set, each with the reason.

    Raises:
        ConfigError: an unknown or owned option, or a value of the wrong type.
    """
    owned = owned or {}
    hints = typing.get_type_hints(cls)
    known = [f.name for f in dataclasses.fields(cls) if f.name not in owned]
    values = {}
    for name, value in options.items():
        if name in owned:
            raise ConfigError(f"option `{name}` of {source} cannot be set", hint=owned[name])
        if name not in known:
            raise ConfigError(
                f"unknown option `{name}` of {source}",
                hint=did_you_mean(name, known) if known else "this source has no options",
            )
        values[name] = convert(hints[name], value, f"option `{name}` of {source}")
    return values


def convert(kind: Any, value: Any, what: str) -> Any:
    """`value` as `kind`; ints pass as floats, lists as tuples, names as enum members."""
    try:
        return _convert(kind, value)
    except ValueError:
        raise ConfigError(f"{what} must be {describe(kind)}, got {value!r}") from None


def _convert(kind: Any, value: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _first_that_fits(args, value)
    if origin is Literal:
        if value in args:
            return value
    elif kind in (list, tuple) or origin in (list, tuple, Sequence):
        return _sequence(kind if origin is None else origin, args, value)
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    elif kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _member(kind, value)
    elif kind in (datetime.date, datetime.time):
        return value if isinstance(value, kind) else kind.fromisoformat(value)
    elif isinstance(kind, type) and isinstance(value, kind):
        return value
    raise ValueError


def _first_that_fits(args: tuple[Any, ...], value: Any) -> Any:
    for option in args:
        try:
            return _convert(option, value)
        except (ValueError, TypeError):
            continue
    raise ValueError


def _sequence(kind: Any, args: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, str) and kind is tuple and not args:
        return value  # a bare `tuple` whose default is a text, as some configs have it
    if not isinstance(value, list | tuple):
        raise ValueError
    if kind is tuple and len(args) > 1 and args[-1] is not Ellipsis:
        if len(args) != len(value):
            raise ValueError
        return tuple(_convert(a, v) for a, v in zip(args, value, strict=True))
    items = [_convert(args[0], v) if args else v for v in value]
    return tuple(items) if kind is tuple else items


def _member(kind: type[enum.Enum], value: Any) -> enum.Enum:
    for member in kind:
        if value in (member, member.value, member.name):
            return member
    raise ValueError


def describe(kind: Any) -> str:
    """A type in words: "a list of text", "one of `a`, `b`"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(a) for a in args)
    if origin is Literal:
        return "one of " + ", ".join(f"`{a}`" for a in args)
    if kind in (list, tuple) or origin in (list, tuple, Sequence):
        if origin is tuple and len(args) > 1 and args[-1] is not Ellipsis:
            return "a list of " + ", ".join(describe(a) for a in args)
        return f"a list of {describe(args[0])}" if args else "a list"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(f"`{m.name}`" for m in kind)
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))
