"""The geometry of a page's charts: where lines, bars, whiskers and labels go.

Guarantees: numbers in, numbers out; what is written is the template's business, so a label is
escaped like any other text. A gap in the data is a gap in the line. At most MAX_POINTS points
per line, each the mean of its neighbours when there are more.

Takes: values by step. Gives: Chart and Bars in the units of an SVG view box.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 340, 160
LEFT, RIGHT, TOP, BOTTOM = 44, 8, 8, 22
MAX_POINTS = 120

Values = Sequence[float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line. `color` names a custom property of the page's style."""

    label: str
    color: str
    values: Values
    intervals: Sequence[tuple[float, float] | None] = ()
    """One whisker per value, where there are intervals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    label: str
    color: str
    paths: tuple[str, ...]
    """`points` of one polyline per stretch without a gap."""
    dots: tuple[tuple[float, float], ...]
    """Points that a line alone would not show: few of them, or alone in a gap."""
    whiskers: tuple[tuple[float, float, float], ...]
    """x, y of the upper end, y of the lower end."""
    last: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    title: str
    definition: str
    lines: tuple[Line, ...]
    y_ticks: tuple[tuple[float, str], ...]
    x_ticks: tuple[tuple[float, str, str], ...]
    """x, text, anchor."""
    marks: tuple[float, ...]
    """x of skipped steps."""
    hits: tuple[tuple[float, float, str], ...]
    """x, width and text of the areas that tell their values."""


def chart(
    title: str,
    definition: str,
    steps: Sequence[int],
    series: Sequence[Series],
    *,
    skipped: Sequence[str | None] = (),
) -> Chart | None:
    """A line chart whose value axis holds 0, or None when no value is known."""
    series = [s for s in series if any(v is not None for v in s.values)]
    if not series:
        return None
    buckets = _buckets(len(steps))
    xs = [steps[0] if len(steps) == 1 else _mean(steps[b]) for b in buckets]
    columns = {s.label: [_mean_known(s.values[b]) for b in buckets] for s in series}
    bounds = [v for s in series for pair in s.intervals if pair for v in pair]
    ticks = nice_ticks([v for c in columns.values() for v in c if v is not None] + bounds)
    span_x = (steps[-1] - steps[0]) or 1

    def x_of(step: float) -> float:
        share = 0.5 if steps[-1] == steps[0] else (step - steps[0]) / span_x
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y_of(value: float) -> float:
        share = (value - ticks[0]) / (ticks[-1] - ticks[0])
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    return Chart(
        title=title,
        definition=definition,
        lines=tuple(_line(s, xs, columns[s.label], x_of, y_of) for s in series),
        y_ticks=tuple((y_of(t), compact(t)) for t in ticks),
        x_ticks=_x_ticks(steps, x_of),
        marks=tuple(x_of(s) for s, reason in zip(steps, skipped, strict=False) if reason),
        hits=_hits(steps, buckets, xs, columns, skipped, x_of),
    )


def _line(series: Series, xs: Sequence[float], ys: Values, x_of, y_of) -> Line:
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if y is None:
            stretches.append([])
        else:
            stretches[-1].append((x_of(x), y_of(y)))
    stretches = [s for s in stretches if s]
    few = len(xs) <= 12
    dots = tuple(p for s in stretches for p in s if few or len(s) == 1)
    whiskers = tuple(
        (x_of(x), y_of(pair[1]), y_of(pair[0]))
        for x, pair in zip(xs, series.intervals, strict=False)
        if pair is not None
    )
    known = [v for v in series.values if v is not None]
    return Line(
        label=series.label,
        color=series.color,
        paths=tuple(" ".join(f"{x},{y}" for x, y in s) for s in stretches if len(s) > 1),
        dots=dots,
        whiskers=whiskers,
        last=compact(known[-1]),
    )


def _hits(
    steps: Sequence[int],
    buckets: Sequence[slice],
    xs: Sequence[float],
    columns: Mapping[str, Values],
    skipped: Sequence[str | None],
    x_of,
) -> tuple[tuple[float, float, str], ...]:
    out = []
    width = (WIDTH - LEFT - RIGHT) / max(1, len(xs))
    for i, (bucket, x) in enumerate(zip(buckets, xs, strict=True)):
        first, last = steps[bucket][0], steps[bucket][-1]
        text = [f"step {first}" if first == last else f"steps {first} to {last}"]
        for label, values in columns.items():
            value = values[i]
            text.append(f"{label}: {'-' if value is None else compact(value)}")
        text += [f"skipped: {reason}" for reason in skipped[bucket] if reason][:1]
        out.append((round(x_of(x) - width / 2, 1), round(width, 1), "\n".join(text)))
    return tuple(out)


def _x_ticks(steps: Sequence[int], x_of) -> tuple[tuple[float, str, str], ...]:
    if len(steps) == 1:
        return ((x_of(steps[0]), str(steps[0]), "middle"),)
    middle = steps[len(steps) // 2]
    ticks = [(steps[0], "start"), (middle, "middle"), (steps[-1], "end")]
    if len(steps) < 5:
        del ticks[1]
    return tuple((x_of(s), str(s), anchor) for s, anchor in ticks)


def _buckets(n: int) -> list[slice]:
    count = min(n, MAX_POINTS)
    return [slice(i * n // count, (i + 1) * n // count) for i in range(count)]


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values)


def _mean_known(values: Values) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def nice_ticks(values: Sequence[float], count: int = 4) -> list[float]:
    """Three to six round numbers that span the values and 0."""
    low, high = min(0.0, *values), max(0.0, *values)
    if high - low < 1e-12:
        high = low + 1.0
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def compact(value: float) -> str:
    """Short and readable: 0.42, 1.5k, 3.1e-4."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    if size < 1000:
        return f"{value:.3g}"
    for limit, letter in ((1e6, "k"), (1e9, "M"), (1e12, "G")):
        if size < limit:
            return f"{value / limit * 1000:.3g}{letter}"
    return f"{value:.2e}"


# --------------------------------------------------------------------------- bars


BAR_LEFT, BAR_RIGHT, BAR_HEIGHT, BAR_GAP = 92, 46, 14, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    label: str
    color: str
    faint: bool
    y: float
    width: float
    whisker: tuple[float, float] | None
    """x of both ends."""
    value: str
    tip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    title: str
    hint: str
    """The whole name, where the title is short."""
    bars: tuple[Bar, ...]
    height: float
    notes: tuple[str, ...]


def bars(
    title: str,
    rows: Sequence[tuple[str, str, bool, Mapping[str, object] | None]],
    *,
    hint: str = "",
    notes: Sequence[str] = (),
) -> Bars:
    """Horizontal bars from 0 to 1, or to the largest mean: (label, color, faint, estimate as
    JSON)."""
    out = []
    y = 2.0
    means = [e["mean"] for _, _, _, e in rows if e is not None]
    top = max([1.0, *(m for m in means if isinstance(m, float))])
    scale = (WIDTH - BAR_LEFT - BAR_RIGHT) / top
    for i, (label, color, faint, estimate) in enumerate(rows):
        y += BAR_GAP if i and not faint else BAR_GAP * 2 if i else 0
        mean = None if estimate is None else estimate["mean"]
        low, high = (None, None) if estimate is None else estimate["ci95"]  # type: ignore[misc]
        whisker = None
        tip = f"{label}: not measured"
        if isinstance(mean, float):
            tip = f"{label}: {mean:.3f}"
            if isinstance(low, float) and isinstance(high, float):
                ends = (min(top, max(0.0, low)), min(top, max(0.0, high)))
                whisker = (
                    round(BAR_LEFT + ends[0] * scale, 1),
                    round(BAR_LEFT + ends[1] * scale, 1),
                )
                tip += f", 95% interval {low:.3f} to {high:.3f}"
        share = max(0.0, mean) if isinstance(mean, float) else 0.0
        out.append(
            Bar(
                label=label,
                color=color,
                faint=faint,
                y=y,
                width=round(share * scale, 1),
                whisker=whisker,
                value=f"{mean:.3f}" if isinstance(mean, float) else "-",
                tip=tip,
            )
        )
        y += BAR_HEIGHT
    return Bars(title=title, hint=hint, bars=tuple(out), height=y + 4, notes=tuple(notes))
