"""An engine that keeps time and memory like a real one and computes nothing.

What it models, one GPU and one model per engine:
- steps: a decode step takes `step_s + row_s * rows + context_s * resident context of the rows`;
  prompt tokens that are not cached are prefilled in chunks that share a step with the decoding;
- KV: a fixed number of tokens. A turn enters with room for its worst case (prompt +
  max_new_tokens), in order of arrival; room is made by taking KV from sessions that are between
  turns, least recently used first, last tokens first, so a session that comes back later pays a
  prefill of what it lost. Sessions of a group share the KV of their first prompt once one of
  them has finished a turn (those that start together each compute it);
- `release` frees at once; cancellation and deadlines free at the next step.

It says ids drawn uniformly from its vocabulary, a function of (seed, position), with the logprob
that this has: -ln(vocab). `score` agrees. So everything above an engine can be driven with it.

It never preempts (admission reserves), like engines on agentic load, which queue instead.
Faults on request: `slow` (poisoned), `freeze` (answers nothing), `kill`, `revive`.

Runs on the event loop that calls it; meant for `run_virtual`, where an hour takes seconds and a
run repeats exactly. On a real loop it takes the time that it says.

Takes: prompts, and a `CostModel`. Gives: a `Replica` and a `WeightSink`.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treadle.errors import ConfigError, SamplerError, WeightsError
from treadle.sampler.checks import check_params, check_score
from treadle.types import Completion, SamplerCapabilities, SamplerLoad, SamplingParams, StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """What things cost. Seconds and tokens."""

    step_s: float
    """A decode step whatever is in it: reading the weights."""
    row_s: float
    """More for each row: its arithmetic."""
    context_s: float
    """More for each token of context of each row: reading its KV."""
    prefill_s: float
    """Per prompt token that is computed."""
    prefill_context_s: float
    """More per computed prompt token and token before it: attention."""
    kv_tokens: int

    def decode_s(self, rows: int, context: int, steps: int = 1) -> float:
        """Of `steps` steps over the same rows, whose contexts (sum at the start) grow."""
        grown = context * steps + rows * steps * (steps - 1) // 2
        return steps * (self.step_s + self.row_s * rows) + self.context_s * grown

    def prefill_time_s(self, tokens: int, before: int) -> float:
        """Of `tokens` prompt tokens after `before` tokens of the same sequence."""
        pairs = tokens * before + tokens * tokens / 2
        return self.prefill_s * tokens + self.prefill_context_s * pairs


def roofline(
    *,
    parameters: float,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    memory_bytes: float,
    bandwidth: float,
    flops: float,
    bytes_per_value: int = 2,
    memory_share: float = 0.9,
    workspace_bytes: float = 4e9,
    bandwidth_share: float = 0.75,
    flops_share: float = 0.45,
) -> CostModel:
    """Costs of a dense model from its shape and an accelerator's data sheet.

    A decode step reads the weights once and every row's KV; rows and prompt tokens cost
    2 FLOP per parameter, attention 4 FLOP per head, dimension and pair of positions. The shares
    are what serving engines reach of the data sheet's numbers, within a third or so: good for
    comparing schedules on one model, not for quoting tokens per second. `fit_decode` replaces
    them by measurements.
    """
    rate = flops * flops_share
    kv_bytes = 2 * layers * kv_heads * head_dim * bytes_per_value
    free = memory_bytes * memory_share - parameters * bytes_per_value - workspace_bytes
    if free < kv_bytes:
        raise ConfigError(f"no memory is left for KV: {free:.3g} bytes")
    return CostModel(
        step_s=parameters * bytes_per_value / (bandwidth * bandwidth_share),
        row_s=2 * parameters / rate,
        context_s=kv_bytes / (bandwidth * bandwidth_share),
        prefill_s=2 * parameters / rate,
        prefill_context_s=4 * layers * heads * head_dim / rate,
        kv_tokens=int(free / kv_bytes),
    )


QWEN3_8B_H100 = roofline(
    parameters=8.19e9,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    memory_bytes=80e9,
    bandwidth=3.35e12,
    flops=989e12,
)
"""Qwen3-8B in bf16 on one H100 SXM (80 GB, 3.35 TB/s, 989 TFLOP/s dense bf16 by its data sheet):
6.5 ms a step, 27,000 prompt tokens/s, 350,000 tokens of KV at 147,456 bytes each."""


def fit_decode(samples: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """(step_s, row_s, context_s) by least squares from (rows, sum of contexts, seconds) of steps.

    Coefficients are not below 0: one that would be is left out and the others fitted again.
    """
    import numpy as np

    if len(samples) < 3:
        raise ConfigError(f"three coefficients need at least 3 measured steps, got {len(samples)}")
    table = np.array([(1.0, rows, context) for rows, context, _ in samples])
    seconds = np.array([s for _, _, s in samples])
    columns = [0, 1, 2]
    fitted = np.zeros(3)
    while columns:
        fitted[:] = 0.0
        fitted[columns] = np.linalg.lstsq(table[:, columns], seconds, rcond=None)[0]
        if (fitted >= 0).all():
            break
        columns.remove(int(fitted.argmin()))
    return float(fitted[0]), float(fitted[1]), float(fitted[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStats:
    """Counters from the start of the engine."""

    decoded_tokens: int
    prefill_tokens: int
    """Prompt tokens computed."""
    repeated_tokens: int
    """Of these, tokens whose KV the session had lost: re-prefill."""
    cached_tokens: int
    evictions: int
    """Times that a live session lost KV."""
    evicted_tokens: int
    turns: int
    """Turns that ended with all their tokens."""
    aborted: int
    busy_s: float


class _Group:
    """The KV of a first prompt that sessions share."""

    __slots__ = ("ids", "members", "name", "sharers")

    def __init__(self, name: str) -> None:
        self.name = name
        self.ids: tuple[int, ...] = ()
        """Empty while nobody has computed it."""
        self.members = 0
        """Open sessions."""
        self.sharers = 0
        """Sessions that hold it; its tokens are free when there are none."""


class _Session:
    __slots__ = ("group", "held", "ids", "name", "own", "shared", "turn")

    def __init__(self, name: str, group: _Group | None) -> None:
        self.name = name
        self.group = group
        self.ids: tuple[int, ...] = ()
        """What has been computed for it, all of it held once."""
        self.held = 0
        """Tokens of `ids` whose KV is still there, shared ones included."""
        self.shared = 0
        """Of these, tokens that belong to the group."""
        self.own = 0
        """KV tokens that it occupies beside them, reservation included."""
        self.turn: _Turn | None = None


class _Turn:
    __slots__ = ("cached", "context", "done", "entered", "future", "prompt", "seed", "session",
                 "stop", "target", "timer", "todo")  # fmt: skip

    def __init__(self, session: _Session, prompt: tuple[int, ...], seed: int) -> None:
        self.session = session
        self.prompt = prompt
        self.seed = seed
        self.target = 0
        """Tokens it will say."""
        self.stop = StopReason.LENGTH
        self.done = 0
        self.todo = 0
        """Prompt tokens to compute."""
        self.cached = 0
        self.context = len(prompt)
        self.entered = False
        self.future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None


class SimulatedEngine:
    """A `Replica`. Belongs to the event loop that first calls it."""

    def __init__(
        self,
        cost: CostModel = QWEN3_8B_H100,
        *,
        name: str = "simulated",
        max_rows: int = 256,
        max_context: int = 32_768,
        chunk_tokens: int = 8192,
        vocab: int = 32_000,
        version: int = 0,
        reply_tokens: Callable[[SamplingParams], int] | None = None,
    ) -> None:
        """
        Args:
            cost: what it models.
            max_rows: turns in the batch at once.
            max_context: tokens of one sequence.
            chunk_tokens: prompt tokens computed in one step at most.
            vocab: ids are in 0..vocab-1.
            version: PolicyVersion of every token it says.
            reply_tokens: tokens that the model would say, its stop id included; None = all that
                it may. The turn ends by EOS when that is within max_new_tokens.
        """
        if max_rows < 1 or chunk_tokens < 1 or vocab < 2:
            raise ConfigError(
                f"expected max_rows >= 1, chunk_tokens >= 1, vocab >= 2; got {max_rows}, "
                f"{chunk_tokens}, {vocab}"
            )
        self.name = name
        self.version = version
        self.cost = cost
        self._max_rows = max_rows
        self._max_context = max_context
        self._chunk_tokens = chunk_tokens
        self._vocab = vocab
        self._reply_tokens = reply_tokens
        self._slowness = 1.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: str | None = None
        self._frozen: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._groups: dict[str, _Group] = {}
        self._idle: dict[str, _Session] = {}
        """Sessions with KV that no running turn uses, least recently used first."""
        self._used = 0
        self._idle_own = 0
        """KV that eviction could give, shared prompts not counted."""
        self._queue: deque[_Turn] = deque()
        self._rows: list[_Turn] = []
        self._kv_short = False
        """The head of the queue waits for KV."""
        self._timer: asyncio.TimerHandle | None = None
        self._began_s = 0.0
        """Clock at the start of the step (or of the first of several equal ones)."""
        self._steps = 0
        """Decode steps that the timer stands for; 0 = a step with prefill."""
        self._chunks: list[tuple[_Turn, int]] = []
        self._decoding: list[_Turn] = []
        self._counts = dict.fromkeys(
            ("decoded", "prefill", "repeated", "cached", "queried", "evictions", "evicted",
             "turns", "aborted"), 0)  # fmt: skip
        self._busy_s = 0.0

    # ------------------------------------------------------------------ Replica

    @property
    def capabilities(self) -> SamplerCapabilities:
        return SamplerCapabilities(release=True, score=True, shared_prefix=True, entropies=True)

    async def open(self, session: str, *, group: str = "") -> None:
        await self._alive()
        if session in self._sessions:
            raise SamplerError(f"session `{session}` is already open on {self.name}")
        shared = self._groups.setdefault(group, _Group(group)) if group else None
        if shared is not None:
            shared.members += 1
        self._sessions[session] = _Session(session, shared)

    async def sample(
        self, session: str, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        """See `Sampler`. Raises ConfigError, SamplerError; the ids are not looked at."""
        await self._alive()
        check_params(params)
        owner = self._sessions.get(session)
        if owner is None:
            raise SamplerError(f"session `{session}` is not open on {self.name}")
        if owner.turn is not None:
            raise SamplerError(f"session `{session}` is in the middle of a turn on {self.name}")
        turn = _Turn(owner, tuple(prompt), params.seed)
        self._aim(turn, params)
        owner.turn = turn
        self._loop = asyncio.get_running_loop()
        turn.timer = self._loop.call_later(params.deadline_s, self._late, turn)
        self._queue.append(turn)
        self._disturb()
        try:
            return await turn.future
        finally:
            self._abort(turn)  # nothing to do unless the caller has left

    async def score(
        self, ids: Sequence[int], start: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        await self._alive()
        check_score(ids, start, temperature)
        return (self._logprob,) * (len(ids) - start)

    async def release(self, session: str) -> None:
        if self._dead is not None:
            return
        await self._alive()
        owner = self._sessions.pop(session, None)
        if owner is None:
            return
        if owner.turn is not None:
            self._abort(owner.turn)
        self._drop(owner)
        group = owner.group
        if group is not None:
            group.members -= 1
            if group.members == 0:
                del self._groups[group.name]
        self._disturb()

    async def load(self) -> SamplerLoad:
        await self._alive()
        waiting = len(self._queue)
        counts = self._counts
        return SamplerLoad(
            running=len(self._rows),
            waiting=waiting,
            waiting_for_kv=waiting if self._kv_short else 0,
            sessions=len(self._sessions),
            kv_usage=self._used / self.cost.kv_tokens,
            kv_tokens=self.cost.kv_tokens,
            preemptions=0,
            prefix_query_tokens=counts["queried"],
            prefix_hit_tokens=counts["cached"],
        )

    def publish(self, version: int) -> None:
        """See `WeightSink`; there are no weights, so nothing is proven. From any thread."""
        if self._dead is not None or self._frozen is not None:
            raise SamplerError(self._dead or f"{self.name} does not answer")
        if version < self.version:
            raise WeightsError(f"version {version} was to be published, {self.version} is served")
        self.version = version

    def stats(self) -> SimulatedStats:
        self._catch_up()
        counts = self._counts
        return SimulatedStats(
            decoded_tokens=counts["decoded"],
            prefill_tokens=counts["prefill"],
            repeated_tokens=counts["repeated"],
            cached_tokens=counts["cached"],
            evictions=counts["evictions"],
            evicted_tokens=counts["evicted"],
            turns=counts["turns"],
            aborted=counts["aborted"],
            busy_s=self._busy_s,
        )

    @property
    def kv_used(self) -> int:
        """Tokens held now."""
        return self._used

    # ------------------------------------------------------------------ faults

    def slow(self, factor: float) -> None:
        """Steps take this many times as long from the next one on; 1 = healthy."""
        self._catch_up()
        self._slowness = factor
        self._disturb()

    def freeze(self) -> None:
        """Answer nothing, not even `load`, until `revive`."""
        if self._frozen is None:
            self._catch_up()
            self._frozen = asyncio.get_running_loop().create_future()
            self._stop_clock()

    def kill(self, why: str = "was killed") -> None:
        """Fail everything in flight and every later call; all sessions and counters are lost."""
        turns = [*self._rows, *self._queue]
        self._stop_clock()
        self._reset()
        self._dead = f"{self.name} {why}"
        self._thaw()
        for turn in turns:
            self._settle(turn, SamplerError(self._dead))

    def revive(self) -> None:
        """Serve again: after `kill` empty, as a process that was started again; after `freeze`
        where it stood."""
        self._dead = None
        self._slowness = 1.0
        if self._frozen is not None:
            self._thaw()
            self._began_s = self._now()
            self._next_step()

    def _thaw(self) -> None:
        if self._frozen is not None:
            self._frozen.set_result(None)
            self._frozen = None

    async def _alive(self) -> None:
        if self._frozen is not None:
            await asyncio.shield(self._frozen)
        if self._dead is not None:
            raise SamplerError(self._dead, hint="revive() starts it again")

    # ------------------------------------------------------------------ turns

    @property
    def _logprob(self) -> float:
        return -math.log(self._vocab)

    def _aim(self, turn: _Turn, params: SamplingParams) -> None:
        """How much it will say. Raises SamplerError when that can never fit."""
        length, limit = len(turn.prompt), min(self._max_context, self.cost.kv_tokens)
        if not 1 <= length < limit:
            raise SamplerError(
                f"a prompt of {length} tokens does not fit: {self.name} takes 1 to {limit - 1}, "
                "so that one more has room"
            )
        turn.target = min(params.max_new_tokens, limit - length)
        if self._reply_tokens is not None:
            wanted = max(1, self._reply_tokens(params))
            if wanted <= turn.target:
                turn.target, turn.stop = wanted, StopReason.EOS

    def _completion(self, turn: _Turn, stop: StopReason) -> Completion:
        n, base = turn.done, (turn.seed * 2_654_435_761) % 2**32
        return Completion(
            ids=tuple((base + i * 40_503) % self._vocab for i in range(n)),
            logprobs=(self._logprob,) * n,
            versions=(self.version,) * n,
            entropies=(-self._logprob,) * n,
            stop_reason=stop,
            prompt_tokens=len(turn.prompt),
            cached_tokens=turn.cached,
        )

    def _settle(self, turn: _Turn, outcome: Completion | SamplerError) -> None:
        if turn.timer is not None:
            turn.timer.cancel()
            turn.timer = None
        if turn.session.turn is turn:
            turn.session.turn = None
        if turn.future.done():
            return
        if isinstance(outcome, Completion):
            turn.future.set_result(outcome)
        else:
            turn.future.set_exception(outcome)

    def _late(self, turn: _Turn) -> None:
        """The deadline of a turn has come."""
        if self._frozen is None:
            self._abort(turn)
        else:
            assert self._loop is not None
            turn.timer = self._loop.call_later(1.0, self._late, turn)

    def _abort(self, turn: _Turn) -> None:
        """Deadline, release, or a caller that left."""
        if turn.session.turn is not turn:
            return
        self._catch_up()
        self._counts["aborted"] += 1
        completion = self._completion(turn, StopReason.ABORTED)
        if turn.entered:
            self._rows.remove(turn)
            self._keep(turn, completion.ids)
        else:
            self._queue.remove(turn)
        self._settle(turn, completion)
        self._disturb()

    # ------------------------------------------------------------------ KV

    def _reuse(self, turn: _Turn) -> tuple[int, int]:
        """(prompt tokens whose KV is there, of these the group's)."""
        session, prompt = turn.session, turn.prompt
        if session.held:
            held = _common(session.ids, prompt, min(session.held, len(prompt) - 1))
            return held, min(held, session.shared)
        group = session.group
        if group is None or not group.sharers:
            return 0, 0
        held = _common(group.ids, prompt, min(len(group.ids), len(prompt) - 1))
        return held, held

    def _enter(self, turn: _Turn) -> bool:
        """Give the turn its KV; False = there is no room now."""
        session = turn.session
        held, shared = self._reuse(turn)
        need = len(turn.prompt) + turn.target - shared
        free = self.cost.kv_tokens - self._used
        own_idle = session.own if session.name in self._idle else 0
        if self._rows and need - session.own > free + self._idle_own - own_idle:
            return False
        known = min(len(session.ids), len(turn.prompt) - 1)
        repeated = _common(session.ids, turn.prompt, known) if held < known else held
        self._busy_now(session)
        self._evict(need - session.own - free)
        self._share(session, shared)
        self._used += need - session.own
        session.own = need
        turn.cached, turn.todo = held, len(turn.prompt) - held
        turn.entered = True
        self._counts["queried"] += len(turn.prompt)
        self._counts["cached"] += held
        self._counts["prefill"] += turn.todo
        self._counts["repeated"] += max(0, repeated - held)
        return True

    def _share(self, session: _Session, tokens: int) -> None:
        """Hold `tokens` of the group's prompt, or none of it."""
        group = session.group
        if group is not None and (tokens > 0) != (session.shared > 0):
            group.sharers += 1 if tokens else -1
            if not group.sharers:
                self._used -= len(group.ids)
                group.ids = ()
        session.shared = tokens

    def _keep(self, turn: _Turn, said: tuple[int, ...]) -> None:
        """A turn leaves the batch: what it computed stays with its session, idle."""
        session, group = turn.session, turn.session.group
        first = not session.ids
        session.ids = turn.prompt[: len(turn.prompt) - turn.todo] + said
        session.held = len(session.ids)
        if group is not None and not group.sharers and first and not turn.todo:
            # The first of its group to have computed a prompt gives it to the group.
            group.ids = turn.prompt
            session.shared, group.sharers = len(turn.prompt), 1
            self._used += len(turn.prompt)
        own = max(0, session.held - session.shared)
        self._used += own - session.own
        session.own = own
        if session.held:
            self._idle[session.name] = session
            self._idle_own += own

    def _busy_now(self, session: _Session) -> None:
        if self._idle.pop(session.name, None) is not None:
            self._idle_own -= session.own

    def _evict(self, tokens: int) -> None:
        while tokens > 0 and self._idle:
            victim = next(iter(self._idle.values()))
            taken = min(tokens, victim.own)
            if taken:
                self._counts["evictions"] += 1
                self._counts["evicted"] += taken
            victim.own -= taken
            victim.held -= taken
            self._used -= taken
            self._idle_own -= taken
            tokens -= taken
            if victim.own == 0:
                before = self._used
                del self._idle[victim.name]
                self._share(victim, 0)
                victim.held = 0
                tokens -= before - self._used

    def _drop(self, session: _Session) -> None:
        """All of its KV is free."""
        self._busy_now(session)
        self._used -= session.own
        session.own = session.held = 0
        self._share(session, 0)

    # ------------------------------------------------------------------ steps

    def _now(self) -> float:
        return 0.0 if self._loop is None else self._loop.time()

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _disturb(self) -> None:
        """The queue or the batch changed: look again when the step in progress ends."""
        if self._frozen is not None or self._dead is not None:
            return
        if self._timer is None:
            self._began_s = self._now()
            self._next_step()
        elif self._steps > 1:
            self._catch_up()
            self._plan_decode(1)

    def _catch_up(self) -> None:
        """Book the decode steps that are over by now; the one in progress stays in progress."""
        if self._timer is None or self._steps < 1:
            return
        over = self._steps_within(self._now() - self._began_s)
        if over > 0:
            self._book(over)
            self._steps -= over

    def _steps_within(self, seconds: float) -> int:
        """Whole decode steps of the current leap that fit; fewer than all of it."""
        rows = len(self._decoding)
        context = sum(turn.context for turn in self._decoding)
        low, high = 0, self._steps - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.cost.decode_s(rows, context, middle) * self._slowness <= seconds + 1e-12:
                low = middle
            else:
                high = middle - 1
        return low

    def _book(self, steps: int) -> None:
        """`steps` steps of the decoding rows are done."""
        context = sum(turn.context for turn in self._decoding)
        seconds = self.cost.decode_s(len(self._decoding), context, steps) * self._slowness
        for turn in self._decoding:
            turn.done += steps
            turn.context += steps
        self._counts["decoded"] += steps * len(self._decoding)
        self._busy_s += seconds
        self._began_s += seconds

    def _next_step(self) -> None:
        """At the boundary of a step: fill the batch and begin the next one."""
        self._kv_short = False
        while self._queue and len(self._rows) < self._max_rows:
            self._kv_short = not self._enter(self._queue[0])
            if self._kv_short:
                break
            self._rows.append(self._queue.popleft())
        self._timer = None
        if not self._rows:
            return
        self._decoding = [turn for turn in self._rows if not turn.todo]
        room, self._chunks = self._chunk_tokens, []
        for turn in self._rows:
            if turn.todo and room:
                self._chunks.append((turn, min(room, turn.todo)))
                room -= self._chunks[-1][1]
        if self._chunks:
            self._plan_prefill()
        else:
            self._plan_decode(min(turn.target - turn.done for turn in self._decoding))

    def _plan_decode(self, steps: int) -> None:
        context = sum(turn.context for turn in self._decoding)
        seconds = self.cost.decode_s(len(self._decoding), context, steps) * self._slowness
        self._steps = steps
        self._arm(self._began_s + seconds)

    def _plan_prefill(self) -> None:
        seconds = sum(
            self.cost.prefill_time_s(chunk, len(turn.prompt) - turn.todo)
            for turn, chunk in self._chunks
        )
        context = sum(turn.context for turn in self._decoding)
        seconds += self.cost.decode_s(len(self._decoding), context)
        self._steps = 0
        self._arm(self._began_s + seconds * self._slowness)

    def _arm(self, when_s: float) -> None:
        self._stop_clock()
        assert self._loop is not None
        self._timer = self._loop.call_at(max(when_s, self._loop.time()), self._step_ends)

    def _step_ends(self) -> None:
        if self._steps:
            alive = set(self._rows)
            self._decoding = [turn for turn in self._decoding if turn in alive]
            self._book(self._steps)
            self._began_s = self._now()
        else:
            self._end_prefill()
        self._steps = 0
        self._timer = None
        for turn in [turn for turn in self._rows if turn.done >= turn.target]:
            self._rows.remove(turn)
            completion = self._completion(turn, turn.stop)
            self._keep(turn, completion.ids)
            self._counts["turns"] += 1
            self._settle(turn, completion)
        self._next_step()

    def _end_prefill(self) -> None:
        now = self._now()
        self._busy_s += now - self._began_s
        self._began_s = now
        alive = set(self._rows)
        for turn in self._decoding:
            if turn in alive:
                turn.done += 1
                turn.context += 1
                self._counts["decoded"] += 1
        for turn, chunk in self._chunks:
            if turn in alive:
                turn.todo -= chunk
                if not turn.todo:  # its last position gives the first token
                    turn.done += 1
                    turn.context += 1
                    self._counts["decoded"] += 1


def _common(a: tuple[int, ...], b: tuple[int, ...], limit: int) -> int:
    """Length of the common prefix, at most `limit` (which fits both)."""
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit - 1
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
