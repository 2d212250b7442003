"""An evaluation in numbers: rates with intervals, and what they rest on (B155).

Guarantees: what a reward function paid is called a reward, never a rate.

Takes: an EvalRow. Gives: estimates, JSON values, one line of text.
"""

from __future__ import annotations

import math
from typing import Any

from treadle.evals.held_out import MEASURES, Measure, num_ungraded, scores_of
from treadle.evals.statistics import Estimate, rate
from treadle.store import EvalRow


def rates_of(row: EvalRow) -> dict[Measure, Estimate]:
    return {measure: rate(scores) for measure, scores in scores_of(row).items()}


def describe(row: EvalRow) -> dict[str, Any]:
    """JSON values: the rates, and everything that makes them mean something."""
    rates = rates_of(row)
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
        "ungraded": num_ungraded(row),
        **{m: rates[m].to_dict() if m in rates else None for m in MEASURES},
    }


def text_of(measure: Measure, estimate: Estimate, *, gain: bool = False) -> str:
    """As "12.5% [9.1%, 15.9%]", or "1.250 [1.100, 1.400]" for a reward; a gain has its sign."""
    if estimate.n == 0:
        return "no scored answer"
    form = ("+" if gain else "") + (".3f" if measure == "reward" else ".1%")
    mean = f"{estimate.mean:{form}}"
    if math.isnan(estimate.ci95[0]):
        return f"{mean} ({'one question' if estimate.n == 1 else 'all equal'}, no interval)"
    return f"{mean} [{estimate.ci95[0]:{form}}, {estimate.ci95[1]:{form}}]"


def rates_line(row: EvalRow) -> str:
    """As "gcd (val)  strict 12.5% [9.1%, 15.9%]  lenient ...  70 questions x 4 samples ..."."""
    parts = [f"{row.taskset} ({row.split})"]
    parts += [f"{part} {text_of(part, estimate)}" for part, estimate in rates_of(row).items()]
    parts.append(f"{row.n} questions x {row.k} samples at temperature {row.temperature:g}")
    if ungraded := num_ungraded(row):
        parts.append(f"{ungraded} questions not graded by the task set are left out")
    if row.error_share:
        parts.append(f"{row.error_share:.1%} unscored")
    return "  ".join(parts)
