"""Tool calls in a model's text: the syntaxes that can be read, and the marks of all others.

Guarantees: a call is never lost because its JSON is bad. It is kept with its raw text as
arguments, which is then no valid JSON, so the tool answers with an error instead of running.

Takes: text of a turn. Gives: the text around the calls, and (name, arguments) per call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Literal

Calls = list[tuple[str, str]]
Syntax = Literal["hermes", "xml", "mistral", "llama3"]

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_MISTRAL = "[TOOL_CALLS]"
_PYTHON_TAG = "<|python_tag|>"
_BARE = re.compile(r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:')

_MARKERS = re.compile(
    r"<tool_call>|<function=|<function_call>|<tool_use>|<invoke\b|\[TOOL_CALLS\]|"
    r"<\|python_tag\|>|<\|?tool_calls?(?:_begin|_section_begin)?\|>|<\uff5ctool\u2581call|"
    r"```tool_(?:call|code)|^Action:[ \t]*\w|"
    r'\{\s*"(?:name|function|tool)"\s*:\s*"[^"\n]+"\s*,\s*"(?:arguments|parameters|args)"',
    re.MULTILINE,
)


def markers(text: str) -> int:
    """How many marks of tool calls, of any family, a text holds.

    Marks without one call read mean that the model speaks a syntax that is not understood.
    """
    return len(_MARKERS.findall(text))


def hermes(text: str) -> tuple[str, Calls]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number."""
    calls = [_from_json(body.strip()) for body in _TAGGED.findall(text)]
    return (_TAGGED.sub("", text).strip(), calls) if calls else (text, [])


def xml(text: str) -> tuple[str, Calls]:
    """<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>.

    A value that parses as JSON is that value, else it is text.
    """
    calls: Calls = []
    for body in _TAGGED.findall(text):
        function = _FUNCTION.match(body)
        if function is None:
            calls.append(("", body.strip()))
            continue
        values = {key: _value(value) for key, value in _PARAMETER.findall(function[2])}
        calls.append((function[1], json.dumps(values, ensure_ascii=False)))
    return (_TAGGED.sub("", text).strip(), calls) if calls else (text, [])


def mistral(text: str) -> tuple[str, Calls]:
    """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...] to the end of the turn."""
    content, found, body = text.partition(_MISTRAL)
    if not found:
        return text, []
    loaded = _loads(body)
    if not isinstance(loaded, list) or not loaded:
        return content.strip(), [("", body.strip())]
    return content.strip(), [_from_object(item, body.strip()) for item in loaded]


def llama3(text: str) -> tuple[str, Calls]:
    """The whole turn is one {"name": ..., "parameters": {...}}."""
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if not _BARE.match(body):
        return text, []
    return "", [_from_json(body)]


PARSERS: dict[Syntax, Callable[[str], tuple[str, Calls]]] = {
    "hermes": hermes,
    "xml": xml,
    "mistral": mistral,
    "llama3": llama3,
}


def _from_json(body: str) -> tuple[str, str]:
    loaded = _loads(body)
    if loaded is None:
        named = re.search(r'"name"\s*:\s*"([^"\n]*)"', body)
        return (named[1] if named else ""), body
    return _from_object(loaded, body)


def _from_object(loaded: Any, body: str) -> tuple[str, str]:
    if isinstance(loaded, dict) and isinstance(loaded.get("function"), dict):
        loaded = loaded["function"]
    if not isinstance(loaded, dict) or not isinstance(loaded.get("name"), str):
        return "", body
    arguments = loaded.get("arguments", loaded.get("parameters", ""))
    if isinstance(arguments, str):
        return loaded["name"], arguments
    if arguments is None:
        return loaded["name"], ""
    return loaded["name"], json.dumps(arguments, ensure_ascii=False)


def _loads(text: str) -> Any:
    """The JSON value, or None when it is malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # the latter: thousands of nested brackets
        return None


def _value(text: str) -> Any:
    loaded = _loads(text)
    return text if loaded is None else loaded
