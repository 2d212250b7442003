"""Many replicas behind one `Sampler`: see `core`.

    core      the calls: open, sample, score, release, publish, pause
    turns     one turn: a place, an answer, another replica when one is lost
    places    who has a place on which replica, and who waits for one
    health    looking at replicas; losing them, taking them back; caps and the controller
    unison    one state for all of them: the newest weights, standing still or not
    sweep     freeing what replicas hold for nobody
    terms     bounds, statistics, and the errors that a caller can tell apart

Takes: replicas. Gives: a `Replica` and a `WeightSink` (see types.py).
"""

from treadle.sampler.router.core import Router
from treadle.sampler.router.terms import (
    NoPlace,
    NoReplica,
    RouterLimits,
    RouterStats,
    SessionExpired,
    SessionUnknown,
    TurnLost,
)

__all__ = [
    "NoPlace",
    "NoReplica",
    "Router",
    "RouterLimits",
    "RouterStats",
    "SessionExpired",
    "SessionUnknown",
    "TurnLost",
]
