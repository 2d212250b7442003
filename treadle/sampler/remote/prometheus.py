"""The text format in which engines give their metrics.

Guarantees: any text gives samples or nothing, never an error; a line that is not a sample is
skipped; counters are found with and without their `_total`.

Takes: the answer of /metrics. Gives: Samples. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_LINE = re.compile(
    r"^([a-zA-Z_:][a-zA-Z0-9_:]*)"  # name
    r"(?:\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})?"  # labels; a brace may stand in a quoted value
    r"\s+(\S+)(?:\s+-?\d+)?\s*$"  # value and timestamp
)
_LABEL = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*\"((?:[^\"\\]|\\.)*)\"")
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Samples:
    """All samples of one answer, by name."""

    by_name: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict[str, tuple[Sample, ...]])

    def of(self, name: str, **labels: str) -> tuple[Sample, ...]:
        found = self.by_name.get(name) or self.by_name.get(f"{name}_total") or ()
        return tuple(
            s for s in found if all(s.labels.get(key) == value for key, value in labels.items())
        )

    def total(self, *names: str, **labels: str) -> float | None:
        """Sum over engines of the first of `names` that is there; None when none is."""
        for name in names:
            if found := self.of(name, **labels):
                return math.fsum(s.value for s in found)
        return None

    def mean(self, *names: str) -> float | None:
        """Mean over engines of the first of `names` that is there; None when none is."""
        for name in names:
            if found := self.of(name):
                return math.fsum(s.value for s in found) / len(found)
        return None


def parse(text: str) -> Samples:
    """Samples with a finite value."""
    found: dict[str, list[Sample]] = {}
    for line in text.split("\n"):
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if math.isfinite(value):
            pairs = {key: _unescape(text) for key, text in _LABEL.findall(labels or "")}
            found.setdefault(name, []).append(Sample(pairs, value))
    return Samples({name: tuple(samples) for name, samples in found.items()})


def _unescape(text: str) -> str:
    return re.sub(r"\\.", lambda m: _ESCAPES.get(m.group(), m.group()), text)
