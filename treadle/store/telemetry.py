"""What a run says about itself: metrics, time per stage, events.

Guarantees: every source of metrics has its own axis, so a value that arrives late or out of
order is kept where it belongs (B152); NaN and infinities come back as they were.

Takes: numbers and JSON-like values. Gives: rows in run.db, and series back.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from treadle.errors import ContractError
from treadle.store import encode
from treadle.store.database import Database
from treadle.store.records import Event, Metric, Span


class Telemetry:
    """Metrics, spans and events; part of `Store`."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add_metrics(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        """Values of one moment on one axis; a value stored again replaces the old one.

        Args:
            axis: whose count `step` is, e.g. "train", "eval", "engine".
            values: by metric name; numbers of any kind, NaN included.
        """
        with self._db.write(f"storing metrics of {axis} {step}", durable=False) as db:
            put_metrics(db, axis, step, values, time.time())

    def metrics(self, *, axis: str | None = None, name: str | None = None) -> tuple[Metric, ...]:
        """Values by (axis, name, step)."""
        with self._db.read("reading metrics") as db:
            rows = db.execute(
                "SELECT axis, step, name, value, time FROM metrics "
                "WHERE (?1 IS NULL OR axis = ?1) AND (?2 IS NULL OR name = ?2) "
                "ORDER BY axis, name, step",
                (axis, name),
            ).fetchall()
        return tuple(
            Metric(axis=a, step=s, name=n, value=math.nan if v is None else v, time=t)
            for a, s, n, v, t in rows
        )

    def add_spans(self, spans: Sequence[Span]) -> None:
        with self._db.write("storing spans", durable=False) as db:
            db.executemany(
                "INSERT INTO spans (step, stage, started_at, duration_s) VALUES (?, ?, ?, ?)",
                [(s.step, s.stage, s.started_at, s.duration_s) for s in spans],
            )

    def spans(self, *, step: int | None = None) -> tuple[Span, ...]:
        """In order of their start."""
        with self._db.read("reading spans") as db:
            rows = db.execute(
                "SELECT step, stage, started_at, duration_s FROM spans "
                "WHERE ?1 IS NULL OR step = ?1 ORDER BY started_at, id",
                (step,),
            ).fetchall()
        return tuple(Span(step=s, stage=g, started_at=a, duration_s=d) for s, g, a, d in rows)

    def seconds_by_stage(self) -> dict[str, float]:
        """Total duration of each stage over the run, largest first; stages may overlap."""
        with self._db.read("reading spans") as db:
            rows = db.execute(
                "SELECT stage, SUM(duration_s) FROM spans GROUP BY stage ORDER BY 2 DESC"
            ).fetchall()
        return dict(rows)

    def add_event(self, kind: str, data: Mapping[str, Any] | None = None) -> None:
        """Something worth telling: an error, an alarm, a resume."""
        text = encode.dumps(dict(data or {}), f"event {kind}")
        with self._db.write(f"storing event {kind}", durable=False) as db:
            db.execute(
                "INSERT INTO events (time, kind, data) VALUES (?, ?, ?)", (time.time(), kind, text)
            )

    def events(self, *, kind: str | None = None) -> tuple[Event, ...]:
        """In order of arrival."""
        with self._db.read("reading events") as db:
            rows = db.execute(
                "SELECT time, kind, data FROM events WHERE ?1 IS NULL OR kind = ?1 ORDER BY id",
                (kind,),
            ).fetchall()
        return tuple(Event(time=t, kind=k, data=encode.loads(d)) for t, k, d in rows)


def put_metrics(
    db: sqlite3.Connection, axis: str, step: int, values: Mapping[str, float], now: float
) -> None:
    """Inside a transaction of the caller."""
    db.executemany(
        "INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?, ?)",
        [(axis, step, name, value, now) for name, value in _numbers(axis, values)],
    )


def _numbers(axis: str, values: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    for name, value in values.items():
        try:
            yield name, float(value)
        except (TypeError, ValueError) as error:
            raise ContractError(f"metric {name} of {axis} is not a number: {value!r}") from error
