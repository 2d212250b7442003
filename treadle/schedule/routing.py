"""Which replica a session lives on, when it leaves, and when a replica gets no new ones.

The unit is the session, not the request: its KV stays where its turns run. Order of the
questions, which no policy can change:

    healthy?  ->  not quarantined?  ->  below its cap?  ->  the policy's choice

so a session is never sent to a dead replica because its affinity says so. Policies:

- `LeastSessions`: fewest live sessions for its size. Because sessions are *released*, the counts
  are of live ones, and max/mean stays at 1 (hashing n sessions over R replicas gives about
  1 + sqrt(2 ln R / (n/R)));
- `PowerOfTwo`: the better of two drawn ones; for several routers that cannot see each other;
- `PrefixAffinity`: where the group's prompt is cached already, while that costs little balance;
- `ConsistentHash`: a ring with virtual nodes, blind to load. For comparison: past the cliff of
  the KV capacity it is a death spiral (benchmarks/routing.py).

Ties are broken by a hash of (session, replica), never by the order of a list. No clock, no I/O,
no state: the same call gives the same answer, in a router and in a simulation.

Takes: views of replicas. Gives: one of them, or None = wait.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol, TypeVar

from treadle.types import SamplerLoad


class ReplicaView(Protocol):
    """What a decision may look at."""

    @property
    def name(self) -> str: ...

    @property
    def sessions(self) -> int:
        """Live sessions, those of other routers included where they are known."""
        ...

    @property
    def cap(self) -> int | None:
        """Most sessions it may hold; None = not known."""
        ...

    @property
    def healthy(self) -> bool: ...

    @property
    def quarantined(self) -> bool:
        """It keeps what it has and gets nothing new."""
        ...

    @property
    def kv_usage(self) -> float: ...

    def in_group(self, group: str) -> int:
        """Live sessions of this group."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A `ReplicaView` that is plain data."""

    name: str
    sessions: int = 0
    cap: int | None = None
    healthy: bool = True
    quarantined: bool = False
    kv_usage: float = 0.0
    groups: tuple[str, ...] = ()
    """Group of every live session that has one."""

    def in_group(self, group: str) -> int:
        return self.groups.count(group)


V = TypeVar("V", bound=ReplicaView)


class Policy(Protocol):
    """A choice among replicas that could all take the session."""

    def choose(self, candidates: Sequence[V], *, session: str, group: str) -> V: ...


# --------------------------------------------------------------------------- policies


@dataclass(frozen=True, slots=True)
class LeastSessions:
    """Fewest live sessions; per unit of cap where caps are known, so that a big one gets more."""

    def choose(self, candidates: Sequence[V], *, session: str, group: str) -> V:
        return _least(candidates, session)


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """The one with fewer sessions of two that a hash of the session draws."""

    def choose(self, candidates: Sequence[V], *, session: str, group: str) -> V:
        drawn = sorted(candidates, key=lambda view: _hash(session, view.name))[:2]
        return min(drawn, key=_fullness)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixAffinity:
    """With its group, unless that replica has `slack` of the mean (at least one session) more
    than the emptiest."""

    slack: float = 0.25

    def choose(self, candidates: Sequence[V], *, session: str, group: str) -> V:
        least = _least(candidates, session)
        if not group:
            return least
        home = max(candidates, key=lambda view: (view.in_group(group), -view.sessions))
        mean = sum(view.sessions for view in candidates) / len(candidates)
        near = home.sessions <= least.sessions + max(1.0, self.slack * mean)
        return home if home.in_group(group) and near else least


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsistentHash:
    """A ring of `virtual_nodes` points per replica; a session goes to the next point."""

    virtual_nodes: int = 160

    def choose(self, candidates: Sequence[V], *, session: str, group: str) -> V:
        points, owners = _ring(tuple(view.name for view in candidates), self.virtual_nodes)
        index = bisect.bisect_left(points, _hash(session)) % len(points)
        return candidates[owners[index]]


@lru_cache(maxsize=64)
def _ring(names: tuple[str, ...], virtual_nodes: int) -> tuple[list[int], list[int]]:
    """Sorted points, and the index of the name that each belongs to."""
    ring = sorted(
        (_hash(name, str(node)), index)
        for index, name in enumerate(names)
        for node in range(virtual_nodes)
    )
    return [point for point, _ in ring], [index for _, index in ring]


def _hash(*parts: str) -> int:
    return int.from_bytes(blake2b("\x00".join(parts).encode(), digest_size=8).digest(), "big")


def _fullness(view: ReplicaView) -> float:
    return view.sessions / view.cap if view.cap else float(view.sessions)


def _least(candidates: Sequence[V], session: str) -> V:
    """Fewest sessions, then least KV in tenths (it is an old and noisy number), then a hash."""
    lowest = min(_fullness(view) for view in candidates)
    level = [view for view in candidates if _fullness(view) == lowest]
    if len(level) > 1:
        free = min(int(10 * view.kv_usage) for view in level)
        level = [view for view in level if int(10 * view.kv_usage) == free]
    return level[0] if len(level) == 1 else min(level, key=lambda view: _hash(session, view.name))


# --------------------------------------------------------------------------- placement


def has_room(view: ReplicaView) -> bool:
    """Whether it may get one more session now."""
    full = view.cap is not None and view.sessions >= view.cap
    return view.healthy and not view.quarantined and not full


def place(replicas: Iterable[V], policy: Policy, *, session: str, group: str = "") -> V | None:
    """The replica for a session that has none, or None while all are dead, held back or full."""
    candidates = [view for view in replicas if has_room(view)]
    return policy.choose(candidates, session=session, group=group) if candidates else None


def better_home(
    current: V, replicas: Iterable[V], *, session: str, margin: int | None = 4, spread: float = 0.25
) -> V | None:
    """Where an idle session should move to before its next turn, or None = it stays.

    A move costs a prefill of the whole history, so it happens only off a replica that is
    quarantined, or whose surplus over the emptiest is at least `margin` and `spread` of the mean.
    Each move shrinks the surplus by two, so that a pool at rest stays at rest.

    Args:
        current: where it lives; healthy.
        replicas: the pool, `current` included.
        margin: sessions; None = never for balance alone.
    """
    pool = list(replicas)
    others = [view for view in pool if view is not current and has_room(view)]
    if not others:
        return None
    target = _least(others, session)
    if current.quarantined:
        return target
    if margin is None:
        return None
    mean = sum(view.sessions for view in pool if view.healthy) / sum(v.healthy for v in pool)
    surplus = current.sessions - target.sessions
    return target if surplus >= max(margin, 2, math.ceil(spread * mean)) else None


# --------------------------------------------------------------------------- caps


def safe_cap(kv_tokens: int, max_context: int) -> int:
    """Sessions that fit whatever they grow to: nothing is ever evicted. At least 1."""
    return max(1, kv_tokens // max_context)


def overcommit_cap(kv_tokens: int, *, mean_tokens: float, std_tokens: float, z: float) -> int:
    """Largest n with n*mean + z*std*sqrt(n) <= kv_tokens.

    Args:
        mean_tokens, std_tokens: of the tokens *resident* for a live session at a random moment,
            not of finished lengths: a session that grows evenly to L holds L/2 on average.
        z: standard deviations of headroom over the expected sum.
    """
    if mean_tokens <= 0:
        return 0
    spread = z * std_tokens
    root = (-spread + math.sqrt(spread**2 + 4 * mean_tokens * kv_tokens)) / (2 * mean_tokens)
    n = int(root**2)
    while (n + 1) * mean_tokens + spread * math.sqrt(n + 1) <= kv_tokens:
        n += 1
    while n > 0 and n * mean_tokens + spread * math.sqrt(n) > kv_tokens:
        n -= 1
    return n


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """How many sessions a replica may hold."""

    max_context: int
    """Tokens that one session may grow to."""
    z: float | None = None
    """None = `safe_cap`. Else `overcommit_cap` with this much headroom, and `safe_cap` at least."""
    min_ended: float = 64.0
    """Sessions that must have ended before a measured cap is believed."""

    def cap(self, kv_tokens: int, resident: Resident, *, before: float, step_s: float) -> float:
        """The cap from now on; whole sessions of it count.

        It rises over one mean life and not at once: sessions that start together grow together,
        and the formula is about sessions of all ages.

        Args:
            before: the last answer; 0 at the start.
            step_s: seconds since then.
        """
        safe = float(safe_cap(kv_tokens, self.max_context))
        if self.z is None or resident.ended < self.min_ended:
            return safe
        measured = overcommit_cap(
            kv_tokens, mean_tokens=resident.mean, std_tokens=resident.std, z=self.z
        )
        if measured <= before:
            return max(safe, measured)
        rise = measured * step_s / max(1e-9, resident.mean_life_s)
        return max(safe, min(measured, before + rise))


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """Tokens of one session over its time so far."""

    since_s: float
    """Clock at which it got the tokens that it has now."""
    tokens: int = 0
    seconds: float = 0.0
    area: float = 0.0
    """Token-seconds."""
    squares: float = 0.0
    """Token^2-seconds."""

    def grown(self, tokens: int, *, now_s: float) -> Life:
        """It has `tokens` from now on."""
        step = now_s - self.since_s
        return Life(
            since_s=now_s,
            tokens=tokens,
            seconds=self.seconds + step,
            area=self.area + self.tokens * step,
            squares=self.squares + self.tokens**2 * step,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """Tokens that a session holds at a random moment of its life, from lives that have ended.

    Whole lives only: live sessions are younger than they will be, all of them at a cold start,
    and a cap from what they hold now would let in several times too many.
    """

    ended: float = 0.0
    """Lives, older ones fading."""
    seconds: float = 0.0
    area: float = 0.0
    squares: float = 0.0

    @property
    def mean_life_s(self) -> float:
        return self.seconds / self.ended if self.ended else 0.0

    @property
    def mean(self) -> float:
        return self.area / self.seconds if self.seconds else 0.0

    @property
    def std(self) -> float:
        if not self.seconds:
            return 0.0
        return math.sqrt(max(0.0, self.squares / self.seconds - self.mean**2))

    def observe(self, life: Life, *, keep: float = 0.998) -> Resident:
        """A life has ended; `keep` is the weight of those before."""
        return Resident(
            ended=keep * self.ended + 1,
            seconds=keep * self.seconds + life.seconds,
            area=keep * self.area + life.area,
            squares=keep * self.squares + life.squares,
        )


# --------------------------------------------------------------------------- standing


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """When a replica is held back, lost and taken back."""

    kv_enter: float = 0.95
    """Quarantined at this KV usage ..."""
    kv_leave: float = 0.80
    """... until it is below this one."""
    queue_frac: float = 0.5
    """Quarantined when more turns than this share of the running ones wait for KV, twice."""
    slow_factor: float = 4.0
    """Quarantined when its turns take this many times the pool's seconds per token."""
    hold_s: float = 30.0
    """A quarantine lasts at least this long; doubled for each one that follows within as much."""
    max_hold_s: float = 480.0
    probation: int = 2
    """Sessions that a replica which was too slow may hold until its turns are fast again."""
    failures: int = 2
    """Failed health checks in a row after which a replica is lost."""
    successes: int = 2
    """Good ones in a row after which a lost replica is taken back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What the checks so far say about a replica."""

    healthy: bool = True
    quarantined: bool = False
    probation: bool = False
    """Back from a quarantine for slowness, not yet seen fast."""
    failures: int = 0
    successes: int = 0
    queued: int = 0
    """Checks in a row that found a queue for KV."""
    until_s: float = -math.inf
    """Clock before which the quarantine does not end."""
    left_s: float = -math.inf
    """Clock at which the last quarantine ended."""
    hold_s: float = 0.0
    """Length of the last quarantine's hold."""


def check_failed(standing: Standing, rules: Rules, *, certain: bool = False) -> Standing:
    """After a health check without an answer; `certain` when a turn died too."""
    failures = standing.failures + 1
    lost = certain or failures >= rules.failures or not standing.healthy
    if not lost:
        return replace(standing, failures=failures, successes=0)
    return Standing(healthy=False, failures=failures)


def check_passed(
    standing: Standing,
    rules: Rules,
    load: SamplerLoad,
    *,
    now_s: float,
    slowness: float | None = None,
) -> Standing:
    """After a health check that was answered.

    Args:
        slowness: seconds per token of its recent turns over the pool's; None = not known.
    """
    successes = standing.successes + 1
    standing = replace(standing, failures=0, successes=successes)
    if not standing.healthy:
        return replace(standing, healthy=successes >= rules.successes)
    queue = load.waiting_for_kv > rules.queue_frac * load.running
    standing = replace(standing, queued=standing.queued + 1 if queue else 0)
    slow = slowness is not None and slowness >= rules.slow_factor
    if not standing.quarantined:
        if slow or load.kv_usage >= rules.kv_enter or standing.queued >= 2:
            return _quarantine(standing, rules, now_s, slow)
        passed = standing.probation and slowness is not None
        return replace(standing, probation=False) if passed else standing
    calm = load.kv_usage < rules.kv_leave and not queue
    if calm and now_s >= standing.until_s:
        return replace(standing, quarantined=False, left_s=now_s)
    return standing


def _quarantine(standing: Standing, rules: Rules, now_s: float, slow: bool) -> Standing:
    soon = now_s - standing.left_s < max(standing.hold_s, rules.hold_s)
    hold = min(rules.max_hold_s, 2 * standing.hold_s) if soon else rules.hold_s
    return replace(
        standing,
        quarantined=True,
        probation=standing.probation or slow,
        until_s=now_s + hold,
        hold_s=hold,
    )
