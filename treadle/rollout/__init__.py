"""Everything that makes one trajectory, and groups of them; knows no training."""

from treadle.rollout.demonstrate import demonstrate
from treadle.rollout.group import run_group
from treadle.rollout.metrics import METRICS, CutShort, alarms, group_metrics
from treadle.rollout.run import Grade, run_trajectory
from treadle.rollout.seeds import derive

__all__ = [
    "METRICS",
    "CutShort",
    "Grade",
    "alarms",
    "demonstrate",
    "derive",
    "group_metrics",
    "run_group",
    "run_trajectory",
]
