"""Demonstrations from a JSON-lines file of conversations, one a line.

    {"messages": [{"role": "user", "content": "7 + 5 ="}, {"role": "assistant", "content": "12"}]}
    {"messages": [..., {"role": "assistant", "content": "", "tool_calls": [{"type": "function",
     "function": {"name": "add", "arguments": "{}"}, "id": "a"}]}, {"role": "tool", ...}, ...],
     "tools": [{"type": "function", "function": {...}}]}

Keys: `messages`; optional `tools` (specs that the prompt shows), `id`, `split` (train unless it is
named: what is held out teaches nothing). A message has `role` and `content`, an assistant's also
`tool_calls` and `reasoning` (or `reasoning_content`), a tool's `tool_call_id` and `name`.

Guarantees: every row is checked when the set is opened, and one that cannot be used names file,
line and message; nothing is left out in silence: rows of equal content are one demonstration, and
counted. The order is a shuffle by (seed, split).

Takes: a path. Gives: a Taskset of Demonstrations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from treadle.errors import DataError, RewardError, did_you_mean
from treadle.tasks.demonstrations import Demonstration
from treadle.tasks.jsonl import ROLES
from treadle.tasks.lines import Lines, parse_object
from treadle.tasks.options import check_options
from treadle.tasks.permutation import permute
from treadle.tasks.text import SPLITS, digest
from treadle.types import Message, Provenance, Task, ToolCall

_EXAMPLE = '{"messages": [{"role": "user", "content": "7 + 5 ="}, ...]}'

_ROW = ("messages", "tools", "id", "split")
_MESSAGE = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning",
    "reasoning_content",
)
_FUNCTION = ("name", "arguments")
_CALL = ("id", "type", "index")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """Options of a "chat:" source."""

    learn: Literal["all", "last"] = "all"
    """Which assistant turns of a row are learnt."""
    license: str = "unknown"
    """Terms of the file, for the record; an SPDX name where there is one."""


class Chat:
    """A Taskset that demonstrates. See the module's text for the format."""

    def __init__(
        self,
        path: str | Path,
        *,
        options: Mapping[str, Any] | None = None,
        system: str = "",
        seed: int = 0,
        name: str = "",
        for_grading: bool = False,
    ) -> None:
        """Raises ConfigError (options) and DataError (the file, naming line and message)."""
        self.path = Path(path)
        self.name = name or f"chat:{path}"
        self.options = ChatOptions(**check_options(ChatOptions, options or {}, self.name))
        self._system = system
        self._seed = seed
        self._lines = Lines(self.path)
        self.num_duplicates = 0
        """Rows that say what an earlier one says."""
        self._splits: dict[str, list[tuple[int, int]]] = {split: [] for split in SPLITS}
        if not for_grading:
            self._read()

    @property
    def provenance(self) -> Provenance:
        return Provenance(
            source=f"file {self.path.name}", license=self.options.license, sha256=self._lines.sha256
        )

    def size(self, split: str) -> int:
        return len(self._rows(split))

    def task(self, index: int, split: str = "train") -> Task:
        """What is shown before the first turn that is learnt; the rest is in `data`."""
        rows = self._rows(split)
        if not 0 <= index < len(rows):
            raise IndexError(f"split `{split}` of {self.name} has {len(rows)} tasks, not {index}")
        offset, line = rows[permute(index, len(rows), "chat", self._seed, split)]
        where = f"{self.path}:{line}"
        fields = parse_object(self._lines.at(offset), where, _EXAMPLE)
        messages, first, end = _conversation(fields, where, self.options.learn)
        shown = messages[:first]
        if self._system:
            shown = [Message(role="system", content=self._system), *shown]
        return Task(
            id=fields.get("id") or digest(_text(fields)).hex(),
            taskset=self.name,
            messages=tuple(shown),
            data={
                "line": line,
                "turns": fields["messages"][first:end],
                "tools": fields.get("tools") or [],
            },
            split=split,
        )

    def demonstration(self, task: Task) -> Demonstration:
        where = f"{self.path}:{task.data['line']}"
        return Demonstration(
            turns=tuple(_messages(task.data["turns"], where)), tools=tuple(task.data["tools"])
        )

    def grade(self, task: Task, answer: str) -> Mapping[str, float]:
        raise RewardError(f"task set {self.name} holds demonstrations: nothing grades an answer")

    def gold(self, task: Task) -> str | None:
        return None

    def _rows(self, split: str) -> list[tuple[int, int]]:
        if split not in self._splits:
            raise DataError(f"{self.name} has no split `{split}`", hint=did_you_mean(split, SPLITS))
        return self._splits[split]

    def _read(self) -> None:
        seen: dict[bytes, tuple[int, str]] = {}
        ids: dict[str, int] = {}
        for offset, line, raw in self._lines.rows():
            where = f"{self.path}:{line}"
            fields = parse_object(raw, where, _EXAMPLE)
            _check_row(fields, where)
            _conversation(fields, where, self.options.learn)
            split = fields.get("split") or "train"
            first, known = seen.setdefault(digest(_text(fields), 16), (line, split))
            if known != split:
                raise DataError(
                    f"{where}: this row is in split `{split}` here and `{known}` on line {first}"
                )
            if first != line:
                self.num_duplicates += 1
                continue
            name = fields.get("id")
            if name is not None and ids.setdefault(name, line) != line:
                raise DataError(
                    f"{where}: id {name!r} is also that of line {ids[name]}, with other messages",
                    hint="ids must be unique; leave `id` out to have them made from the text",
                )
            self._splits[split].append((offset, line))
        if not self._splits["train"]:
            held = ", ".join(f"{split} {len(rows)}" for split, rows in self._splits.items())
            raise DataError(
                f"{self.path}: no row is in split `train` ({held}): there is nothing to learn",
                hint="leave `split` out of the rows that are to be learnt",
            )


# --------------------------------------------------------------------------- one row


def _check_row(fields: Mapping[str, Any], where: str) -> None:
    for key in fields:
        if key not in _ROW:
            raise DataError(
                f"{where}: unknown key `{key}`",
                hint=f"{did_you_mean(key, _ROW)} A row has {', '.join(_ROW)}",
            )
    for key in ("id", "split"):
        if not isinstance(fields.get(key), str | None) or fields.get(key) == "":
            raise DataError(f"{where}: `{key}` must be text, got {fields[key]!r}")
    if fields.get("split") is not None and fields["split"] not in SPLITS:
        raise DataError(
            f"{where}: unknown split `{fields['split']}`",
            hint=did_you_mean(fields["split"], SPLITS),
        )
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or not all(_is_spec(tool) for tool in tools):
        raise DataError(
            f"{where}: `tools` must be a list of specs",
            hint='e.g. [{"type": "function", "function": {"name": ..., "parameters": {...}}}]',
        )


def _is_spec(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _conversation(
    fields: Mapping[str, Any], where: str, learn: str
) -> tuple[list[Message], int, int]:
    """All messages, the place of the first turn that is learnt and the place after the last.

    Raises DataError naming the message that cannot be used.
    """
    given = fields.get("messages")
    if not isinstance(given, list) or not given:
        raise DataError(
            f"{where}: `messages` must be a list with at least one message", hint=f"e.g. {_EXAMPLE}"
        )
    messages = list(_messages(given, where))
    turns = [i for i, m in enumerate(messages) if m.role == "assistant"]
    if not turns:
        raise DataError(f"{where}: no assistant turn in {len(messages)} messages: nothing to learn")
    chosen = turns if learn == "all" else turns[-1:]
    if chosen[0] == 0:
        raise DataError(
            f"{where}: messages[0] is an assistant's: nothing comes before the turn to learn"
        )
    for number in chosen:
        turn = messages[number]
        if messages[number - 1].role == "assistant":
            raise DataError(
                f"{where}: messages[{number}] follows an assistant turn: nothing asks for it"
            )
        if not (turn.content.strip() or turn.tool_calls):
            raise DataError(
                f"{where}: messages[{number}]: the assistant turn to learn is empty",
                hint="it would teach to say nothing; give it `content` or `tool_calls`, or drop "
                "the row",
            )
        for place, call in enumerate(turn.tool_calls):
            if wrong := _no_object(call.arguments):
                raise DataError(
                    f"{where}: messages[{number}]: tool_calls[{place}] of the turn to learn has "
                    f"arguments that are no JSON object: {wrong}",
                    hint="it would teach calls that no tool can read; mend it, or drop the row",
                )
    return messages, chosen[0], chosen[-1] + 1


def _messages(given: Sequence[Any], where: str) -> Iterator[Message]:
    for number, fields in enumerate(given):
        here = f"{where}: messages[{number}]"
        if not isinstance(fields, dict):
            raise DataError(f"{here} must be an object with `role` and `content`, got {fields!r}")
        for key in fields:
            if key not in _MESSAGE:
                raise DataError(f"{here}: unknown key `{key}`", hint=did_you_mean(key, _MESSAGE))
        if fields.get("role") not in ROLES:
            raise DataError(
                f"{here} has role {fields.get('role')!r}", hint="one of " + ", ".join(ROLES)
            )
        role = fields["role"]
        if role != "assistant" and (fields.get("tool_calls") or _reasoning(fields)):
            raise DataError(f"{here}: only an assistant calls tools and thinks, not role `{role}`")
        calls = tuple(_calls(fields.get("tool_calls") or [], here))
        content = fields.get("content")
        if content is None and calls:  # as the OpenAI format has it
            content = ""
        texts = {"content": content, "reasoning": _reasoning(fields)}
        texts |= {key: fields.get(key) or "" for key in ("name", "tool_call_id")}
        for key, value in texts.items():
            if not isinstance(value, str):
                raise DataError(f"{here} must have text as `{key}`, got {value!r}")
        yield Message(role=role, tool_calls=calls, **texts)


def _reasoning(fields: Mapping[str, Any]) -> Any:
    return fields.get("reasoning") or fields.get("reasoning_content") or ""


def _calls(given: Any, here: str) -> Iterator[ToolCall]:
    if not isinstance(given, list):
        raise DataError(f"{here}: `tool_calls` must be a list, got {given!r}")
    for number, call in enumerate(given):
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not name:
            raise DataError(
                f"{here}: tool_calls[{number}] names no function: {call!r}",
                hint='e.g. {"type": "function", "function": {"name": "add", "arguments": "{}"}}',
            )
        levels = [(call, (*_CALL, *_FUNCTION))]
        if function is not call:
            levels = [(call, (*_CALL, "function")), (function, _FUNCTION)]
        for level, known in levels:
            if unknown := next((key for key in level if key not in known), None):
                raise DataError(
                    f"{here}: tool_calls[{number}]: unknown key `{unknown}`",
                    hint=did_you_mean(unknown, known),
                )
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        if not arguments.strip():  # some clients say so what takes no arguments
            arguments = "{}"
        yield ToolCall(
            id=str(call.get("id") or f"call{number:05d}"), name=name, arguments=arguments
        )


def _no_object(arguments: str) -> str:
    """What is wrong with them as the arguments of a call; empty when nothing is."""
    try:
        value = json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return f"{arguments[:60]!r} ({error})"
    return "" if isinstance(value, dict) else repr(arguments[:60])


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _text(fields: Mapping[str, Any]) -> str:
    """What decides whether two rows are the same."""
    return json.dumps([fields["messages"], fields.get("tools") or []], sort_keys=True)
