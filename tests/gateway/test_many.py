"""Hundreds of sessions through gateway, router and simulated replicas, over HTTP."""

from __future__ import annotations

import asyncio

from benchmarks.gateway import bare, over_http


def test_hundreds_of_sessions_over_http_are_all_recorded_and_all_counts_end_at_zero() -> None:
    """The benchmark of 10,000, small; it checks the counts of every part itself."""
    seen = asyncio.run(asyncio.wait_for(over_http(300, 2, 32), 60))
    assert seen["turns"] == 600 and seen["nodes_per_session"] == 4
    for routed in (False, True):
        assert asyncio.run(bare(50, 2, routed=routed)) > 0
