"""Measuring: held-out evaluations, intervals, the report of a run."""
