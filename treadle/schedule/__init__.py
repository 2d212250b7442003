"""Pure decisions of a run: when a group may start, which task comes next (`curriculum`), which
groups are trained, how old they are; and of a pool of replicas: where a session lives (`routing`),
how many may (`concurrency`).

No clock, no I/O, no tensors: `loop` drives these functions and a planner simulates them, so
that a prediction uses the very code that runs.
"""

from treadle.schedule.admission import Progress, may_start
from treadle.schedule.lag import group_lag, token_lags
from treadle.schedule.order import Ready, next_batch

__all__ = ["Progress", "Ready", "group_lag", "may_start", "next_batch", "token_lags"]
