"""Tasks from a JSON-lines file, one task a line.

    {"prompt": "7 + 5 =", "answer": "12"}
    {"messages": [{"role": "user", "content": "..."}], "answer": "...", "split": "val"}

Keys: `prompt` or `messages`; `answer` (text or a number; without it the file needs a reward
function of its own); optional `id`, `split` (train | val | test), `date` (ISO, when the text
became public). Every other key goes to `task.data` for the grader and is never rendered.

Guarantees: every row is read once and checked when the set is opened; a row that cannot be used
names file and line. Only offsets are kept (about 100 bytes a row), rows are read on demand, so
the file may be larger than memory. Rows of equal text are one task. Without `split` a row's split
is a hash of its text, so equal texts never straddle splits; with it, a text in two splits is an
error. The order is a shuffle by (seed, split).

Takes: a path. Gives: Taskset.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.errors import DataError, RewardError, TaskError, did_you_mean
from treadle.tasks.lines import Lines, parse_object
from treadle.tasks.options import check_options
from treadle.tasks.permutation import permute
from treadle.tasks.text import (
    SPLITS,
    digest,
    normalise,
    parse_date,
    says,
    split_by_date,
    split_of,
)
from treadle.types import Message, Provenance, Task

ROLES = ("system", "user", "assistant", "tool")

_EXAMPLE = '{"prompt": "7 + 5 =", "answer": "12"}'


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonlOptions:
    """Options of a "jsonl:" source."""

    test_from: str = ""
    """ISO date: rows dated on it or later are the test split, all others train or val. Every
    row must then have a date and none a split."""
    license: str = "unknown"
    """Terms of the file, for the record; an SPDX name where there is one."""


@dataclass(frozen=True, slots=True)
class _Row:
    offset: int
    line: int
    split: str


class Jsonl:
    """A Taskset over a JSON-lines file. See the module's text for the format."""

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
        """Raises ConfigError (options) and DataError (the file, naming the line)."""
        self.path = Path(path)
        self.name = name or f"jsonl:{path}"
        self.options = JsonlOptions(**check_options(JsonlOptions, options or {}, self.name))
        self._test_from = parse_date(self.options.test_from) if self.options.test_from else None
        self._system = system
        self._seed = seed
        self.num_duplicates = 0
        """Rows merged because an earlier row has the same text."""
        self.conflicts: list[tuple[int, int]] = []
        """Lines (first, later) of equal text with different answers; the first counts."""
        self._splits: dict[str, list[_Row]] = {split: [] for split in SPLITS}
        self._lines = Lines(self.path)
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
        rows = self._rows(split)
        if not 0 <= index < len(rows):
            if not rows:
                raise TaskError(
                    f"split `{split}` of {self.name} is empty; sizes: {self._sizes()}",
                    hint="name splits in the rows, or add rows",
                )
            raise IndexError(f"split `{split}` of {self.name} has {len(rows)} tasks, not {index}")
        row = rows[permute(index, len(rows), "jsonl", self._seed, split)]
        fields = _parse(self._lines.at(row.offset), f"{self.path}:{row.line}")
        return self._task(fields, row.split)

    def grade(self, task: Task, answer: str) -> Mapping[str, float]:
        """ "score": equal to the answer but for white space at the ends. "lenient": the reply
        ends in it, as `treadle.tasks.text.says` reads. Raises RewardError without an answer."""
        gold = self.gold(task)
        if gold is None:
            raise RewardError(
                f"task {task.id} of {self.name} has no `answer` to grade against",
                hint='add "answer" to the row, or set tasks.N.reward to a "module:function"',
            )
        score = float(answer.strip() == gold.strip())
        return {"score": score, "lenient": max(score, float(says(answer, gold)))}

    def gold(self, task: Task) -> str | None:
        return task.data.get("answer")

    # ----------------------------------------------------------------- reading the file

    def _rows(self, split: str) -> list[_Row]:
        if split not in self._splits:
            raise DataError(f"{self.name} has no split `{split}`", hint=did_you_mean(split, SPLITS))
        return self._splits[split]

    def _sizes(self) -> str:
        return ", ".join(f"{split} {len(rows)}" for split, rows in self._splits.items())

    def _read(self) -> None:
        by_text: dict[bytes, tuple[int, bytes]] = {}
        splits: dict[bytes, tuple[str, int]] = {}
        kept: list[tuple[int, int, bytes]] = []
        ids: dict[str, int] = {}
        for offset, line, raw in self._lines.rows():
            where = f"{self.path}:{line}"
            fields = _parse(raw, where)
            text = _text(fields)
            exact, loose = digest(text, 16), digest(normalise(text), 16)
            self._place(fields, text, loose, line, splits)
            answer = digest(str(fields.get("answer")))
            if exact in by_text:
                self.num_duplicates += 1
                if by_text[exact][1] != answer:
                    self.conflicts.append((by_text[exact][0], line))
                continue
            by_text[exact] = (line, answer)
            if fields.get("id") is not None and ids.setdefault(fields["id"], line) != line:
                raise DataError(
                    f"{where}: id {fields['id']!r} is also that of line {ids[fields['id']]}, "
                    "with another text",
                    hint="ids must be unique; leave `id` out to have them made from the text",
                )
            kept.append((offset, line, loose))
        if not kept:
            raise DataError(f"{self.path}: empty task set: the file holds no row")
        for offset, line, loose in kept:
            split = splits[loose][0]
            self._splits[split].append(_Row(offset, line, split))

    def _place(
        self,
        fields: dict[str, Any],
        text: str,
        loose: bytes,
        line: int,
        splits: dict[bytes, tuple[str, int]],
    ) -> None:
        """Decide the split of a text, or find that two rows of one text disagree."""
        where = f"{self.path}:{line}"
        split = fields.get("split")
        if self._test_from is not None:
            if split is not None or fields.get("date") is None:
                problem = "has a `split`" if split is not None else "has no `date`"
                raise DataError(f"{where}: option `test_from` is set, but this row {problem}")
            split = split_by_date(text, fields["date"], self._test_from)
        known, first = splits.get(loose, ("", 0))
        if split is None:
            split = known or split_of(text)
        elif known and known != split:
            raise DataError(
                f"{where}: this text is in split `{split}` here and `{known}` on line {first}",
                hint="equal texts (case and spacing aside) must share a split; name it on the "
                "first of them",
            )
        splits.setdefault(loose, (split, line))

    def _task(self, fields: dict[str, Any], split: str) -> Task:
        messages = tuple(_messages(fields))
        if self._system:
            messages = (Message(role="system", content=self._system), *messages)
        shown = {"prompt", "messages", "id", "split", "date", "answer"}
        data = {k: v for k, v in fields.items() if k not in shown}
        if fields.get("answer") is not None:
            data["answer"] = fields["answer"]
        return Task(
            id=fields.get("id") or digest(_text(fields)).hex(),
            taskset=self.name,
            messages=messages,
            data=data,
            split=split,
            date=fields.get("date"),
        )


# --------------------------------------------------------------------------- one row


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    """One row, checked. Raises DataError that starts with `where`."""
    fields = parse_object(raw, where, _EXAMPLE)
    if ("prompt" in fields) == ("messages" in fields):
        problem = "both `prompt` and `messages`" if "prompt" in fields else "no prompt"
        keys = ", ".join(f"`{k}`" for k in fields) or "none"
        raise DataError(
            f"{where}: {problem}; keys of this row: {keys}",
            hint="give either `prompt` (text) or `messages` (a list of role and content)",
        )
    answer = fields.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        fields["answer"] = json.dumps(answer)
    for key in ("prompt", "answer", "id", "split", "date"):
        value = fields.get(key)
        absent = key not in fields or (value is None and key != "prompt")
        if not absent and not isinstance(value, str):
            raise DataError(f"{where}: `{key}` must be text, got {type(value).__name__} {value!r}")
    if fields.get("split") is not None and fields["split"] not in SPLITS:
        raise DataError(
            f"{where}: unknown split `{fields['split']}`",
            hint=did_you_mean(fields["split"], SPLITS),
        )
    if fields.get("date") is not None:
        try:
            parse_date(fields["date"])
        except DataError as error:
            raise DataError(f"{where}: {error.message}", hint=error.hint) from None
    _check_messages(fields, where)
    return fields


def _check_messages(fields: dict[str, Any], where: str) -> None:
    if "prompt" in fields:
        if not fields["prompt"].strip():
            raise DataError(f"{where}: no prompt: `prompt` is empty")
        return
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: `messages` must be a list with at least one message")
    for number, message in enumerate(messages):
        here = f"{where}: messages[{number}]"
        if not isinstance(message, dict) or set(message) - {"role", "content", "name"}:
            raise DataError(f"{here} must hold `role` and `content`, got {message!r}")
        if message.get("role") not in ROLES:
            raise DataError(
                f"{here} has role {message.get('role')!r}", hint="one of " + ", ".join(ROLES)
            )
        if not isinstance(message.get("content"), str):
            raise DataError(f"{here} must have text as `content`, got {message.get('content')!r}")


def _messages(fields: dict[str, Any]) -> Iterator[Message]:
    if "prompt" in fields:
        yield Message(role="user", content=fields["prompt"])
        return
    for message in fields["messages"]:
        yield Message(
            role=message["role"], content=message["content"], name=message.get("name", "")
        )


def _text(fields: dict[str, Any]) -> str:
    """What decides whether two rows are the same task: all that the model is shown."""
    if "prompt" in fields:
        return fields["prompt"].strip()
    if len(fields["messages"]) == 1 and fields["messages"][0]["role"] == "user":
        return fields["messages"][0]["content"].strip()
    return "\n".join(f"{m['role']}: {m['content']}" for m in fields["messages"]).strip()
