"""From trajectories to what one optimiser step sees. No torch.

Takes: Groups and advantages. Gives: Samples (one per branch), the weight of their tokens, and
MicroBatches.
"""

from treadle.batch.pack import MicroBatch, pack
from treadle.batch.rows import demonstrations, samples, spread
from treadle.batch.weights import AGGREGATIONS, token_weights

__all__ = [
    "AGGREGATIONS",
    "MicroBatch",
    "demonstrations",
    "pack",
    "samples",
    "spread",
    "token_weights",
]
