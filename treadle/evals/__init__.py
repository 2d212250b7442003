"""Measuring: held-out evaluations, intervals, the report of a run."""

EVALUATED = "evaluated"
"""The role in a store's provenance that marks an evaluation directory: the weights that answer."""

STARTED_BY = "started_by"
"""The fact of a session that says how it was started: "treadle train RECIPE" as it was typed,
"td.train" or "td.open_run"."""
