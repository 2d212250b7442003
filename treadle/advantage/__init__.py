"""From rewards to advantages: how much better a rollout was than what it is compared with.

Guarantees:
- statistics are over *rollouts*: one with seven branches counts once, and one that is unscored,
  failed, aborted or without trained tokens does not count at all;
- where the rollouts of a group are compared (GROUP_RELATIVE), a group of one, or whose rewards are
  equal within a tolerance, gets exactly 0;
- advantages sum to 0 in every group where the estimator promises it, checked on every call;
- credit assignment (`credit_*`) takes advantages and gives advantages, per token where it must.

Takes: Groups with rewards. Gives: advantages by trajectory id.
"""

from __future__ import annotations

from treadle.advantage.estimate import ESTIMATORS, Estimator
from treadle.advantage.filters import group_stats, top_spread, zero_variance
from treadle.advantage.gae import gae
from treadle.advantage.judged import GROUP_RELATIVE
from treadle.advantage.parties import advantages, teaches
from treadle.advantage.reinforce import baseline_metrics, running_baselines
from treadle.advantage.teacher import distilled, teacher_metrics
from treadle.advantage.tokens import Advantage, per_node
from treadle.advantage.whiten import whiten

__all__ = [
    "ESTIMATORS",
    "GROUP_RELATIVE",
    "Advantage",
    "Estimator",
    "advantages",
    "baseline_metrics",
    "distilled",
    "gae",
    "group_stats",
    "per_node",
    "running_baselines",
    "teacher_metrics",
    "teaches",
    "top_spread",
    "whiten",
    "zero_variance",
]
