"""One step of the engine: sweep, admit, prefill, decode, draw. Single-threaded, no locks.

Guarantees: every drawn token gets its logprob, entropy and the version of the weights that drew
it in the same statement; a row whose logits are not finite fails alone, with its KV wiped; a
request is resolved exactly once.

Takes: requests. Gives: their futures, resolved.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treadle.errors import SamplerError, WeightsError, boundary
from treadle.models.policy import Policy
from treadle.sampler.engine.blocks import BLOCK
from treadle.sampler.engine.cache import KvCache
from treadle.sampler.engine.decode import Chunk, Decoder, tables_of
from treadle.sampler.engine.kv import KvStore
from treadle.sampler.engine.sampling import Draws, draw, uniforms
from treadle.sampler.engine.scheduler import Request, Row, Scheduler
from treadle.sampler.engine.stopping import StopRule
from treadle.types import Completion, StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """What the engine is doing; counters run from its start."""

    running: int
    """Rows in the batch."""
    waiting: int
    """Requests in the queue."""
    sessions: int
    """Open sessions."""
    kv_usage: float
    """Fraction of the KV blocks that are held, idle sessions and reservations included."""
    kv_tokens: int
    """The KV budget in tokens."""
    decoded_tokens: int
    """Tokens drawn."""
    prefill_tokens: int
    """Prompt tokens computed."""
    cached_tokens: int
    """Prompt tokens whose KV was reused."""
    dropped_tokens: int
    """Positions of idle KV given up because blocks were short."""
    aborted: int
    """Turns that ended ABORTED or were cancelled."""
    steps: int
    decode_steps: int
    """Steps that drew the next token of running rows."""
    decode_s: float
    """Seconds of `busy_s` spent in that, prefill excluded."""
    busy_s: float
    """Seconds spent in steps."""
    publications: int
    """Weights taken, those of the start included."""


class Stepper:
    """State of one engine."""

    def __init__(self, policy: Policy, *, max_rows: int, num_blocks: int, version: int) -> None:
        shape = policy.shape
        self._policy = policy
        self._device = torch.device(policy.device)
        self._store = KvStore(shape, num_blocks, policy.dtype, policy.device)
        self._cache = KvCache(num_blocks)
        self.scheduler = Scheduler(
            self._cache, max_rows=max_rows, max_context=shape.max_context, vocab=shape.vocab
        )
        self._decoder = Decoder(policy, self._store)
        self._stop_rule = StopRule(policy.loaded.stop_ids, policy.loaded.tokenizer)
        self.version = version
        self.fingerprint = ""
        self._decoded = 0
        self._prefill_tokens = 0
        self._cached = 0
        self._aborted = 0
        self._steps = 0
        self._decode_steps = 0
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
        self._cache.invalidate()
        self.version = version
        self.fingerprint = snapshot.fingerprint
        self._publications += 1

    def open(self, session: str, group: str) -> None:
        self._cache.open(session, group)

    def release(self, session: str) -> None:
        turn = self.scheduler.find(session)
        if isinstance(turn, Row):
            self._abort(turn)
        elif turn is not None:
            self._abort_waiting(turn)
        self._cache.close(session)

    def score(self, ids: Sequence[int], start: int, temperature: float) -> tuple[float, ...]:
        """As `Sampler.score`; touches no KV."""
        with boundary(SamplerError, f"score of {len(ids)} ids"):
            return tuple(self._decoder.score(ids, start, temperature).tolist())

    def fail_all(self, error: SamplerError) -> None:
        """Resolve every turn with an error and hold nothing any more."""
        rows, waiting = list(self.scheduler.rows), list(self.scheduler.waiting)
        try:
            for row in rows:
                self.scheduler.finish(row, keep=False)
            for request in waiting:
                self.scheduler.withdraw(request)
            self._cache.close_all()
        finally:
            # Whatever the clean-up trips over after a crash, nobody is left waiting.
            for request in (*(row.request for row in rows), *waiting):
                fail(request.future, again(error))

    # ------------------------------------------------------------------ a step

    def step(self) -> None:
        """One token for every row, after letting new ones in."""
        begin = time.perf_counter()
        self._sweep(time.monotonic())
        admitted = self.scheduler.admit()
        assert admitted or self.scheduler.rows or not self.scheduler.waiting, "nothing can run"
        self._cached += sum(row.cached for row in admitted)
        self._prefill_tokens += sum(row.pending for row in admitted)
        self._prefill(admitted)
        prefilled = time.perf_counter()
        self._decode(self.scheduler.rows)
        self._steps += 1
        end = time.perf_counter()
        self._decode_s += end - prefilled
        self._busy_s += end - begin

    def _sweep(self, now: float) -> None:
        """Free what nobody waits for any more."""
        for row in list(self.scheduler.rows):
            if row.request.future.cancelled() or now >= row.request.deadline:
                self._abort(row)
        for request in list(self.scheduler.waiting):
            if request.future.cancelled() or now >= request.deadline:
                self._abort_waiting(request)

    def _abort(self, row: Row) -> None:
        self.scheduler.finish(row, keep=False)
        self._aborted += 1
        fulfil(row.request.future, row.completion(StopReason.ABORTED))

    def _abort_waiting(self, request: Request) -> None:
        self.scheduler.withdraw(request)
        self._aborted += 1
        empty = Completion(
            ids=(),
            logprobs=(),
            versions=(),
            stop_reason=StopReason.ABORTED,
            prompt_tokens=len(request.prompt),
        )
        fulfil(request.future, empty)

    def _prefill(self, admitted: Sequence[Row]) -> None:
        """Compute the prompts of the leaders and draw the first token of all who share one."""
        leaders = [row for row in admitted if row.leader is None]
        self._store.copy([pair for row in leaders for pair in row.copies])
        # A prompt with one unknown token is a decode step like any other.
        leaders = [row for row in leaders if row.pending > 1]
        if not leaders:
            return
        logits = self._decoder.prefill(
            [Chunk(r.ids[r.table.length :], r.table.length, r.table.blocks) for r in leaders]
        )
        copies: list[tuple[int, int]] = []
        for row in leaders:
            row.table.length = len(row.ids)
            copies += self._cache.remember(row.request.session, row.table, row.ids)
        index = {row: i for i, row in enumerate(leaders)}
        rows = [row for row in admitted if row in index or row.leader is not None]
        for row in rows:
            if row.leader is not None:
                copies += row.copies
        self._store.copy(copies)
        source = [index[row if row.leader is None else row.leader] for row in rows]
        self._draw(rows, logits[torch.tensor(source, device=logits.device)])

    def _decode(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        self._decode_steps += 1
        ids = np.fromiter((row.ids[-1] for row in rows), np.int64, len(rows))
        positions = np.fromiter((row.table.length for row in rows), np.int32, len(rows))
        width = int(positions.max()) // BLOCK + 1
        tables = tables_of([row.table.blocks for row in rows], width)
        for row in rows:
            row.table.length += 1
        if self._decoder.draws and all(_plain(row) for row in rows):
            draws = self._decoder.decode_draw(
                ids, positions, tables, self._temperatures(rows), self._uniforms(rows)
            )
            self._append(rows, draws)
        else:
            self._draw(rows, self._decoder.decode(ids, positions, tables))

    # ------------------------------------------------------------------ drawing

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> None:
        """Draw from fp32 logits [rows, vocab], which are overwritten."""
        top_p = top_k = None
        if any(row.request.params.top_p < 1 or row.request.params.top_k for row in rows):
            top_p = torch.tensor([row.request.params.top_p for row in rows], device=self._device)
            top_k = torch.tensor([row.request.params.top_k for row in rows], device=self._device)
        draws = draw(logits, self._temperatures(rows), self._uniforms(rows), top_p, top_k)
        self._append(rows, draws)

    def _temperatures(self, rows: Sequence[Row]) -> Tensor:
        values = [row.request.params.temperature for row in rows]
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def _uniforms(self, rows: Sequence[Row]) -> Tensor:
        seeds = [row.request.params.seed & 0xFFFFFFFFFFFFFFFF for row in rows]
        positions = [len(row.ids) for row in rows]
        drawn = uniforms(np.array(seeds, np.uint64), np.array(positions, np.int64))
        return torch.from_numpy(drawn).to(self._device)

    def _append(self, rows: Sequence[Row], draws: Draws) -> None:
        """Give every row its token, and let those go that are done."""
        version, broken = self.version, []
        values = zip(
            draws.ids.tolist(), draws.logprobs.tolist(), draws.entropies.tolist(), strict=True
        )
        for row, (token, logprob, entropy) in zip(list(rows), values, strict=True):
            if not math.isfinite(logprob):
                broken.append(row)
                continue
            row.leader = None
            row.ids.append(token)
            row.logprobs.append(logprob)
            row.entropies.append(entropy)
            row.versions.append(version)
            self._decoded += 1
            reason = self._stop_rule.reason(row.ids, len(row.request.prompt), row.request.params)
            if reason is not None:
                self.scheduler.finish(row, keep=True)
                fulfil(row.request.future, row.completion(reason))
        if broken:
            self._discard(broken)

    def _discard(self, broken: Sequence[Row]) -> None:
        """Fail rows whose logits are not finite, and leave no NaN behind in the KV."""
        pool = self._cache.pool
        held = [block for block in range(pool.num_blocks) if pool.holders(block)]
        for row in broken:
            self.scheduler.finish(row, keep=False)
        # A sibling or a later turn would start from the same NaN.
        self._cache.invalidate()
        self._store.wipe(block for block in held if not pool.holders(block))
        for row in broken:
            error = SamplerError(
                f"the logits after {len(row.ids)} tokens of session `{row.request.session}` are "
                f"not finite, under version {self.version}",
                hint="the weights diverged: look at loss and gradient norm of the last steps",
            )
            fail(row.request.future, error)

    def stats(self, sessions: int) -> EngineStats:
        pool = self._cache.pool
        return EngineStats(
            running=len(self.scheduler.rows),
            waiting=len(self.scheduler.waiting),
            sessions=sessions,
            kv_usage=pool.used / pool.num_blocks,
            kv_tokens=pool.num_blocks * BLOCK,
            decoded_tokens=self._decoded,
            prefill_tokens=self._prefill_tokens,
            cached_tokens=self._cached,
            dropped_tokens=self._cache.dropped_tokens,
            aborted=self._aborted,
            steps=self._steps,
            decode_steps=self._decode_steps,
            decode_s=self._decode_s,
            busy_s=self._busy_s,
            publications=self._publications,
        )


def _plain(row: Row) -> bool:
    """Whether the row needs nothing but a temperature."""
    return row.request.params.top_p >= 1 and row.request.params.top_k == 0


def fulfil(future: Future[Any], result: object) -> None:
    """Set a result, unless the caller has gone."""
    with contextlib.suppress(InvalidStateError):
        future.set_result(result)


def fail(future: Future[Any], error: BaseException) -> None:
    """Set an exception, unless the caller has gone."""
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)


def again(error: SamplerError) -> SamplerError:
    """The same error for another waiter: one instance raised twice would mix tracebacks."""
    copy = SamplerError(error.message, hint=error.hint)
    copy.__cause__ = error.__cause__
    return copy
