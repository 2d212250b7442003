"""Python signatures as JSON schemas, and JSON arguments checked against the same signature.

Supported annotations: str, int, float, bool, Literal[...], list[X], dict[str, X], X | None and
unions of these. The annotation is the single truth: the schema that the model sees and the check
that its arguments meet are two readings of it.

Takes: a function. Gives: its schema; keyword arguments from JSON text.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from treadle.errors import ConfigError, did_you_mean

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}

_WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false"}


class BadArguments(Exception):
    """The arguments of a call do not fit; the message is meant for the model."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        """malformed (not a JSON object) or arguments (an object that does not fit)."""


def signature_of(fn: Callable[..., Any], name: str) -> dict[str, inspect.Parameter]:
    """The parameters of `fn` with resolved annotations.

    Raises:
        ConfigError: a parameter has no annotation or one that has no schema, or cannot be
            passed by name; the parameter is named.
    """
    try:
        hints = typing.get_type_hints(fn)
    except Exception as error:
        raise ConfigError(f"tool `{name}`: its annotations cannot be read: {error}") from error
    parameters = {}
    for parameter in inspect.signature(fn).parameters.values():
        where = f"tool `{name}`, parameter `{parameter.name}`"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{where} is {parameter.kind.description}",
                hint="a model passes arguments by name: use plain parameters",
            )
        if parameter.name not in hints:
            raise ConfigError(f"{where} has no annotation", hint=f"e.g. {parameter.name}: str")
        kind = hints[parameter.name]
        if not _supported(kind):
            raise ConfigError(
                f"{where} has annotation `{_shown(kind)}`, which has no JSON schema",
                hint="use str, int, float, bool, Literal, list, dict[str, ...] or a union of them",
            )
        parameters[parameter.name] = parameter.replace(annotation=kind)
    return parameters


def schema_of(
    parameters: Mapping[str, inspect.Parameter], described: Mapping[str, str]
) -> dict[str, Any]:
    """The JSON schema of an object with these parameters. `described`: text per parameter."""
    properties = {}
    for name, parameter in parameters.items():
        properties[name] = _schema(parameter.annotation)
        if name in described:
            properties[name]["description"] = described[name]
    required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def arguments_of(text: str, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Keyword arguments from the JSON text that a model wrote; "" means no arguments.

    An int passes as float and a whole float as int; nothing else is coerced.

    Raises:
        BadArguments: not JSON, not an object, or missing, unknown or wrong-typed arguments.
    """
    try:
        given = json.loads(text, parse_constant=_no_constant) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise BadArguments("malformed", f"arguments are not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadArguments(
            "malformed",
            f"arguments must be a JSON object with the parameters' names as keys, got "
            f"{_json_name(given)}",
        )
    problems = []
    for name in given:
        if name not in parameters:
            hint = did_you_mean(name, parameters) if parameters else "this tool takes none"
            problems.append(f"unknown argument `{_clip(name)}` ({hint})")
    values = {}
    for name, parameter in parameters.items():
        if name not in given:
            if parameter.default is inspect.Parameter.empty:
                problems.append(f"missing argument `{name}` ({_describe(parameter.annotation)})")
            continue
        try:
            values[name] = _value(parameter.annotation, given[name])
        except (ValueError, OverflowError):
            problems.append(
                f"argument `{name}` must be {_describe(parameter.annotation)}, got "
                f"{_json_name(given[name])} {_clip(json.dumps(given[name]))}"
            )
    if problems:
        raise BadArguments("arguments", "; ".join(problems))
    return values


def docs_of(fn: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Description (text before the first section) and the entries of `Args:`, Google style."""
    doc = inspect.getdoc(fn) or ""
    head = re.split(r"\n\s*\n(?=\w+:\s*\n)|^(?=Args:\s*\n)", doc, maxsplit=1)[0]
    described: dict[str, str] = {}
    section = re.search(r"^Args:[ ]*\n((?:[ ]+.*\n?|\s*\n)+)", doc, flags=re.MULTILINE)
    if section:
        lines = section.group(1).splitlines()
        indent = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
        name = ""
        for line in lines:
            entry = re.match(rf"[ ]{{{indent}}}(\w+)(?:\s*\([^)]*\))?:\s*(.*)", line)
            if entry:
                name = entry.group(1)
                described[name] = entry.group(2).strip()
            elif name and line.strip():
                described[name] += " " + line.strip()
    return " ".join(head.split()), described


# --------------------------------------------------------------------------- one annotation


def _supported(kind: Any) -> bool:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in _SCALARS:
        return True
    if origin is Literal:
        return all(type(a) in _SCALARS for a in args)
    if origin in (typing.Union, types.UnionType):
        return all(_supported(a) for a in args)
    if origin is list:
        return _supported(args[0])
    if origin is dict:
        return args[0] is str and _supported(args[1])
    return False


def _schema(kind: Any) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(a) for a in args]}
    if origin is list:
        return {"type": "array", "items": _schema(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(args[1])}
    return {"type": _SCALARS[kind]}


def _value(kind: Any, value: Any) -> Any:
    """`value` as `kind`, or ValueError."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        # The exact type first, so that 1 stays an int in `float | int`.
        for option in sorted(args, key=lambda a: type(value) is not a):
            try:
                return _value(option, value)
            except ValueError:
                continue
    elif origin is Literal:
        for option in args:
            if value == option and type(value) is type(option):
                return option
    elif origin is list and isinstance(value, list):
        return [_value(args[0], v) for v in value]
    elif origin is dict and isinstance(value, dict):
        return {k: _value(args[1], v) for k, v in value.items()}
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif kind is int and type(value) is float and value.is_integer():
        return int(value)
    elif kind in _SCALARS and type(value) is kind:
        return value
    raise ValueError


def _describe(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in args)
    if origin is list:
        return f"a list, each entry {_describe(args[0])}"
    if origin is dict:
        return f"an object, each value {_describe(args[1])}"
    return _WORDS.get(kind, "null")


def _shown(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def _json_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    return names.get(type(value), "null" if value is None else "a number")


def _clip(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")
