"""One loss per file, each a pure function of tensors: no config, no process group, no global.

Takes: log-probabilities, behaviour log-probabilities and advantages of packed tokens. Gives:
LossOutput, whose loss already has the step's global denominator.
"""

from treadle.losses.cispo import cispo_loss
from treadle.losses.common import LossOutput
from treadle.losses.cross_entropy import cross_entropy_loss
from treadle.losses.ppo_clip import ppo_clip_loss

__all__ = ["POLICY_LOSSES", "LossOutput", "cispo_loss", "cross_entropy_loss", "ppo_clip_loss"]

POLICY_LOSSES = {"cispo": cispo_loss, "ppo_clip": ppo_clip_loss}
"""`learn.loss` to its function."""
