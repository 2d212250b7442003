"""A JSON-lines file: offsets of its rows, and one row as an object.

Guarantees: every row is read once when the file is opened and on demand after that, so that the
file may be larger than memory; a row that is no JSON object names file and line; a file that
changed since it was opened is refused.

Takes: a path. Gives: rows as dicts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treadle.errors import DataError, TaskError


class Lines:
    """One file. `rows` reads all of it and sets `sha256`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.sha256 = ""
        self._stamp = (0, 0)

    def rows(self) -> Iterator[tuple[int, int, bytes]]:
        """(offset, line number from 1, bytes) of every line that is not blank.

        Raises DataError: the file cannot be read.
        """
        seen = hashlib.sha256()
        offset = 0
        try:
            stat = self.path.stat()
            with self.path.open("rb") as file:
                for number, raw in enumerate(file, start=1):
                    seen.update(raw)
                    if raw.strip():
                        yield offset, number, raw
                    offset += len(raw)
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataError(
                f"{self.path} cannot be read: {reason}",
                hint=f"the path is relative to {Path.cwd()}" if not self.path.is_absolute() else "",
            ) from None
        self.sha256 = seen.hexdigest()
        self._stamp = (stat.st_size, stat.st_mtime_ns)

    def at(self, offset: int) -> bytes:
        """The row at an offset that `rows` gave. Raises TaskError: the file changed since."""
        stat = self.path.stat()
        if (stat.st_size, stat.st_mtime_ns) != self._stamp:
            raise TaskError(
                f"{self.path} changed since it was opened", hint="start again to read the new file"
            )
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.readline()


def parse_object(raw: bytes, where: str, example: str) -> dict[str, Any]:
    """One row. Raises DataError that starts with `where`; `example` shows what a row is."""
    try:
        fields = json.loads(
            raw.decode("utf-8-sig"), parse_constant=_no_constant, parse_float=_finite
        )
        half = _half_a_pair(raw, fields)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8: byte {error.start} is {raw[error.start]:#x}"
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not JSON: {error.msg} at column {error.colno}: {excerpt(raw)}",
            hint="one complete JSON object per line",
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}: {excerpt(raw)}") from None
    if half:
        raise DataError(
            f"{where}: {half} is half of a surrogate pair, which is no text: {excerpt(raw)}",
            hint="was a text cut in the middle of a character? Write it anew, or drop the row",
        )
    if not isinstance(fields, dict):
        raise DataError(
            f"{where}: a row must be an object, got {type(fields).__name__}: {excerpt(raw)}",
            hint=f"e.g. {example}",
        )
    return fields


def excerpt(raw: bytes) -> str:
    text = raw.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON value")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{digits[:40]} is beyond the largest number that can be held")
    return value


def _half_a_pair(raw: bytes, fields: Any) -> str:
    """The first lone surrogate anywhere in a row, as its escape; empty when there is none."""
    # The bytes are UTF-8, so that only an escape can make one.
    if b"\\ud" not in raw.lower():
        return ""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"\\u{ord(error.object[error.start]):04x}"
    return ""
