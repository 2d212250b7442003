"""From trajectories to what one optimiser step sees. No torch.

Takes: Groups and advantages. Gives: Samples (one per branch) and MicroBatches.
"""

from treadle.batch.pack import MicroBatch, pack
from treadle.batch.rows import samples

__all__ = ["MicroBatch", "pack", "samples"]
