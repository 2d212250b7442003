"""An evaluation in numbers: strict and lenient rate with intervals, and what they rest on (B155).

Takes: an EvalRow. Gives: estimates, JSON values, one line of text.
"""

from __future__ import annotations

from typing import Any

from treadle.evals.statistics import Estimate, Scores, rate
from treadle.store import EvalResult, EvalRow

PARTS = ("strict", "lenient")


def scores_of(row: EvalRow, part: str) -> Scores:
    """Question id -> scores of its samples: the strict ones, or a named part of them."""
    scores: dict[str, list[float | None]] = {}
    for result in row.results:
        scores.setdefault(result.task_id, []).append(_value(result, part))
    return scores


def _value(result: EvalResult, part: str) -> float | None:
    if part == "strict" or result.score is None:
        return result.score
    return result.parts.get(part)


def parts_of(row: EvalRow) -> tuple[str, ...]:
    """"strict", and "lenient" where the task set has such a reading."""
    has = any("lenient" in r.parts for r in row.results)
    return PARTS if has else PARTS[:1]


def rates_of(row: EvalRow) -> dict[str, Estimate]:
    return {part: rate(scores_of(row, part)) for part in parts_of(row)}


def to_dict(row: EvalRow) -> dict[str, Any]:
    """JSON values: the rates, and everything that makes them mean something."""
    return {
        "taskset": row.taskset,
        "split": row.split,
        "step": row.step,
        "version": row.version,
        "n": row.n,
        "k": row.k,
        "temperature": row.temperature,
        "data_hash": row.data_hash,
        "error_share": row.error_share,
        "settings": dict(row.settings),
        "complete": row.finished,
        **{part: estimate.to_dict() for part, estimate in rates_of(row).items()},
    }


def text_of(estimate: Estimate) -> str:
    """"12.5% [9.1%, 15.9%]"."""
    low, high = estimate.ci95
    if estimate.n == 0:
        return "no scored answer"
    interval = "no interval" if low != low else f"[{low:.1%}, {high:.1%}]"
    return f"{estimate.mean:.1%} {interval}"


def rates_line(row: EvalRow) -> str:
    """"gcd (val)  strict 12.5% [9.1%, 15.9%]  lenient ...  70 questions x 4"."""
    parts = [f"{row.taskset} ({row.split})"]
    parts += [f"{part} {text_of(estimate)}" for part, estimate in rates_of(row).items()]
    parts.append(f"{row.n} questions x {row.k} samples at temperature {row.temperature:g}")
    if row.error_share:
        parts.append(f"{row.error_share:.1%} unscored")
    return "  ".join(parts)
