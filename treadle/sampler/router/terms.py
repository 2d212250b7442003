"""What a router promises in numbers: its bounds, its statistics, and the errors it raises.

Takes: nothing. Gives: words that callers, tests and metrics share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from treadle.errors import SamplerError


class NoReplica(SamplerError):
    """No replica serves; worth another try later."""


class NoPlace(SamplerError):
    """Every replica is full or held back, for longer than the caller may wait; try later."""


class SessionUnknown(SamplerError):
    """The session was never opened, or was released."""


class SessionExpired(SessionUnknown):
    """The session was idle for longer than its time to live and has been released."""


class TurnLost(SamplerError):
    """A turn lost its replica more often than it may be asked again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterLimits:
    """Bounds and periods. Seconds."""

    poll_s: float = 5.0
    """Between two health checks of every replica."""
    health_s: float = 5.0
    """A health check without an answer after this has failed."""
    call_limit_s: float = 30.0
    """Longest `open`, `release`, `pause` or `resume` of a replica."""
    open_limit_s: float = 600.0
    """Longest wait of `open` for a place."""
    recovery_s: float = 30.0
    """Longest wait for a replica to come back while none serves."""
    grace_s: float = 5.0
    """A replica that has not ended a turn this long after its deadline has failed a check."""
    score_limit_s: float = 600.0
    """Longest `score` of a replica."""
    publish_limit_s: float = 660.0
    """Longest publication to a replica, waiting for its last one included."""
    catch_up_s: float = 300.0
    """Longest pause between two tries to bring a replica up to date; they start at `poll_s`."""
    ttl_s: float = 3600.0
    """A session without a turn for this long is released."""
    attempts: int = 4
    """Replicas that one turn is asked of before it counts as lost."""
    move_margin: int | None = 4
    """Surplus of sessions at which an idle one moves; None = only off a quarantined replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterStats:
    """What the router is doing; counters run from its start."""

    sessions: int
    """Open sessions, placed or not."""
    placed: int
    parked: int
    waiting: int
    """Calls that wait for a place."""
    turns: int
    """Turns in flight, and scores."""
    limit: int | None
    """Sessions that the controller lets have a place; None without a controller."""
    per_replica: Mapping[str, int]
    """Live sessions."""
    versions: Mapping[str, int]
    """PolicyVersion of every replica, as it last said."""
    skew: int
    """Newest minus oldest version among the replicas that serve."""
    healthy: int
    """Replicas that serve."""
    behind: int
    """Replicas that answer and do not serve until they hold what the others do."""
    quarantined: int
    orphans: int
    """Sessions that a replica may still hold although nobody wants them."""
    opened: int
    released: int
    expired: int
    completed: int
    """Turns returned."""
    moves: int
    """Sessions moved while idle, off pressure or surplus."""
    parks: int
    failovers: int
    """Sessions that lost their replica."""
    retried_turns: int
    """Turns asked again after their replica was lost."""
    quarantines: int
    losses: int
    """Replicas lost because they did not answer."""
    lapses: int
    """Times that a replica which answers was taken out of service: it failed to take weights (or to
    pause), or fell back to older ones."""
    readmissions: int
    """Times that a replica was taken back, after either."""
    refused: int
    """Calls ended by NoReplica or NoPlace."""
