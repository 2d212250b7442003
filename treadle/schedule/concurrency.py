"""How many sessions may be live at once: from KV pressure, queues and turnover.

Too few sessions leave the batch empty while agents wait for their tools; too many push each
other's KV out, and every turn then pays a prefill of its whole history: throughput falls off a
cliff. Engines that park what does not fit never preempt, so preemptions alone do not show it.

    start      what fits whatever it grows to: KV tokens / max_context. Also the floor
    grow       x`grow` per turnover of the pool, only while the cap binds and a recent look at
               every engine permits it: KV below `grow_below`, next to nothing queued
    trim       KV at `soft`: the cap becomes what would use `trim_to`; the surplus drains away.
               KV at `hard`: the surplus is parked, youngest first (no token is lost)
    cut        a preemption, or a queue for KV that lasts: the cap falls by a factor
    restore    a cut is evidence of a moment, so once it has drained and the engines are calm the
               cap returns step by step to where it was; a trim measured, so only growth undoes it

Guarantees:
- floor <= limit <= at_most, scaled by the share of the pool's KV that answers;
- one transient, one reduction: after one, no other until the pool has drained to the limit *and*
  the engines have settled, or `patience_s` has passed since it drained. A controller that
  reduces again at every look while the effect of the first one is still on its way goes from
  a thousand sessions to a handful;
- calm engines and a binding cap bring it back up to `at_most`.

Environment time enters twice. A session that waits for its tools holds KV that some engines do
not report, so usage is the larger of what the engine says and what its live sessions hold; and
growth is judged by turns that queue, not by sessions that exist.

Takes: the clock, one `SamplerLoad` per replica, live sessions. Gives: the next state; pure.
Source: the controller of prime-rl's orchestrator, its constants kept. Differs: trims park instead
of cancelling, cuts are restored, the limit follows replicas that leave and return.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from treadle.errors import ConfigError
from treadle.types import SamplerLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class ConcurrencySettings:
    """Of one pool. Shares are of the KV, unless they say otherwise."""

    at_most: int
    """Sessions; as many as somebody wants to run."""
    max_context: int
    """Tokens that one session may grow to."""
    grow: float = 1.25
    """Factor per turnover (as many sessions ended as are live)."""
    grow_below: float = 0.60
    binds_at: float = 0.90
    """Share of the limit that must be live for it to count as binding."""
    permission_s: float = 15.0
    """A look permits growth for this long."""
    queue_to_grow: float = 0.10
    """Most turns that may wait, per running one, while growing."""
    soft: float = 0.80
    hard: float = 0.90
    trim_to: float = 0.70
    apart_s: float = 30.0
    """Between reductions, and until a second cut counts as a relapse."""
    preemption_cut: float = 0.80
    queue_cut: float = 0.90
    relapse_cut: float = 0.50
    queue_frac: float = 0.50
    """A queue for KV longer than this share of the running turns ..."""
    queue_s: float = 30.0
    """... for this long is a reason to cut."""
    patience_s: float = 120.0
    """A reduction that has drained and not settled the engines in this time was too small."""

    def __post_init__(self) -> None:
        if self.at_most < 1 or self.max_context < 1:
            raise ConfigError(
                f"`at_most` and `max_context` must be >= 1, got {self.at_most}, {self.max_context}"
            )
        if not 0 < self.grow_below <= self.trim_to < self.soft <= self.hard <= 1:
            raise ConfigError(
                "expected 0 < grow_below <= trim_to < soft <= hard <= 1, got "
                f"{self.grow_below}, {self.trim_to}, {self.soft}, {self.hard}"
            )
        if self.grow <= 1:
            raise ConfigError(f"`grow` must be > 1, got {self.grow}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """One look at the replicas that answer and are not held back."""

    now_s: float
    loads: Mapping[str, SamplerLoad]
    live: int
    """Sessions that have a place."""
    resident_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tokens of the live sessions' histories per replica, where the router knows them."""

    @property
    def kv_tokens(self) -> int:
        return sum(load.kv_tokens for load in self.loads.values())

    @property
    def running(self) -> int:
        return sum(load.running for load in self.loads.values())

    @property
    def waiting(self) -> int:
        return sum(load.waiting for load in self.loads.values())

    @property
    def waiting_for_kv(self) -> int:
        return sum(load.waiting_for_kv for load in self.loads.values())

    @property
    def usage(self) -> float:
        """Of the fullest replica; may pass 1 when histories do not fit."""
        return max(
            (
                max(load.kv_usage, self.resident_tokens.get(name, 0) / max(1, load.kv_tokens))
                for name, load in self.loads.items()
            ),
            default=0.0,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Concurrency:
    """The controller's state. `limit` and `park` are its answer."""

    cap: float
    """Sessions for the whole pool, all replicas answering."""
    floor: int
    at_most: int
    full_kv_tokens: int
    """Largest pool seen."""
    share: float = 1.0
    """Of that, the part that answers now."""
    park: int = 0
    """Live sessions to park now, youngest first."""
    ceiling: float = 0.0
    """Most that growth may reach before the next look."""
    permitted_s: float = -math.inf
    reduced_s: float = -math.inf
    """Clock of the last trim or cut."""
    parked_s: float = -math.inf
    draining: bool = False
    """A reduction has not yet had its effect."""
    drained_s: float | None = None
    recovered_s: float = -math.inf
    restore_to: float = 0.0
    """Cap before the last cut; 0 = nothing to restore."""
    queued_s: float | None = None
    """Clock since which turns have queued for KV."""
    preemptions: Mapping[str, int] = field(default_factory=dict[str, int])
    num_trims: int = 0
    num_cuts: int = 0

    @property
    def limit(self) -> int:
        """Sessions that may be live now."""
        return max(1, math.floor(self.cap * self.share + 1e-6))


def begin(pool: Pool, settings: ConcurrencySettings) -> Concurrency:
    """The first state: the sessions that fit whatever they grow to."""
    floor = _floor(pool.kv_tokens, settings)
    return Concurrency(
        cap=float(floor),
        floor=floor,
        at_most=settings.at_most,
        full_kv_tokens=pool.kv_tokens,
        preemptions={name: load.preemptions for name, load in pool.loads.items()},
    )


def ended(
    state: Concurrency, settings: ConcurrencySettings, *, now_s: float, live: int
) -> Concurrency:
    """After a session has ended; `live` counts it still. Growth happens here."""
    fresh = now_s - state.permitted_s <= settings.permission_s
    if not fresh or state.draining or live < 1 or state.cap >= state.ceiling:
        return state
    return replace(state, cap=min(state.ceiling, state.cap * settings.grow ** (1 / live)))


def observe(state: Concurrency, pool: Pool, settings: ConcurrencySettings) -> Concurrency:
    """After a look at the pool: permission to grow, a reduction, or a step of a restoration."""
    state, preempted = _look(state, pool)
    if not pool.loads:
        return replace(state, permitted_s=-math.inf)
    usage, now = pool.usage, pool.now_s
    if pool.waiting_for_kv <= settings.queue_frac * pool.running:
        state = replace(state, queued_s=None)
    elif state.queued_s is None:
        state = replace(state, queued_s=now)
    queued = state.queued_s is not None and now - state.queued_s >= settings.queue_s
    calm = usage < settings.soft and state.queued_s is None and not preempted

    state, ready = _drain(state, pool, settings, calm=calm)
    if ready and now - state.reduced_s >= settings.apart_s:
        if usage >= settings.soft:
            wanted = pool.live / max(state.share, 1e-9) * settings.trim_to / usage
            state = _reduce(state, wanted, now, trim=True)
        elif preempted or queued:
            relapse = now - state.recovered_s < settings.apart_s
            factor = settings.preemption_cut if preempted else settings.queue_cut
            factor = settings.relapse_cut if relapse else factor
            wanted = min(state.cap, pool.live / max(state.share, 1e-9)) * factor
            state = _reduce(state, wanted, now, trim=False)
    surplus = pool.live - state.limit
    if usage >= settings.hard and surplus > 0 and now - state.parked_s >= settings.apart_s:
        state = replace(state, park=surplus, parked_s=now)
    if state.draining or not calm or usage >= settings.grow_below:
        return replace(state, permitted_s=-math.inf)
    if pool.live < settings.binds_at * state.limit:
        return state
    if state.restore_to > state.cap:
        state = replace(state, cap=min(state.restore_to, state.cap * settings.grow))
    elif state.restore_to:
        state = replace(state, restore_to=0.0)
    if pool.waiting > settings.queue_to_grow * max(1, pool.running):
        return replace(state, permitted_s=-math.inf)
    ceiling = min(float(state.at_most), state.cap * settings.grow)
    return replace(state, permitted_s=now, ceiling=ceiling)


def _look(state: Concurrency, pool: Pool) -> tuple[Concurrency, bool]:
    """What is remembered of every look, and whether any replica preempted since the last."""
    seen = dict(state.preemptions)
    preempted = False
    for name, load in pool.loads.items():
        preempted |= load.preemptions > seen.get(name, load.preemptions)
        seen[name] = load.preemptions
    kv, full = pool.kv_tokens, max(1, state.full_kv_tokens)
    if kv > full:  # more replicas than ever: everything scales with them
        state = replace(
            state,
            cap=min(float(state.at_most), state.cap * kv / full),
            floor=min(state.at_most, int(state.floor * kv / full)),
            full_kv_tokens=kv,
        )
        full = kv
    return replace(state, park=0, preemptions=seen, share=kv / full), preempted


def _drain(
    state: Concurrency, pool: Pool, settings: ConcurrencySettings, *, calm: bool
) -> tuple[Concurrency, bool]:
    """Whether the last reduction has had its effect, so that another may be decided."""
    if not state.draining:
        return state, True
    if state.drained_s is None:
        if pool.live > state.limit:
            return state, False
        state = replace(state, drained_s=pool.now_s)
    if calm:
        return replace(state, draining=False, drained_s=None, recovered_s=pool.now_s), True
    assert state.drained_s is not None
    return state, pool.now_s - state.drained_s >= settings.patience_s


def _reduce(state: Concurrency, wanted: float, now_s: float, *, trim: bool) -> Concurrency:
    cap = max(float(state.floor), min(state.cap, wanted))
    return replace(
        state,
        cap=cap,
        reduced_s=now_s,
        draining=True,
        drained_s=None,
        queued_s=None,
        permitted_s=-math.inf,
        restore_to=0.0 if trim else max(state.restore_to, state.cap),
        num_trims=state.num_trims + trim,
        num_cuts=state.num_cuts + (not trim),
    )


def _floor(kv_tokens: int, settings: ConcurrencySettings) -> int:
    return max(1, min(settings.at_most, kv_tokens // settings.max_context))
