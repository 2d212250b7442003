"""Judges trajectories, out of reach of what is judged.

    pool = GraderPool(workers=2)
    reward = await pool.score(grader_of(cfg.tasks, cfg.seed), trajectory, limit_s=10.0)

Guarantees: a grader that fails in any way leaves its trajectory unscored, which is not 0.

Takes: Trajectory. Gives: Reward.
"""

from treadle.reward.graders import (
    TasksetGrader,
    can_grade,
    grader_of,
    require_gradable,
    without_own,
)
from treadle.reward.pool import GraderPool

__all__ = [
    "GraderPool",
    "TasksetGrader",
    "can_grade",
    "grader_of",
    "require_gradable",
    "without_own",
]
