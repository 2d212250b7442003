"""The algorithms that a run can name: an advantage, a loss, an aggregation and a correction each.

An algorithm is data: `learn.algorithm` (or `tasks.N.algorithm`, for the rows of one task set) names
an entry of ALGORITHMS, and `learn.advantage`, `learn.loss`, `learn.aggregation`,
`learn.loss_options` and `learn.correction` replace parts of the run's own.

    presets     the table
    resolve     what one name and its replaced parts come to
    run         what a whole run comes to, all its task sets together

Guarantees: what is returned by `resolve` and `resolve_run` can run: every name is known, every
option is one that the loss takes and under which it is a policy gradient, and of what is set
nothing is without effect.

Takes: LearnConfig or RunConfig. Gives: Algorithms.
"""

from treadle.algorithms.presets import ALGORITHMS, NONE, Algorithm
from treadle.algorithms.resolve import describe, loss_options, resolve
from treadle.algorithms.run import check_critic, check_teacher, resolve_run

__all__ = [
    "ALGORITHMS",
    "NONE",
    "Algorithm",
    "check_critic",
    "check_teacher",
    "describe",
    "loss_options",
    "resolve",
    "resolve_run",
]
