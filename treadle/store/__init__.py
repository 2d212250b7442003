"""The run's ledger: SQLite (WAL) with compressed token blobs, one typed reader and writer.

    with Store.create("runs/a", config, provenance={"model": p}) as store:
        store.start_group(0, task)
        store.publish_group(group)
        store.commit_step(1, version=1, ordinals=[0], samples=samples, metrics={"loss": 0.1})
        store.finish("finished")

    with Store.open("runs/a", readonly=True) as store:      # from any process, while it runs
        store.frontier().step, store.samples_of_step(1)

Torch-free. Takes: what every stage did. Gives: everything that a user sees of a run, and all
that resume needs (contracts 6 and 11).
"""

from treadle.store.lock import Holder
from treadle.store.records import (
    CheckpointRecord,
    EvalResult,
    EvalRow,
    Event,
    Frontier,
    Metric,
    PromptRow,
    RunInfo,
    Session,
    Span,
    StepRow,
    TrajectoryRow,
)
from treadle.store.retention import Removal, RunSize, RunSummary, gc, list_runs, sizes
from treadle.store.store import Store

__all__ = [
    "CheckpointRecord",
    "EvalResult",
    "EvalRow",
    "Event",
    "Frontier",
    "Holder",
    "Metric",
    "PromptRow",
    "Removal",
    "RunInfo",
    "RunSize",
    "RunSummary",
    "Session",
    "Span",
    "StepRow",
    "Store",
    "TrajectoryRow",
    "gc",
    "list_runs",
    "sizes",
]
