"""One step of the engine: sweep, admit, compute, draw. Single-threaded, no locks.

Guarantees: every drawn token gets its logprob, entropy and the version of the weights that drew
it in the same statement; a turn whose logits are not finite fails alone, with its KV wiped; a
turn is resolved exactly once, and one that was preempted has lost nothing.

A step is one pass of the model: the next token of the rows that are being decoded, and pieces
of prompts.

Takes: turns. Gives: their futures, resolved.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.errors import SamplerError, WeightsError, boundary
from treadle.models import forward
from treadle.models.linear import Adapter
from treadle.models.policy import Policy
from treadle.sampler.engine.blocks import BLOCK
from treadle.sampler.engine.cache import KvCache
from treadle.sampler.engine.decode import Chunk, Decoder, tables_of
from treadle.sampler.engine.kv import KvStore
from treadle.sampler.engine.sampling import Draws, draw, uniforms
from treadle.sampler.engine.scheduler import Scheduler, Turn
from treadle.sampler.engine.stopping import StopRule
from treadle.types import ExpertChoices, Scores, StopReason


class OnPublish(StrEnum):
    """What becomes of the KV of running turns when other weights are served."""

    KEEP = "keep"
    """It is used on: no pause, and later tokens attend to keys of the older weights."""
    RECOMPUTE = "recompute"
    """It is computed again: what is drawn from then on is what the new weights say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """What the engine is doing; counters run from its start."""

    running: int
    """Turns in the batch."""
    waiting: int
    """Turns in the queue."""
    waiting_for_kv: int
    """Of these, turns that wait for KV room and not for a place in the batch."""
    sessions: int
    """Open sessions."""
    kv_usage: float
    """Fraction of the KV blocks that are held, idle open sessions included."""
    kv_tokens: int
    """The KV budget in tokens."""
    decoded_tokens: int
    """Tokens drawn."""
    prefill_tokens: int
    """Prompt tokens computed."""
    cached_tokens: int
    """Prompt tokens whose KV was reused."""
    dropped_tokens: int
    """Positions of open, idle sessions' KV given up because nothing could run otherwise."""
    evicted_tokens: int
    """Positions of released KV that were overwritten; nobody waited for them."""
    preemptions: int
    """Turns whose KV was taken away while they ran; they lose no token."""
    query_tokens: int
    """Prompt tokens that were looked up in the prefix cache."""
    expired: int
    """Sessions that were left alone for longer than the engine keeps them."""
    aborted: int
    """Turns that ended ABORTED or were cancelled."""
    steps: int
    decode_steps: int
    """Steps without prompt tokens."""
    decode_step_tokens: int
    """Tokens drawn in those."""
    decode_s: float
    """Seconds of `busy_s` spent in those."""
    busy_s: float
    """Seconds spent in steps."""
    publications: int
    """Weights taken, those of the start included."""

    def metrics(self) -> dict[str, float]:
        """In vLLM's names, without their `vllm:`, where both count the same thing."""
        return {
            "num_requests_running": self.running,
            "num_requests_waiting": self.waiting,
            "kv_cache_usage_perc": self.kv_usage,
            "num_preemptions_total": self.preemptions,
            "prefix_cache_queries_total": self.query_tokens,
            "prefix_cache_hits_total": self.cached_tokens,
            "generation_tokens_total": self.decoded_tokens,
        }


class Stepper:
    """State of one engine."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int,
        num_blocks: int,
        version: int,
        prefill_tokens: int,
        on_publish: OnPublish,
        adapters: bool,
    ) -> None:
        shape = policy.shape
        self._policy = policy
        self._device = torch.device(policy.device)
        experts = (len(forward.routers(policy.module)), forward.experts_per_token(policy.module))
        self._store = KvStore(shape, num_blocks, policy.dtype, policy.device, experts)
        self._cache = KvCache(num_blocks)
        self.scheduler = Scheduler(
            self._cache,
            max_rows=max_rows,
            max_context=shape.max_context,
            vocab=shape.vocab,
            prefill_tokens=prefill_tokens,
        )
        self._decoder = Decoder(policy, self._store, adapters=adapters)
        self._stop_rule = StopRule(policy.loaded.stop_ids, policy.loaded.tokenizer)
        self._on_publish = on_publish
        self.version = version
        self.fingerprint = ""
        self.adapters: dict[str, int] = {}
        """Version of each named adapter."""
        # What the turns of a session have returned the experts of.
        self._told: dict[str, list[int]] = {}
        # Sessions by their last use, seconds on the caller's clock; the longest unused first.
        self._used: dict[str, float] = {}
        self._decoded = 0
        self._prefill_tokens = 0
        self._aborted = 0
        self._expired = 0
        self._steps = 0
        self._decode_steps = 0
        self._decode_step_tokens = 0
        self._decode_s = 0.0
        self._busy_s = 0.0
        self._publications = 0

    @property
    def idle(self) -> bool:
        return not self.scheduler.rows and not self.scheduler.waiting

    # ------------------------------------------------------------------ between steps

    def load(self, version: int) -> None:
        """Take the policy's weights as `version`. Raises WeightsError; then nothing changed."""
        if version < self.version:
            raise WeightsError(
                f"cannot serve version {version}: version {self.version} is served already",
                hint="versions only grow; start a new engine to go back",
            )
        with boundary(WeightsError, f"publication of version {version}"):
            self._load(version)

    def _load(self, version: int) -> None:
        # The policy may hand out tensors that training uses later: no inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            snapshot = self._policy.snapshot()
        if self._publications and version == self.version:
            if snapshot.fingerprint == self.fingerprint:
                return
            raise WeightsError(
                f"version {version} names other weights already: fingerprint "
                f"{self.fingerprint}, now {snapshot.fingerprint}",
                hint="publish new weights under a new version",
            )
        self._decoder.load(snapshot)
        self._renew(None)
        self.version = version
        self.fingerprint = snapshot.fingerprint
        self._publications += 1

    @property
    def has_experts(self) -> bool:
        return self._store.experts is not None

    def load_adapter(self, name: str, adapter: Adapter, version: int) -> None:
        """Serve an adapter under a name. Raises WeightsError; then nothing changed."""
        if version <= self.adapters.get(name, -1):
            raise WeightsError(
                f"cannot serve version {version} of adapter `{name}`: version "
                f"{self.adapters[name]} is served already",
                hint="versions only grow",
            )
        with boundary(WeightsError, f"publication of adapter `{name}`, version {version}"):
            self._decoder.load_adapter(name, adapter)
        self._renew(name)
        self.adapters[name] = version

    def drop_adapter(self, name: str, opening: Sequence[str] = ()) -> None:
        """Forget an adapter. Raises SamplerError while a session uses it, or one of `opening`."""
        users = [*dict.fromkeys([*self._cache.sessions_of(name), *opening])]
        if users:
            raise SamplerError(
                f"adapter `{name}` is used by {len(users)} open sessions, first `{users[0]}`",
                hint="release them first",
            )
        self._renew(name)
        self._decoder.drop_adapter(name)
        self.adapters.pop(name, None)

    def _renew(self, adapter: str | None) -> None:
        """Other weights serve under a name, or under all."""
        self._cache.invalidate(adapter)
        recompute = self._on_publish is OnPublish.RECOMPUTE
        for row in reversed(self.scheduler.rows):
            # A prompt is computed under one version: a row that has drawn nothing starts again.
            begun = bool(row.drawn) and row.pending == 1
            if (adapter is None or row.adapter == adapter) and (recompute or not begun):
                self.scheduler.preempt(row)

    def open(self, session: str, adapter: str, now: float) -> None:
        self._cache.open(session, adapter)
        self._used[session] = now

    def release(self, session: str) -> None:
        turn = self.scheduler.find(session)
        if turn is not None:
            self._abort(turn)
        self._cache.close(session)
        self._used.pop(session, None)
        self._told.pop(session, None)

    def submit(self, turn: Turn) -> None:
        """Queue a turn; see `Scheduler.submit`. One that cannot be started fails alone."""
        before = self.scheduler.find(turn.session)
        if before is not None and before.future.cancelled():
            self._abort(before)
        with boundary(SamplerError, f"start of a turn of session `{turn.session}`"):
            self.scheduler.submit(turn)
        self._used.pop(turn.session, None)

    def expire(self, now: float, ttl_s: float) -> list[str]:
        """Release the sessions that nobody has used for `ttl_s`; returns their names."""
        gone: list[str] = []
        for session, used in self._used.items():
            if now - used < ttl_s:
                break
            gone.append(session)
        for session in gone:
            self.release(session)
        self._expired += len(gone)
        return gone

    def next_expiry(self, ttl_s: float) -> float | None:
        """When the next session expires if nobody uses it; None = none can."""
        return next((used + ttl_s for used in self._used.values()), None)

    def offload(self) -> None:
        """Free all KV memory; running turns are computed again when they go on."""
        for row in reversed(self.scheduler.rows):
            self.scheduler.preempt(row)
        self._cache.clear()
        self._store.release_memory()

    def score(
        self, ids: Sequence[int], start: int, temperature: float, adapter: str
    ) -> tuple[float, ...]:
        """As `Sampler.score`; touches no KV."""
        with boundary(SamplerError, f"score of {len(ids)} ids"):
            return tuple(self._decoder.score(ids, start, temperature, adapter).tolist())

    def scores(
        self,
        ids: Sequence[int],
        start: int,
        temperature: float,
        top: int,
        labels: Sequence[int],
        adapter: str,
    ) -> Scores:
        """As `Engine.scores`; touches no KV."""
        with boundary(SamplerError, f"scores of {len(ids)} ids"):
            return self._decoder.scores(ids, start, temperature, top, labels, adapter)

    def fail_all(self, error: SamplerError) -> None:
        """Resolve every turn with an error and hold nothing any more."""
        turns = [*self.scheduler.rows, *self.scheduler.waiting]
        try:
            for turn in turns:
                self.scheduler.finish(turn, keep=False)
            self._cache.close_all()
            self._used.clear()
            self._told.clear()
        finally:
            # Whatever the clean-up trips over after a crash, nobody is left waiting.
            for turn in turns:
                fail(turn.future, again(error))

    # ------------------------------------------------------------------ a step

    def step(self) -> None:
        """One token for every row that is being decoded, and pieces of prompts."""
        begin = time.perf_counter()
        self.sweep(time.monotonic())
        self.scheduler.grow()
        self._store.copy(self.scheduler.admit())
        # Tokens of one adapter are neighbours in a pass; "" comes first.
        pieces = sorted(self.scheduler.pieces(), key=lambda piece: piece[0].adapter)
        assert pieces or not self.scheduler.waiting, "nothing can run"
        drawn = self._decoded
        if all(row.pending == 1 for row, _ in pieces):
            self._decode([row for row, _ in pieces])
            self._decode_steps += 1
            self._decode_step_tokens += self._decoded - drawn
            self._decode_s += time.perf_counter() - begin
        else:
            self._compute(pieces)
        self._steps += 1
        self._busy_s += time.perf_counter() - begin

    def sweep(self, now: float) -> None:
        """Free what nobody waits for any more."""
        for turn in [*self.scheduler.rows, *self.scheduler.waiting]:
            if turn.future.cancelled() or now >= turn.deadline:
                self._abort(turn)

    def _abort(self, turn: Turn) -> None:
        self._aborted += 1
        self._complete(turn, StopReason.ABORTED)

    def _complete(self, turn: Turn, reason: StopReason) -> None:
        completion = turn.completion(reason)
        if turn.params.experts and turn.table is not None:
            completion = replace(completion, experts=self._experts(turn))
        known = turn.ids[: turn.length]
        self._finish(turn, keep=True)
        if fulfil(turn.future, completion) and completion.experts is not None:
            self._told[turn.session] = known

    def untell(self, session: str) -> None:
        """The caller of the session's last turn has gone without its answer."""
        self._told.pop(session, None)

    def _experts(self, turn: Turn) -> ExpertChoices:
        """The choices that the turn asked for; all its positions with KV are known."""
        assert self._store.experts is not None, "a dense model was asked for experts"
        first = 0
        if turn.params.experts == "delta":
            told = self._told.get(turn.session, [])
            pairs = enumerate(zip(told, turn.ids, strict=False))
            same = next((i for i, (a, b) in pairs if a != b), min(len(told), len(turn.ids)))
            first = min(same, turn.length)
        chosen = self._store.experts_of(turn.blocks, first, turn.length)
        return ExpertChoices(
            first=first,
            layers=chosen.shape[1],
            top_k=chosen.shape[2],
            data=chosen.numpy().astype("<u2").tobytes(),
        )

    def _finish(self, turn: Turn, *, keep: bool) -> None:
        self.scheduler.finish(turn, keep=keep)
        self._used[turn.session] = time.monotonic()

    def _compute(self, pieces: Sequence[tuple[Turn, int]]) -> None:
        """A pass with prompt tokens in it."""
        logits = self._decoder.prefill(
            [
                Chunk(row.ids[row.length : row.length + count], row.length, row.blocks, row.adapter)
                for row, count in pieces
            ]
        )
        ends: dict[Turn, int] = {}
        broken: list[Turn] = []
        for i, (row, count) in enumerate(pieces):
            assert row.table is not None, "a waiting turn was computed"
            decoded = row.pending == 1
            row.table.length += count
            if not decoded:
                self._prefill_tokens += count
                self._cache.remember(row.session, row.table, row.ids, row.epoch)
            if not row.pending:
                ends[row] = i
            elif not math.isfinite(float(logits[i].amax())):
                broken.append(row)
        joined, copies = self.scheduler.join(list(ends))
        self._store.copy(copies)
        source = [*ends.values(), *(ends[leader] for _, leader in joined)]
        if source:
            rows = [*ends, *(row for row, _ in joined)]
            self._draw(rows, logits[torch.tensor(source, device=logits.device)])
        if broken:
            self._discard([row for row in broken if row in self.scheduler.rows])

    def _decode(self, rows: Sequence[Turn]) -> None:
        if not rows:
            return
        ids = np.fromiter((row.ids[-1] for row in rows), np.int64, len(rows))
        positions = np.fromiter((row.length for row in rows), np.int32, len(rows))
        width = int(positions.max()) // BLOCK + 1
        tables = tables_of([row.blocks for row in rows], width)
        for row in rows:
            assert row.table is not None, "a waiting turn was computed"
            row.table.length += 1
        if self._decoder.draws and all(_plain(row) for row in rows):
            draws = self._decoder.decode_draw(
                ids, positions, tables, self._temperatures(rows), self._uniforms(rows)
            )
            self._append(rows, draws)
        else:
            adapters = [row.adapter for row in rows]
            self._draw(rows, self._decoder.decode(ids, positions, tables, adapters))

    # ------------------------------------------------------------------ drawing

    def _draw(self, rows: Sequence[Turn], logits: Tensor) -> None:
        """Draw from fp32 logits [rows, vocab], which are overwritten."""
        top_p = top_k = None
        if any(row.params.top_p < 1 or row.params.top_k for row in rows):
            top_p = torch.tensor([row.params.top_p for row in rows], device=self._device)
            top_k = torch.tensor([row.params.top_k for row in rows], device=self._device)
        draws = draw(logits, self._temperatures(rows), self._uniforms(rows), top_p, top_k)
        self._append(rows, draws)

    def _temperatures(self, rows: Sequence[Turn]) -> Tensor:
        values = [row.params.temperature for row in rows]
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _uniforms(self, rows: Sequence[Turn]) -> Tensor:
        seeds = [row.params.seed & 0xFFFFFFFFFFFFFFFF for row in rows]
        positions = [len(row.ids) for row in rows]
        drawn = uniforms(np.array(seeds, np.uint64), np.array(positions, np.int64))
        return torch.from_numpy(drawn).to(self._device)

    def _append(self, rows: Sequence[Turn], draws: Draws) -> None:
        """Give every row its token, and let those go that are done."""
        broken: list[Turn] = []
        values = zip(
            draws.ids.tolist(), draws.logprobs.tolist(), draws.entropies.tolist(), strict=True
        )
        for row, (token, logprob, entropy) in zip(list(rows), values, strict=True):
            if not math.isfinite(logprob):
                broken.append(row)
                continue
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.entropies.append(entropy)
            row.versions.append(self.adapters.get(row.adapter, self.version))
            self._decoded += 1
            try:
                with boundary(SamplerError, f"end of a turn of session `{row.session}`"):
                    reason = self._stop_rule.reason(row.ids, len(row.prompt), row.params)
            except SamplerError as error:
                # The tokenizer and the stop strings are this request's own.
                self._finish(row, keep=True)
                fail(row.future, error)
                continue
            if reason is not None:
                self._complete(row, reason)
        if broken:
            self._discard(broken)

    def _discard(self, broken: Sequence[Turn]) -> None:
        """Fail rows whose logits are not finite, and leave no NaN behind in the KV."""
        pool = self._cache.pool
        held = [b for b in range(pool.num_blocks) if pool.holders(b) or pool.sealed(b)]
        for row in broken:
            self._finish(row, keep=False)
        # A sibling or a later turn would start from the same NaN.
        self._renew(None)
        self._store.wipe(block for block in held if not pool.holders(block))
        for row in broken:
            error = SamplerError(
                f"the logits after {len(row.ids)} tokens of session `{row.session}` are "
                f"not finite, under version {self.version}",
                hint="the weights diverged: look at loss and gradient norm of the last steps",
            )
            fail(row.future, error)

    def stats(self, sessions: int) -> EngineStats:
        pool, scheduler = self._cache.pool, self.scheduler
        return EngineStats(
            running=len(scheduler.rows),
            waiting=len(scheduler.waiting),
            waiting_for_kv=scheduler.waiting_for_kv,
            sessions=sessions,
            kv_usage=pool.used / pool.num_blocks,
            kv_tokens=pool.num_blocks * BLOCK,
            decoded_tokens=self._decoded,
            prefill_tokens=self._prefill_tokens,
            query_tokens=scheduler.query_tokens,
            cached_tokens=scheduler.hit_tokens,
            dropped_tokens=self._cache.dropped_tokens,
            evicted_tokens=pool.evicted_tokens,
            preemptions=scheduler.preemptions,
            expired=self._expired,
            aborted=self._aborted,
            steps=self._steps,
            decode_steps=self._decode_steps,
            decode_step_tokens=self._decode_step_tokens,
            decode_s=self._decode_s,
            busy_s=self._busy_s,
            publications=self._publications,
        )


def _plain(row: Turn) -> bool:
    """Whether the row needs nothing but a temperature."""
    return row.params.top_p >= 1 and row.params.top_k == 0


def fulfil(future: Future[Any], result: object) -> bool:
    """Set a result, unless the caller has gone; whether it was set."""
    try:
        future.set_result(result)
    except InvalidStateError:
        return False
    return True


def fail(future: Future[Any], error: BaseException) -> None:
    """Set an exception, unless the caller has gone."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def again(error: SamplerError) -> SamplerError:
    """The same error for another waiter: one instance raised twice would mix tracebacks."""
    copy = SamplerError(error.message, hint=error.hint)
    copy.__cause__ = error.__cause__
    return copy
