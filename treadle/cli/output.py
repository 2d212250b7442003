"""What a command prints: tables for people, one JSON document for programs.

Guarantees: stdout holds the result alone; text that a model or a task wrote is data and never
reaches the terminal as control sequences.

Takes: rows and values. Gives: lines on stdout.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from treadle.evals.visible import one_line


def print_json(value: Any) -> None:
    """One ASCII document; NaN and infinities become null, paths text."""
    print(json.dumps(plain(value), indent=2, allow_nan=False))


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


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """A table on stdout; cells are text, never markup. Folded only on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(one_line(str(cell))) for cell in row))
    width = None if sys.stdout.isatty() else 10_000
    Console(file=sys.stdout, soft_wrap=False, width=width).print(table)


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Names and values in two columns; values are text, never markup."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        print(f"{name:<{width}}  {one_line(str(value))}")


def print_wrapped(label: str, text: str) -> None:
    """A label and text beside it, in as many lines of the terminal's width as that takes."""
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    lines = textwrap.wrap(
        one_line(text),
        max(width, len(label) + 20),
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_on_hyphens=False,
    )
    print("\n".join(lines) or label.rstrip())


def size(num_bytes: float) -> str:
    """As "12 KiB", "12 MiB" or "1.3 GiB"."""
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:,.0f} KiB"
    return f"{num_bytes / 2**20:,.0f} MiB" if num_bytes < 2**30 else f"{num_bytes / 2**30:,.1f} GiB"


def ago(moment: float) -> str:
    """How long ago a time in seconds since the epoch was."""
    return duration(max(0.0, time.time() - moment))


def duration(seconds: float) -> str:
    """As "45 s", "12 min", "3.5 h" or "4.0 days"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
