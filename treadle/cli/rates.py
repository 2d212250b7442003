"""An evaluation in numbers: strict and lenient rate with intervals, and what they rest on (B155).

Takes: an EvalRow. Gives: estimates, JSON values, one line of text.
"""

from __future__ import annotations

from typing import Any

from treadle.evals.held_out import lenient_scores, strict_scores
from treadle.evals.statistics import Estimate, Scores, rate
from treadle.store import EvalRow

PARTS = ("strict", "lenient")


def scores_of(row: EvalRow) -> dict[str, Scores]:
    """ "strict", and "lenient" where the task set has such a reading."""
    lenient = lenient_scores(row)
    return {"strict": strict_scores(row)} | ({} if lenient is None else {"lenient": lenient})


def rates_of(row: EvalRow) -> dict[str, Estimate]:
    return {part: rate(scores) for part, scores in scores_of(row).items()}


def describe(row: EvalRow) -> dict[str, Any]:
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
        "finished": row.finished,
        **{part: estimate.to_dict() for part, estimate in rates_of(row).items()},
    }


def text_of(estimate: Estimate, *, gain: bool = False) -> str:
    """As "12.5% [9.1%, 15.9%]"; a gain has its sign."""
    if estimate.n == 0:
        return "no scored answer"
    form = "+.1%" if gain else ".1%"
    low, high = (f"{bound:{form}}" for bound in estimate.ci95)
    interval = f"[{low}, {high}]" if estimate.n > 1 else "(one question, no interval)"
    return f"{estimate.mean:{form}} {interval}"


def rates_line(row: EvalRow) -> str:
    """As "gcd (val)  strict 12.5% [9.1%, 15.9%]  lenient ...  70 questions x 4 samples ..."."""
    parts = [f"{row.taskset} ({row.split})"]
    parts += [f"{part} {text_of(estimate)}" for part, estimate in rates_of(row).items()]
    parts.append(f"{row.n} questions x {row.k} samples at temperature {row.temperature:g}")
    if row.error_share:
        parts.append(f"{row.error_share:.1%} unscored")
    return "  ".join(parts)
