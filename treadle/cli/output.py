"""What a command prints: tables for people, one JSON document for programs.

Guarantees: stdout holds the result alone; text that a model or a task wrote is data and never
reaches the terminal as control sequences.

Takes: rows and values. Gives: lines on stdout.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_json(value: Any) -> None:
    """One document; NaN and infinities become null, paths text."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """JSON values from dataclasses, paths, tuples and numbers that JSON cannot say."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Path):
        return str(value)
    return value


def printable(text: str, limit: int = 0) -> str:
    """Model-written text on one line: control characters shown, not obeyed."""
    line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return line if not limit or len(line) <= limit else line[: limit - 3] + "..."


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """A table on stdout; cells are text, never markup."""
    table = Table(title=title or None, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell))) for cell in row))
    Console(file=sys.stdout, soft_wrap=False).print(table)


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
