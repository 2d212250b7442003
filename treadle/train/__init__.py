"""From samples to moved weights: the step, its guard, and supervised fine-tuning.

Takes: a policy and Samples (or demonstrations). Gives: updates, metrics, parity.
"""

from treadle.train.parity import Parity, guard, parity
from treadle.train.sft import sft
from treadle.train.step import StepResult, Trainer

__all__ = ["Parity", "StepResult", "Trainer", "guard", "parity", "sft"]
