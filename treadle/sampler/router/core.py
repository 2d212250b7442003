"""Many replicas behind one `Sampler`: a session lives on one of them until it is released.

    open -> wait for a place -> bound to a replica -> (sample)* -> release: the count falls at once
                 ^                     |  lost replica, quarantine, surplus, parked
                 +---- place again <---+

Guarantees:
- a session is bound by a pure decision of `schedule.routing` (health before affinity) and counted
  from that moment, so that a burst of opens spreads; every way out (release, expiry, a caller that
  is cancelled, a lost replica) lowers the count, and all counts end at zero;
- a prompt carries the whole history of its session, so any replica can go on with it: a turn whose
  replica is lost is asked again elsewhere (`turns`). A token that was returned stays true, a turn
  is returned once;
- an idle session is moved off a replica that is over pressure or holds far more than others, at
  its next turn; counted in `moves`;
- a replica that fails its health checks loses its sessions and gets them back (new ones) once it
  answers again; no restart of anything is needed, also after all of them were lost;
- weights that are published reach every replica; one that failed to take them, or was away, serves
  nothing until it has them (`unison`);
- with `concurrency`, at most as many sessions have a place as the controller allows; surplus under
  hard pressure is parked: its KV is freed and its next turn waits for a place, before any new
  session does;
- every wait has a bound: a place `open_limit_s` or the turn's deadline, a call `call_limit_s`, a
  turn its deadline; a session nobody uses for `ttl_s` is released and counted in `expired`.

Belongs to one event loop; `publish` alone is called from another thread. Its clock is the loop's.
On a replica a session carries its own name, with "~n" behind it after the n-th move.

Takes: replicas. Gives: a `Replica` (so routers nest) and a `WeightSink`. Waits for: places. Woken
by: releases and health checks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from types import TracebackType

from treadle.errors import ConfigError, SamplerError, WeightsError
from treadle.sampler.checks import check_params
from treadle.sampler.router.health import Health
from treadle.sampler.router.places import Handle, Places, Session
from treadle.sampler.router.sweep import Sweeper
from treadle.sampler.router.terms import (
    NoReplica,
    RouterLimits,
    RouterStats,
    SessionExpired,
    SessionUnknown,
)
from treadle.sampler.router.turns import Turns
from treadle.sampler.router.unison import Motion, Unison
from treadle.schedule.concurrency import ConcurrencySettings
from treadle.schedule.routing import Caps, LeastSessions, Life, Policy, Rules
from treadle.types import (
    Completion,
    Replica,
    SamplerCapabilities,
    SamplerLoad,
    SamplingParams,
)

logger = logging.getLogger(__name__)

REMEMBERED = 10_000
"""Names of expired sessions that are kept, to say so to a caller that comes back."""


class Router:
    """A `Replica` and a `WeightSink` over replicas. Use it as an async context manager, or `start`
    and `close` it."""

    def __init__(
        self,
        replicas: Mapping[str, Replica],
        *,
        policy: Policy = LeastSessions(),
        caps: Caps | None = None,
        concurrency: ConcurrencySettings | None = None,
        rules: Rules = Rules(),
        quarantine: bool = True,
        limits: RouterLimits = RouterLimits(),
    ) -> None:
        """
        Args:
            replicas: by name; at least one.
            policy: which of the replicas with room gets a session.
            caps: how many sessions a replica may hold, from its KV; None = no cap.
            concurrency: how many sessions may have a place in all; None = no bound.
            rules: when a replica is held back, lost and taken back.
            quarantine: False = pressure and slowness hold nothing back (health still does).
            limits: bounds of every wait.
        """
        if not replicas:
            raise ConfigError("a router needs at least one replica")
        self._handles = [
            Handle(name, replica, rules.probation) for name, replica in replicas.items()
        ]
        if not quarantine:
            never = float("inf")
            rules = replace(rules, kv_enter=never, queue_frac=never, slow_factor=never)
        self._limits = limits
        self._sweeper = Sweeper(limits.call_limit_s)
        self._places = Places(self._handles, policy, free=self._sweeper.soon)
        self._unison = Unison(self._handles, self._places, limits)
        self._health = Health(
            self._handles,
            self._places,
            self._unison,
            self._sweeper,
            rules=rules,
            limits=limits,
            caps=caps,
            concurrency=concurrency,
        )
        self._turns = Turns(self._handles, self._places, self._health, self._unison, limits)
        self._sessions: dict[str, Session] = {}
        self._expired: OrderedDict[str, None] = OrderedDict()
        self._counts: Counter[str] = Counter(opened=0, released=0, expired=0, completed=0)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._poller: asyncio.Task[None] | None = None
        self._closed = False

    # ------------------------------------------------------------------ life

    async def start(self) -> Router:
        """Look at every replica once and begin to serve; replicas that do not answer are lost."""
        if self._poller is not None or self._closed:
            raise SamplerError("the router was started before", hint="make a new Router")
        self._loop = asyncio.get_running_loop()
        await self._poll(certain=True)
        self._poller = asyncio.ensure_future(self._poll_forever())
        return self

    async def close(self) -> None:
        """Release every session; calls that wait for a place raise SamplerError. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait({self._poller})
        for wait in [*self._places.first, *self._places.new]:
            wait.end(SamplerError("the router was closed"))
        for session in list(self._sessions.values()):
            self._end(session)
        await self._unison.close()
        await self._sweeper.settle()
        await asyncio.gather(*(self._sweeper.sweep(handle) for handle in self._handles))

    async def __aenter__(self) -> Router:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------ Replica

    @property
    def version(self) -> int:
        """The oldest that any replica in service serves."""
        return min(self._unison.served)

    @property
    def capabilities(self) -> SamplerCapabilities:
        """What every replica can do."""
        all_of = [handle.replica.capabilities for handle in self._handles]
        return SamplerCapabilities(
            release=all(c.release for c in all_of),
            score=all(c.score for c in all_of),
            shared_prefix=all(c.shared_prefix for c in all_of),
            entropies=all(c.entropies for c in all_of),
            pause=all(c.pause for c in all_of),
            experts=all(c.experts for c in all_of),
            offload=all(c.offload for c in all_of),
        )

    async def open(self, session: str, *, group: str = "") -> None:
        """Wait for a place and open the session there.

        Raises NoPlace or NoReplica when there is none in time, SamplerError when the name is
        taken or the replica refuses.
        """
        self._check_running()
        if session in self._sessions:
            raise SamplerError(
                f"session `{session}` is already open", hint="names are unique until release"
            )
        loop = asyncio.get_running_loop()
        record = self._sessions[session] = Session(session, group, loop.time())
        self._expired.pop(session, None)
        record.busy = True
        try:
            deadline = loop.time() + self._limits.open_limit_s
            for _ in range(self._limits.attempts):
                if await self._turns.settle(record, deadline) or record.closed:
                    break
            if record.closed:
                raise SessionUnknown(f"session `{session}` was released while it was opened")
            if not record.opened:
                raise NoReplica(
                    f"session `{session}` lost {self._limits.attempts} replicas while opening"
                )
        except BaseException:
            self._end(record)
            raise
        record.busy = False
        record.used_s = loop.time()
        record.life = Life(since_s=record.used_s)  # the wait for a place is no part of it
        self._counts["opened"] += 1

    async def sample(
        self, session: str, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        """See `Sampler`; a lost replica is not the caller's concern.

        Raises ConfigError, SessionUnknown, SessionExpired, NoReplica, TurnLost, or what the
        replica raised.
        """
        check_params(params)
        record = self._known(session)
        if record.busy:
            raise SamplerError(f"session `{session}` is in the middle of a turn")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + params.deadline_s
        record.busy = True
        record.life = record.life.grown(len(prompt), now_s=loop.time())
        try:
            completion = await self._turns.turn(record, prompt, params, deadline)
        finally:
            record.busy = False
            record.used_s = loop.time()
            self._places.park_if_due(record)
        record.life = record.life.grown(len(prompt) + len(completion.ids), now_s=loop.time())
        self._counts["completed"] += 1
        return completion

    async def score(
        self, ids: Sequence[int], start: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """By the replica with the fewest turns; another one when that is lost."""
        self._check_running()
        for _ in range(self._limits.attempts):
            healthy = [handle for handle in self._handles if handle.healthy]
            if not healthy:
                break
            handle = min(healthy, key=lambda h: len(h.scopes))
            epoch = handle.epoch
            try:
                async with asyncio.timeout(self._limits.score_limit_s) as scope:
                    handle.scopes.add(scope)
                    try:
                        return await handle.replica.score(ids, start, temperature=temperature)
                    finally:
                        handle.scopes.discard(scope)
            except (SamplerError, TimeoutError):
                if handle.epoch != epoch:
                    continue
                await self._health.look(handle, certain=True)
                if handle.healthy and handle.epoch == epoch:
                    raise
        raise self._turns.no_replica()

    async def release(self, session: str) -> None:
        """End a session; its place is free when this is called, its KV when it returns.

        Idempotent. A turn in flight ends ABORTED. A replica that cannot free it now is asked
        again at every health check.
        """
        record = self._sessions.get(session)
        if record is None:
            return
        self._counts["released"] += 1
        if record.life.tokens:
            now = asyncio.get_running_loop().time()
            whole = record.life.grown(record.life.tokens, now_s=now)
            self._health.resident = self._health.resident.observe(whole)
        home, alias = record.home, record.alias
        self._end(record)
        if home is not None:
            await self._sweeper.free(home, alias)

    async def load(self) -> SamplerLoad:
        """Of all replicas that answered the last health check, as one."""
        loads = [h.load for h in self._handles if h.healthy and h.load is not None]
        if not loads:
            raise self._turns.no_replica()
        kv_tokens = sum(load.kv_tokens for load in loads)
        return SamplerLoad(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads) + self._places.waiting,
            waiting_for_kv=sum(load.waiting_for_kv for load in loads),
            sessions=len(self._sessions),
            kv_usage=sum(load.kv_usage * load.kv_tokens for load in loads) / max(1, kv_tokens),
            kv_tokens=kv_tokens,
            preemptions=self._health.seen["preemptions"],
            prefix_query_tokens=self._health.seen["prefix_query_tokens"],
            prefix_hit_tokens=self._health.seen["prefix_hit_tokens"],
        )

    def stats(self) -> RouterStats:
        return RouterStats(
            sessions=len(self._sessions),
            placed=self._places.placed,
            parked=sum(session.parked for session in self._sessions.values()),
            waiting=self._places.waiting,
            turns=sum(len(handle.scopes) for handle in self._handles),
            limit=None if self._places.control is None else self._places.control.limit,
            per_replica={handle.name: len(handle.members) for handle in self._handles},
            versions={handle.name: handle.replica.version for handle in self._handles},
            skew=max(self._unison.served) - min(self._unison.served),
            healthy=sum(handle.healthy for handle in self._handles),
            behind=sum(h.standing.healthy and h.behind for h in self._handles),
            quarantined=sum(handle.quarantined for handle in self._handles),
            orphans=sum(len(handle.orphans) for handle in self._handles),
            moves=self._places.moves,
            parks=self._places.parks,
            failovers=self._places.failovers,
            quarantines=self._health.counts["quarantines"],
            losses=self._health.counts["losses"],
            lapses=self._unison.lapses,
            readmissions=self._health.counts["readmissions"] + self._unison.readmissions,
            **self._turns.counts,
            **self._counts,
        )

    def where(self, session: str) -> str | None:
        """Name of the replica that a session lives on; None while it has none."""
        home = self._known(session).home
        return None if home is None else home.name

    # ------------------------------------------------------------------ pausing

    async def pause(self) -> None:
        """All replicas stand still, sessions stay open. Idempotent.

        A replica that cannot follow now is out of service until it has. Raises SamplerError: not
        supported, see `capabilities`; or none followed.
        """
        await self._move(Motion.PAUSE)

    async def resume(self) -> None:
        """All go on; as `pause`."""
        await self._move(Motion.RUN)

    async def offload(self) -> None:
        """All stand still and give the memory of their KV back; as `pause`."""
        await self._move(Motion.OFFLOAD)

    async def _move(self, motion: Motion) -> None:
        self._check_running()
        await self._unison.move(motion)

    # ------------------------------------------------------------------ WeightSink

    def publish(self, version: int) -> None:
        """Serve the current weights as `version` on every replica. Blocks until each has taken
        them or failed; call it from a thread, never on the router's own loop.

        A replica that failed, or does not answer, serves nothing until it has them.

        Raises:
            WeightsError: the version is older than the last one, a replica cannot take weights at
                all (nothing was done then), or none took these: the old version serves on.
            SamplerError: the router is not running, or this is its loop.
        """
        self._check_running()
        loop = self._loop
        assert loop is not None, "a running router has a loop"
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is loop:
            raise SamplerError(
                "publish() blocks, and the router needs the event loop that it was called on",
                hint="await asyncio.to_thread(router.publish, version)",
            )
        future = asyncio.run_coroutine_threadsafe(self._unison.publish(version), loop)
        limit_s = 2 * self._limits.publish_limit_s  # one before it may be in progress
        try:
            future.result(limit_s)
        except TimeoutError:
            future.cancel()
            raise WeightsError(
                f"version {version} was not published within {limit_s:g} s",
                hint="a replica is stuck, or the router's event loop is",
            ) from None
        except CancelledError:
            raise WeightsError(
                f"the router was closed while version {version} was published"
            ) from None

    def fingerprint(self) -> str:
        """Of the weights that every replica in service says it serves; empty = one cannot say."""
        return self._unison.fingerprint()

    # ------------------------------------------------------------------ the end

    def _end(self, record: Session) -> None:
        """The session is over, whatever it was doing."""
        record.closed = True
        if self._sessions.get(record.name) is record:
            del self._sessions[record.name]
        self._health.session_ended(record)
        if record.home is not None:
            self._places.leave(record)
        if record.wait is not None:
            record.wait.end()

    # ------------------------------------------------------------------ time

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._limits.poll_s)
            try:
                await self._poll()
            except Exception:  # a fault of ours in one look must not end all looking
                logger.exception("a health check failed by itself")

    async def _poll(self, *, certain: bool = False) -> None:
        self._expire()
        await self._health.look_at_all(self._sessions, certain=certain)

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        limit = now - self._limits.ttl_s
        late = [r for r in self._sessions.values() if r.used_s <= limit and not r.busy]
        for record in late:
            self._counts["expired"] += 1
            self._end(record)
            self._expired[record.name] = None
        while len(self._expired) > REMEMBERED:
            self._expired.popitem(last=False)
        if late:
            logger.warning(
                "%d sessions expired, the first of them %s: no turn for %g s",
                len(late),
                late[0].name,
                now - late[0].used_s,
            )

    # ------------------------------------------------------------------ refusals

    def _check_running(self) -> None:
        if self._closed or self._poller is None:
            state = "was closed" if self._closed else "is not running"
            raise SamplerError(f"the router {state}", hint="call start(), or use `async with`")

    def _known(self, session: str) -> Session:
        record = self._sessions.get(session)
        if record is not None:
            return record
        if session in self._expired:
            raise SessionExpired(
                f"session `{session}` had no turn for {self._limits.ttl_s:g} s and was released",
                hint="open it again: its history is in its next prompt",
            )
        self._check_running()
        raise SessionUnknown(f"session `{session}` is not open", hint="open() it, once")
