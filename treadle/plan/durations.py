"""How long rollouts take: a sample or a named distribution, and what a planner asks of it.

A duration is the seconds for which one rollout holds its place: sampling, environment and tool
time together. Text says which distribution is meant:

    lognormal:mean=20,sigma=1      exp:mean=20      fixed:20
    durations.json                 a list of seconds; a list of lists is groups, kept together
    durations.csv                  a column `duration_s`, `seconds` or `duration`, or a single one
    any of these with ,clip=160    no rollout takes longer: a limit on turns, tokens or time

Guarantees: every mean is taken over the same grid of values and tail probabilities, so that it is
the same number each time; drawing is exact (not from the grid) and depends on the generator alone.
`mean` is that of the distribution before `clip`. Seconds are finite, >= 0, and not all 0.

Durations of one group are independent unless the sample keeps groups together. Real groups share
a prompt, so where a sample of whole groups can be had it is the better one.

Takes: text, numbers or a file. Gives: `Durations`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.errors import ConfigError, DataError, did_you_mean

Floats = NDArray[np.float64]

GRID = 4000
"""Cells of a named distribution."""

MAX_FILE_BYTES = 256 * 2**20
MAX_S = 1e9
"""A rollout of 30 years is a mistake in the unit."""
MAX_SIGMA = 3.0
"""Beyond it single rollouts outlast any run, and means say nothing."""

KINDS = ("exp", "fixed", "lognormal")
EXAMPLE = "e.g. lognormal:mean=20,sigma=1 or exp:mean=20,clip=160 or durations.json"
COLUMNS = ("duration_s", "seconds", "duration")


@dataclass(frozen=True, kw_only=True, eq=False)
class Durations:
    """Seconds that rollouts take."""

    text: str
    """What it was made from."""
    values_s: Floats
    """Ascending."""
    tail: Floats
    """P(duration > values_s[i]); descending, the last about 0."""
    draw: Callable[[np.random.Generator, int, int], Floats]
    """draw(generator, groups, size): a row per group."""
    groups_s: Floats | None = None
    """Whole groups, a row each, where the sample keeps them together."""

    @cached_property
    def mean_s(self) -> float:
        return float(self.values_s @ self._weights)

    @cached_property
    def mean_square(self) -> float:
        """Seconds squared."""
        return float(self.values_s**2 @ self._weights)

    @cached_property
    def _weights(self) -> Floats:
        return -np.diff(self.tail, prepend=1.0)

    def quantile(self, p: float) -> float:
        """Smallest value with at least `p` of the durations at or below it."""
        index = int(np.searchsorted(-self.tail, p - 1.0, side="left"))
        return float(self.values_s[min(index, len(self.values_s) - 1)])

    def longest(self, size: int) -> tuple[Floats, Floats]:
        """The longest of `size` rollouts of a group: values and their probabilities."""
        if self.groups_s is not None and size > 1:
            longest = np.sort(self._whole(size).max(axis=1))
            return longest, np.full(len(longest), 1.0 / len(longest))
        return self.values_s, -np.diff(_tail_of_max(self.tail, size), prepend=1.0)

    def mean_longest_s(self, size: int) -> float:
        """E[max of `size`]."""
        values, weights = self.longest(size)
        return float(values @ weights)

    def tailness(self, size: int) -> float:
        """M = E[max of `size`] / E[duration]."""
        return self.mean_longest_s(size) / self.mean_s

    def token_weighted_longest_s(self, size: int) -> float:
        """E[L * Mx] / E[L], Mx the longest of L's group: the longest as a token sees it."""
        if self.groups_s is not None and size > 1:
            groups = self._whole(size)
            return float((groups * groups.max(axis=1, keepdims=True)).mean() / groups.mean())
        if size == 1:
            return self.mean_square / self.mean_s
        values = self.values_s
        others = _tail_of_max(self.tail, size - 1)
        weights = -np.diff(others, prepend=1.0)
        above = np.cumsum((values * weights)[::-1])[::-1] - values * weights
        longest = values * (1.0 - others) + above
        return float((values * longest) @ self._weights / self.mean_s)

    def _whole(self, size: int) -> Floats:
        assert self.groups_s is not None
        found = self.groups_s.shape[1]
        if found != size:
            raise ConfigError(
                f"{self.text} holds groups of {found}, the group size asked for is {size}",
                hint=f"give the group size {found}, or a flat list of seconds",
            )
        return self.groups_s

    # ------------------------------------------------------------------ variants

    def mapped(self, change: Callable[[Floats], Floats], text: str) -> Durations:
        """Each duration changed by an increasing function."""
        draw = self.draw
        return Durations(
            text=text,
            values_s=change(self.values_s),
            tail=self.tail,
            draw=lambda rng, groups, size: change(draw(rng, groups, size)),
            groups_s=None if self.groups_s is None else change(self.groups_s),
        )

    def scaled(self, factor: float) -> Durations:
        """All durations times `factor`."""
        return self.mapped(lambda s: s * factor, f"{self.text} x{factor:g}")

    def clipped(self, clip_s: float) -> Durations:
        """None longer than `clip_s`."""
        return self.mapped(lambda s: np.minimum(s, clip_s), f"{self.text},clip={clip_s:g}")

    def spread(self, power: float) -> Durations:
        """The same mean and another tail: each duration to the `power`, > 1 for a heavier one."""
        raw = self.mapped(lambda s: s**power, f"{self.text} spread {power:g}")
        factor = self.mean_s / raw.mean_s
        return raw.mapped(lambda s: s * factor, raw.text)


def _tail_of_max(tail: Floats, size: int) -> Floats:
    """P(max of `size` > x) from P(one > x), without cancellation where it is small."""
    with np.errstate(divide="ignore"):  # log1p(-1) = -inf is the right answer at the left end
        return -np.expm1(size * np.log1p(-tail))


# --------------------------------------------------------------------------- distributions


def lognormal(mean_s: float, sigma: float) -> Durations:
    """exp of a normal with deviation `sigma`, scaled to the mean."""
    _check(mean_s, "mean")
    if not 0 <= sigma <= MAX_SIGMA:
        raise ConfigError(
            f"`sigma` must be between 0 and {MAX_SIGMA:g}, got {sigma:g}",
            hint="it is the deviation of the log: 0.5 is light, 1 usual for agents, 1.5 heavy",
        )
    if sigma == 0:
        return fixed(mean_s)
    log_median = math.log(mean_s) - sigma**2 / 2
    edges = np.linspace(-9.0, 9.0 + 2 * sigma, GRID + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    tail = np.array([math.erfc(z / math.sqrt(2)) / 2 for z in edges[1:]])
    values = np.exp(log_median + sigma * middle)
    values *= mean_s / (values @ -np.diff(tail, prepend=1.0))  # the grid's last millionth
    return Durations(
        text=f"lognormal:mean={mean_s:g},sigma={sigma:g}",
        values_s=values,
        tail=tail,
        draw=lambda rng, groups, size: rng.lognormal(log_median, sigma, (groups, size)),
    )


def exponential(mean_s: float) -> Durations:
    _check(mean_s, "mean")
    tail = np.exp(-np.linspace(0.0, 40.0, GRID + 1))[1:]
    upper = np.concatenate([[1.0], tail[:-1]])
    # The mean of each cell, so that means are exact: E[x | a < x < b] with weight e^-a - e^-b.
    edges = -np.log(np.concatenate([[1.0], tail]))
    inside = ((edges[:-1] + 1) * upper - (edges[1:] + 1) * tail) / (upper - tail)
    return Durations(
        text=f"exp:mean={mean_s:g}",
        values_s=mean_s * inside,
        tail=tail,
        draw=lambda rng, groups, size: rng.exponential(mean_s, (groups, size)),
    )


def fixed(seconds: float) -> Durations:
    _check(seconds, "seconds")
    return Durations(
        text=f"fixed:{seconds:g}",
        values_s=np.array([seconds]),
        tail=np.array([0.0]),
        draw=lambda rng, groups, size: np.full((groups, size), seconds),
    )


def measured(seconds: Sequence[float] | Floats, text: str = "a sample") -> Durations:
    """The durations of a sample, each as likely as any other."""
    values = _checked(np.asarray(seconds, dtype=np.float64), text)
    ordered = np.sort(values)
    count = len(ordered)
    return Durations(
        text=text,
        values_s=ordered,
        tail=1.0 - np.arange(1, count + 1) / count,
        draw=lambda rng, groups, size: rng.choice(ordered, (groups, size)),
    )


def measured_groups(
    groups: Sequence[Sequence[float]] | Floats, text: str = "a sample of groups"
) -> Durations:
    """Whole groups, each as likely as any other; what is alike within a group stays so."""
    sizes = sorted({len(group) for group in groups})
    if len(sizes) != 1 or not sizes[0]:
        raise DataError(
            f"{text}: groups have {', '.join(map(str, sizes)) or 'no'} durations",
            hint="all groups need the same number of durations; or give one flat list",
        )
    values = np.asarray(groups, dtype=np.float64)
    flat = measured(values.ravel(), text)
    if sizes == [1]:
        return flat

    def draw(rng: np.random.Generator, count: int, size: int) -> Floats:
        return (
            values[rng.integers(len(values), size=count)]
            if size == sizes[0]
            else flat.draw(rng, count, size)
        )

    return Durations(text=text, values_s=flat.values_s, tail=flat.tail, draw=draw, groups_s=values)


def _check(value: float, name: str) -> None:
    if not 0 < value <= MAX_S:
        raise ConfigError(
            f"`{name}` must be > 0 and at most {MAX_S:g} seconds, got {value:g}", hint=EXAMPLE
        )


def _checked(values: Floats, text: str) -> Floats:
    if values.ndim != 1 or not values.size:
        raise DataError(f"{text}: no durations", hint="give at least one, in seconds")
    bad = np.flatnonzero(~((values >= 0) & (values <= MAX_S)))
    if bad.size:
        raise DataError(
            f"{text}: {bad.size} of {values.size} durations are not between 0 and {MAX_S:g} s, "
            f"the first is number {bad[0] + 1}: {values[bad[0]]:g}",
            hint="give seconds; leave out rollouts that have none",
        )
    if not values.any():
        raise DataError(f"{text}: every duration is 0", hint="give seconds")
    return values


# --------------------------------------------------------------------------- text


def parse(text: str) -> Durations:
    """What the module docstring lists. Raises ConfigError (the text), DataError (the file)."""
    kind, colon, rest = text.partition(":")
    if colon and kind in KINDS:
        return _named(text, kind, rest)
    path, comma, option = text.rpartition(",clip=")
    path, clip = (path, _number(option, "clip", text)) if comma else (text, None)
    if Path(path).suffix.lower() in (".json", ".csv"):
        found = read(Path(path))
        return found if clip is None else found.clipped(_clip(clip, text))
    raise ConfigError(
        f"`{text[:200]}` says no durations",
        hint=f"{did_you_mean(kind, KINDS)} {EXAMPLE}" if colon else EXAMPLE,
    )


def _named(text: str, kind: str, rest: str) -> Durations:
    known = ("mean", "sigma", "clip") if kind == "lognormal" else ("mean", "clip")
    options: dict[str, float] = {}
    for index, part in enumerate(rest.split(",")):
        name, equals, value = part.partition("=")
        if not equals and index == 0:
            name, value = "mean", part
        name = name.strip()
        if name not in known:
            raise ConfigError(
                f"`{text[:200]}`: {kind} has no `{name[:40]}`", hint=did_you_mean(name, known)
            )
        if name in options:
            raise ConfigError(f"`{text[:200]}`: `{name}` is given twice", hint=EXAMPLE)
        options[name] = _number(value, name, text)
    missing = [n for n in known if n not in options and n != "clip"]
    if missing:
        raise ConfigError(f"`{text[:200]}`: {kind} needs `{missing[0]}`", hint=EXAMPLE)
    if kind == "lognormal":
        found = lognormal(options["mean"], options["sigma"])
    else:
        found = (exponential if kind == "exp" else fixed)(options["mean"])
    return found.clipped(_clip(options["clip"], text)) if "clip" in options else found


def _number(value: str, name: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(
            f"`{text[:200]}`: `{name}` must be a number, got `{value[:40]}`", hint=EXAMPLE
        )
    return number


def _clip(clip_s: float, text: str) -> float:
    if not 0 < clip_s <= MAX_S:
        raise ConfigError(f"`{text[:200]}`: `clip` must be > 0 seconds, got {clip_s:g}")
    return clip_s


# --------------------------------------------------------------------------- files


def read(path: Path) -> Durations:
    """A JSON list (of seconds, or of groups) or a CSV column. Raises DataError."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise DataError(
                f"{path} has {size / 2**20:,.0f} MiB, more than {MAX_FILE_BYTES / 2**20:,.0f}",
                hint="a sample of some thousand durations says as much",
            )
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} cannot be read: {error}", hint="give the path of a JSON or CSV file"
        ) from error
    return (_from_json if path.suffix.lower() == ".json" else _from_csv)(text, str(path))


def _from_json(text: str, name: str) -> Durations:
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{name}: not JSON: {error}", hint="a list of seconds: [3.1, 4.5]"
        ) from error
    if not isinstance(tree, list) or not tree:
        raise DataError(f"{name}: expected a list of seconds", hint="e.g. [3.1, 4.5]")
    if all(isinstance(row, list) for row in tree):
        groups = [
            [_json_number(v, f"{name}: group {i + 1}") for v in g] for i, g in enumerate(tree)
        ]
        return measured_groups(groups, name)
    return measured([_json_number(v, f"{name}: entry {i + 1}") for i, v in enumerate(tree)], name)


def _json_number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(
            f"{where} is no number of seconds: {json.dumps(value)[:60]}", hint="e.g. [3.1, 4.5]"
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _from_csv(text: str, name: str) -> Durations:
    try:
        rows = [row for row in csv.reader(text.splitlines()) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise DataError(f"{name}: not CSV: {error}", hint="one duration a line") from error
    if not rows:
        raise DataError(f"{name}: no durations", hint="one duration a line, in seconds")
    head = [cell.strip().lower() for cell in rows[0]]
    column = next((head.index(known) for known in COLUMNS if known in head), None)
    if column is not None:
        start = 1
    elif len(head) == 1:
        column, start = 0, 0 if _is_number(head[0]) else 1
    else:
        raise DataError(
            f"{name}: no column of {', '.join(COLUMNS)} among {', '.join(head)[:200]}",
            hint="name one column `duration_s`",
        )
    values = []
    for line, row in enumerate(rows[start:], start=start + 1):
        cell = row[column].strip() if column < len(row) else ""
        if not _is_number(cell):
            raise DataError(
                f"{name}: row {line} has no number of seconds: {cell[:40]!r}",
                hint="leave out rollouts that have none",
            )
        values.append(float(cell))
    return measured(values, name)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
