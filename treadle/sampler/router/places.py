"""Who has a place on which replica, and who waits for one. Plain bookkeeping: no call, no wait.

Guarantees: a session counts on a replica from the moment it is bound there until the moment it is
unbound, whatever happens in between; a place that becomes free goes at once to the first that
waits, sessions that had one before ahead of new ones; what a replica may still hold for a session
that left is an orphan of that replica until it has been released.

Takes: sessions, and the state of the controller. Gives: homes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from treadle.errors import SamplerError
from treadle.schedule.concurrency import Concurrency
from treadle.schedule.routing import Life, Policy, Standing, better_home, place
from treadle.types import Replica, SamplerLoad


class Session:
    """What a router knows of one session."""

    __slots__ = ("alias", "asked", "busy", "closed", "group", "home", "leaving", "life", "moved",
                 "name", "opened", "parked", "used_s", "wait")  # fmt: skip

    def __init__(self, name: str, group: str, now_s: float) -> None:
        self.name = name
        self.alias = name
        """Its name on `home`."""
        self.group = group
        self.home: Handle | None = None
        self.asked = False
        """`home` was asked to open it."""
        self.opened = False
        """And did."""
        self.wait: Wait | None = None
        self.busy = False
        self.closed = False
        self.parked = False
        self.leaving = False
        """To be parked after its turn."""
        self.moved = 0
        """Times that it got another name on a replica."""
        self.life = Life(since_s=now_s)
        """Tokens of its history: what its KV takes when it is all there."""
        self.used_s = now_s


class Handle:
    """A replica and what is known of it. A `routing.ReplicaView`."""

    def __init__(self, name: str, replica: Replica, probation: int) -> None:
        self.name = name
        self.probation = probation
        """Sessions that it may hold while it is on probation."""
        self.replica = replica
        self.members: dict[str, Session] = {}
        self.groups: dict[str, int] = {}
        self.scopes: set[asyncio.Timeout] = set()
        """Of the turns in flight."""
        self.standing = Standing()
        self.load: SamplerLoad | None = None
        self.others = 0
        """Sessions that it had at the last checks and that are not ours."""
        self.strangers = 0
        """The same at the last check alone."""
        self.measured_cap: float | None = None
        self.orphans: dict[str, None] = {}
        """Sessions that it may hold for nobody."""
        self.sweeping = False
        self.epoch = 0
        """Grows when its sessions are lost."""
        self.behind = False
        """It is not, or not known to be, in the state that all replicas are to be in."""
        self.following: asyncio.Task[None] | None = None
        """The try to bring it there."""
        self.retry_s = 0.0
        """Seconds until the next try, once one has failed."""
        self.retry_at_s = 0.0
        """Clock before which there is none."""
        self.lock = asyncio.Lock()
        """Of its weights: one change at a time."""
        self.speed_s = 0.0
        """Seconds per token of its recent turns."""
        self.speed_turns = 0

    @property
    def sessions(self) -> int:
        return len(self.members) + self.others

    @property
    def healthy(self) -> bool:
        """It serves: it answers, and is in the state that all are to be in."""
        return self.standing.healthy and not self.behind

    @property
    def quarantined(self) -> bool:
        return self.standing.quarantined

    @property
    def kv_usage(self) -> float:
        return 0.0 if self.load is None else self.load.kv_usage

    @property
    def cap(self) -> int | None:
        measured = None if self.measured_cap is None else int(self.measured_cap)
        if not self.standing.probation:
            return measured
        return self.probation if measured is None else min(self.probation, measured)

    def in_group(self, group: str) -> int:
        return self.groups.get(group, 0)

    def bind(self, session: Session) -> None:
        self.members[session.name] = session
        if session.group:
            self.groups[session.group] = self.groups.get(session.group, 0) + 1
        session.home = self

    def unbind(self, session: Session) -> None:
        del self.members[session.name]
        if session.group:
            self.groups[session.group] -= 1
            if not self.groups[session.group]:
                del self.groups[session.group]
        if session.asked:
            self.orphans[session.alias] = None
        session.home = None
        session.asked = session.opened = False
        session.moved += 1


class Wait:
    """A call in the queue for a place."""

    __slots__ = ("future", "queued", "record")

    def __init__(self, record: Session) -> None:
        self.record = record
        self.queued = True
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: SamplerError | None = None) -> None:
        """Let the caller go on and look, or fail."""
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


class Places:
    """The places of one router's replicas, and the two queues for them."""

    def __init__(
        self, handles: list[Handle], policy: Policy, *, free: Callable[[Handle], None]
    ) -> None:
        """
        Args:
            free: told that a replica has orphans worth freeing now.
        """
        self.handles = handles
        self.policy = policy
        self.control: Concurrency | None = None
        """State of the concurrency controller; None = no bound."""
        self.placed = 0
        """Sessions that have a place."""
        self.first: deque[Wait] = deque()
        """Waits of sessions that had a place before."""
        self.new: deque[Wait] = deque()
        self.moves = 0
        self.parks = 0
        self.failovers = 0
        """Sessions that lost their replica."""
        self.gone_s: float | None = None
        """Clock since which no replica serves."""
        self._free = free

    @property
    def waiting(self) -> int:
        """Calls that wait for a place."""
        return len(self.first) + len(self.new)

    def bind(self, record: Session) -> bool:
        """Give a session its place now, if there is one."""
        if self.control is not None and self.placed >= self.control.limit:
            return False
        target = place(self.handles, self.policy, session=record.name, group=record.group)
        if target is None:
            return False
        target.bind(record)
        record.parked = False
        self.placed += 1
        return True

    def wake(self) -> None:
        """Places may be free: give them away, sessions that had one before first."""
        for queue in (self.first, self.new):
            while queue:
                wait = queue[0]
                if not wait.record.closed and not self.bind(wait.record):
                    return
                queue.popleft()
                wait.queued = False
                wait.end()

    def leave(self, record: Session) -> None:
        """Give up the place; what the replica holds for it becomes an orphan there."""
        if record.home is None:
            return
        record.home.unbind(record)
        self.placed -= 1
        self.wake()

    def lose(self, handle: Handle) -> None:
        """Its sessions have no home any more; turns in flight there are asked again elsewhere."""
        handle.epoch += 1
        handle.speed_turns = 0
        handle.others = 0
        now = asyncio.get_running_loop().time()
        if self.gone_s is None and not any(h.healthy for h in self.handles):
            self.gone_s = now
        for record in list(handle.members.values()):
            handle.unbind(record)
            self.placed -= 1
            self.failovers += 1
        for scope in handle.scopes:
            if not scope.expired():
                scope.reschedule(now)
        self.wake()

    def admit(self) -> None:
        """A replica serves that did not."""
        self.gone_s = None
        self.wake()

    def move_if_better(self, record: Session, margin: int | None) -> None:
        """Before a turn: leave a replica that others should have in its place."""
        home = record.home
        if home is None:
            return
        if not home.quarantined:
            if margin is None:
                return
            lowest = min(handle.sessions for handle in self.handles)
            if home.sessions - lowest < margin:
                return
        target = better_home(home, self.handles, session=record.name, margin=margin)
        if target is None:
            return
        self.moves += 1
        home.unbind(record)
        target.bind(record)
        self._free(home)

    def park(self, count: int, sessions: Iterable[Session]) -> None:
        """Take the place of the youngest sessions, idle ones first; their next turn waits for one.

        A session in a turn keeps its place until the turn has ended.
        """
        placed = [record for record in sessions if record.home is not None]
        for record in sorted(placed, key=lambda record: record.busy)[:count]:
            record.leaving = True
            self.park_if_due(record)

    def park_if_due(self, record: Session) -> None:
        """Between its turns, and unless the surplus has gone meanwhile."""
        home, state = record.home, self.control
        if not record.leaving or record.busy or state is None:
            return
        record.leaving = False
        if home is None or self.placed <= state.limit:
            return
        record.parked = True
        self.parks += 1
        self.leave(record)
        self._free(home)
