"""Measuring: held-out evaluations, intervals, the report of a run."""

EVALUATED = "evaluated"
"""The role in a store's provenance that marks an evaluation directory: the weights that answer."""
