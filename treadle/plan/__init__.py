"""What a run will do, before it runs: lag, step period and utilization from a few numbers.

`staleness` computes it in closed form, `simulate` plays it on a virtual clock with the decisions
of `schedule`, which are those of the run itself; `durations` is what both need to know of rollouts.
"""
