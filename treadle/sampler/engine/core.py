"""The engine: one thread that steps the model, and the calls that reach it from anywhere.

    any event loop / thread             engine thread
    open, sample, score, release  --->  inbox -> sweep -> admit -> prefill -> decode -> draw
    publish                       --->  between two steps

Guarantees:
- the model never runs on an event loop, and every call may come from any loop or thread;
- every wait ends: with an answer, at the deadline of its request (ABORTED), or with SamplerError
  naming the cause when the engine dies or is closed; later calls then raise at once;
- a cancelled call frees its row before the next step, and a session that nobody uses is released
  after `session_ttl_s`;
- `publish` swaps weights between two steps: running turns go on, each token carries the version
  that drew it, and KV of older weights serves no new prompt; a snapshot that is not what it
  should be raises WeightsError and changes nothing.

Takes: prompts, and a Policy to take weights from. Gives: Completions. Waits for: its inbox, when
nothing runs. Woken by: any call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch

from treadle.errors import ConfigError, SamplerError, TreadleError, WeightsError, did_you_mean
from treadle.models.linear import Adapter
from treadle.models.policy import Policy
from treadle.sampler.checks import as_ids, check_ids, check_score
from treadle.sampler.engine.blocks import BLOCK, blocks_for
from treadle.sampler.engine.kv import budget_blocks, can_release_memory
from treadle.sampler.engine.scheduler import PREFILL_TOKENS, Turn
from treadle.sampler.engine.stepper import EngineStats, OnPublish, Stepper, again, fail, fulfil
from treadle.types import Completion, SamplerCapabilities, SamplerLoad, SamplingParams, Scores

logger = logging.getLogger(__name__)

GRACE_S = 120.0
"""A call waits this much longer than its deadline before it declares the engine stuck; the
deadline itself is looked at between two steps."""
SWAP_LIMIT_S = 600.0
"""Longest wait for a publication, a score or a start."""
PAUSE_TICK_S = 0.05
"""How often a paused engine looks at deadlines and cancelled calls."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do on the engine thread between two steps."""

    run: Callable[[], object]
    future: Future[Any]
    """What the caller waits for. `run` resolves it; an error that `run` raises goes there too."""


class Engine:
    """A `Sampler` and a `WeightSink` in this process."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int = 64,
        kv_tokens: int | None = None,
        version: int = 0,
        prefill_tokens: int = PREFILL_TOKENS,
        on_publish: OnPublish | str = OnPublish.KEEP,
        session_ttl_s: float = 3600.0,
        adapters: bool = False,
        name: str = "engine",
    ) -> None:
        """
        Args:
            policy: where `start` and `publish` take weights from.
            max_rows: turns decoded at once.
            kv_tokens: KV budget in tokens, rounded down to blocks of 16. None = max_rows times
                the model's context, at most a quarter of the memory.
            version: PolicyVersion of the weights that `start` takes.
            prefill_tokens: prompt tokens computed per step; a longer prompt takes several, between
                which the running turns go on.
            on_publish: "keep" or "recompute" the KV of turns that run when weights are published.
            adapters: named adapters will be served beside the policy's weights (`publish_adapter`);
                their tokens share a pass. It decodes in torch then.
            session_ttl_s: a session without a call for so long is released: its owner has died.
            name: of the thread, and in messages.

        Raises:
            ConfigError: an argument is out of range.
        """
        if max_rows < 1:
            raise ConfigError(f"`max_rows` must be >= 1, got {max_rows}")
        if kv_tokens is not None and kv_tokens < BLOCK:
            raise ConfigError(f"`kv_tokens` must be >= {BLOCK}, got {kv_tokens}")
        if prefill_tokens < 1:
            raise ConfigError(f"`prefill_tokens` must be >= 1, got {prefill_tokens}")
        if not session_ttl_s > 0:
            raise ConfigError(f"`session_ttl_s` must be > 0, got {session_ttl_s!r}")
        if on_publish not in tuple(OnPublish):
            known = " or ".join(f"`{each}`" for each in OnPublish)
            raise ConfigError(f"`on_publish` must be {known}, got {on_publish!r}")
        self.name = name
        self._ttl_s = session_ttl_s
        self._paused = False
        self._shape = policy.shape
        self._device = policy.device
        wanted = max_rows * blocks_for(policy.shape.max_context) * BLOCK
        num_blocks = (
            budget_blocks(policy.shape, policy.dtype, policy.device, wanted)
            if kv_tokens is None
            else kv_tokens // BLOCK
        )
        self._stepper = Stepper(
            policy,
            max_rows=max_rows,
            num_blocks=num_blocks,
            version=version,
            prefill_tokens=prefill_tokens,
            on_publish=OnPublish(on_publish),
            adapters=adapters,
        )
        self._serves_adapters = adapters
        self._inbox: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        # Guards what callers and the engine thread both touch: the three below, and that no
        # call enters the inbox after the engine thread has emptied it for the last time.
        self._lock = threading.Lock()
        self._sessions: dict[str, str] = {}
        """Open sessions, and the adapter of each."""
        self._closing = False
        self._dead: SamplerError | None = SamplerError(
            f"{name} is not running", hint="call start(), or use it as a context manager"
        )
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ life

    def start(self) -> Engine:
        """Take the policy's weights and serve. Raises WeightsError when they are not usable."""
        if self._thread is not None:
            raise SamplerError(f"{self.name} was started before", hint="make a new Engine")
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._dead = None
        self._thread.start()
        try:
            self.publish(self.version)
        except BaseException:
            self.close()
            raise
        return self

    def close(self, timeout_s: float = 60.0) -> None:
        """Stop after the current step; waiting and running calls raise SamplerError. Idempotent."""
        if self._thread is None or threading.current_thread() is self._thread:
            return
        with self._lock:
            self._closing = True
        self._inbox.put(_Call(lambda: None, Future()))
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise SamplerError(f"{self.name} is still in a step {timeout_s:g} s after close()")

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    # ------------------------------------------------------------------ Sampler

    @property
    def version(self) -> int:
        return self._stepper.version

    @property
    def capabilities(self) -> SamplerCapabilities:
        return SamplerCapabilities(
            release=True,
            score=True,
            shared_prefix=True,
            entropies=True,
            pause=True,
            experts=self._stepper.has_experts,
            adapters=self._serves_adapters,
            offload=can_release_memory(self._device),
        )

    async def open(self, session: str, *, group: str = "", adapter: str = "") -> None:
        """Start a session; see `Sampler`.

        Prompts that begin alike are shared whatever their group.

        Args:
            adapter: name of a published adapter; "" = the policy's own weights.

        Raises:
            SamplerError: the session's name is taken, or the adapter was never published.
        """
        with self._lock:
            self._check_alive()
            if session in self._sessions:
                raise SamplerError(
                    f"session `{session}` is already open", hint="names are unique until release"
                )
            self._check_adapter(adapter)
            self._sessions[session] = adapter
            now = time.monotonic()
            self._inbox.put(_Call(lambda: self._stepper.open(session, adapter, now), Future()))

    async def sample(
        self, session: str, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        """Continue `prompt`; see `Sampler`.

        Temperature 0 is greedy: its logprobs and entropies are those at temperature 1. With
        top-p or top-k the logprobs are still those of the full distribution, not of the one that
        was drawn from: good for evals, refused by training.

        Raises:
            ConfigError: a sampling parameter is out of range.
            SamplerError: the session is unknown or in the middle of a turn, the prompt is empty,
                has an id that is no integer or outside of the vocabulary, or can never fit; or the
                engine died.
        """
        ids = as_ids(prompt)
        self._stepper.scheduler.check(ids, params)
        if params.experts and not self._stepper.has_experts:
            raise SamplerError(
                f"{self.name} serves a dense model: it has no experts to return",
                hint="leave SamplingParams.experts empty",
            )
        turn = Turn(session, ids, params, time.monotonic() + params.deadline_s)
        self._post(_Call(lambda: self._stepper.submit(turn), turn.future))
        try:
            return await self._answer(turn.future, params.deadline_s + GRACE_S)
        except asyncio.CancelledError:
            if params.experts and not turn.future.cancelled():
                # It ended in the moment in which its caller went: the answer is lost.
                with contextlib.suppress(SamplerError):
                    self._post(_Call(lambda: self._stepper.untell(session), Future()))
            raise

    async def score(
        self, ids: Sequence[int], start: int, *, temperature: float = 1.0, adapter: str = ""
    ) -> tuple[float, ...]:
        """Teacher-forced logprobs under the served weights; see `Sampler`.

        Raises:
            ConfigError: temperature is not a finite number >= 1e-6, or start is out of range.
            SamplerError: an id is no integer or not in the vocabulary, or there are more ids than
                context.
        """
        given = self._check_score(ids, start, temperature)
        self._check_adapter(adapter)
        future = self._ask(lambda: self._stepper.score(given, start, temperature, adapter))
        return await self._answer(future, SWAP_LIMIT_S)

    async def scores(
        self,
        ids: Sequence[int],
        start: int,
        *,
        top: int = 0,
        labels: Sequence[int] = (),
        temperature: float = 1.0,
        adapter: str = "",
    ) -> Scores:
        """As `score`, and of each position the `top` most probable ids and chosen `labels`.

        The label of a prompt: `ids` are the prompt and any one id, `start` the prompt's length.

        Raises:
            ConfigError, SamplerError: as `score`; or `top` is not in 0..vocabulary, or a label is
                not in the vocabulary.
        """
        given = self._check_score(ids, start, temperature)
        if not 0 <= top <= self._shape.vocab:
            raise ConfigError(f"`top` must be in 0..{self._shape.vocab}, got {top}")
        self._check_adapter(adapter)
        wanted = list(as_ids(labels))
        if wanted:
            check_ids(wanted, self._shape.vocab)
        future = self._ask(
            lambda: self._stepper.scores(given, start, temperature, top, wanted, adapter)
        )
        return await self._answer(future, SWAP_LIMIT_S)

    def _check_score(self, ids: Sequence[int], start: int, temperature: float) -> list[int]:
        given = list(as_ids(ids))
        check_ids(given, self._shape.vocab)
        if len(given) > self._shape.max_context:
            raise SamplerError(
                f"{len(given)} ids to score exceed the context of {self._shape.max_context}"
            )
        check_score(given, start, temperature)
        return given

    async def release(self, session: str) -> None:
        """End a session: its KV is free when this returns. A turn in flight ends ABORTED.

        Idempotent, and silent on an engine that is closed or dead: there is nothing to free.
        """
        with self._lock:
            if session not in self._sessions or self._dead is not None:
                return
            del self._sessions[session]
            future: Future[None] = Future()
            # Also when the caller is cancelled meanwhile, so not through _ask.
            self._inbox.put(_Call(lambda: fulfil(future, self._stepper.release(session)), future))
        try:
            await self._answer(future, SWAP_LIMIT_S)
        except SamplerError:
            if self._dead is None:
                raise

    async def load(self) -> SamplerLoad:
        """How busy the engine is; see `Replica`. Raises SamplerError when it does not run."""
        self._check_alive()
        stats = self.stats()
        return SamplerLoad(
            running=stats.running,
            waiting=stats.waiting,
            waiting_for_kv=stats.waiting_for_kv,
            sessions=stats.sessions,
            kv_usage=stats.kv_usage,
            kv_tokens=stats.kv_tokens,
            preemptions=stats.preemptions,
            prefix_query_tokens=stats.query_tokens,
            prefix_hit_tokens=stats.cached_tokens,
        )

    # ------------------------------------------------------------------ pausing

    async def pause(self) -> None:
        """Stand still after the current step, until `resume`. Idempotent.

        Calls are taken and wait; deadlines, cancelling, releasing, scoring and publishing work.
        """
        await self._answer(self._ask(lambda: self._set_paused(True)), SWAP_LIMIT_S)

    async def resume(self) -> None:
        """Go on; turns that were running lose no token. Idempotent."""
        await self._answer(self._ask(lambda: self._set_paused(False)), SWAP_LIMIT_S)

    async def offload(self) -> None:
        """Pause, and give the memory of the KV cache back to the system.

        Sessions stay open; after `resume` what they need is computed again.

        Raises:
            SamplerError: not supported here; see `capabilities`.
        """
        if not self.capabilities.offload:
            raise SamplerError(
                f"{self.name} cannot give back the memory of its KV cache on {self._device}: "
                "not supported",
                hint="pause() works; close the engine to free its memory",
            )

        def run() -> None:
            self._set_paused(True)
            self._stepper.offload()

        await self._answer(self._ask(run), SWAP_LIMIT_S)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused

    # ------------------------------------------------------------------ WeightSink

    def publish(self, version: int) -> None:
        """Serve the policy's current weights as `version` from the next step on.

        Blocks until they are served. Turns in flight go on under the new weights, with the KV
        they have or with new one (`on_publish`); no new prompt reuses KV of older ones.

        Raises:
            WeightsError: version is below the served one, or names other weights already; or
                the snapshot differs in names or shapes, or has values that are not finite. The
                old weights keep serving.
            SamplerError: the engine is not running.
        """
        self._wait(self._ask(lambda: self._stepper.load(version)))

    def _wait(self, future: Future[None]) -> None:
        try:
            future.result(SWAP_LIMIT_S)
        except TimeoutError:
            future.cancel()
            raise self._stuck(SWAP_LIMIT_S) from None

    def publish_adapter(self, name: str, adapter: Adapter, version: int = 0) -> None:
        """Serve an adapter under a name, beside all others, from the next step on.

        Blocks until it is served. KV and sessions of other names are not touched; `version` is
        what its tokens are recorded with.

        Raises:
            WeightsError: version is not above the served one, or the adapter does not fit.
            SamplerError: the engine is not running, or was not made with adapters=True.
        """
        if not self._serves_adapters:
            raise SamplerError(
                f"{self.name} serves no named adapters", hint="make it with adapters=True"
            )
        if not name:
            raise WeightsError("an adapter needs a name: `` means the policy's own weights")
        self._wait(self._ask(lambda: self._stepper.load_adapter(name, adapter, version)))

    def drop_adapter(self, name: str) -> None:
        """Forget an adapter. Raises SamplerError while an open session uses it."""

        def run() -> None:
            # A session that was accepted may still be in the inbox, and none is accepted meanwhile.
            with self._lock:
                opening = [s for s, used in self._sessions.items() if used == name]
                self._stepper.drop_adapter(name, opening)

        self._wait(self._ask(run))

    def _check_adapter(self, name: str) -> None:
        known = self._stepper.adapters
        if name and name not in known:
            raise SamplerError(
                f"adapter `{name}` is not served by {self.name}",
                hint=did_you_mean(name, known) if known else "publish it with publish_adapter",
            )

    def fingerprint(self) -> str:
        """Of the served weights, as the policy computes it: what proves a publication."""
        return self._stepper.fingerprint

    def stats(self) -> EngineStats:
        """A glance from any thread; the fields are not from one instant."""
        return self._stepper.stats(len(self._sessions))

    def metrics(self) -> dict[str, float]:
        """`stats` in vLLM's names, without their prefix; see docs/metrics.md."""
        return self.stats().metrics()

    # ------------------------------------------------------------------ hand-over

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise again(self._dead)

    def _post(self, call: _Call) -> None:
        with self._lock:
            self._check_alive()
            self._inbox.put(call)

    def _ask(self, run: Callable[[], T]) -> Future[T]:
        """`run` on the engine thread between two steps, unless it is cancelled before."""
        future: Future[T] = Future()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                fulfil(future, run())

        self._post(_Call(call, future))
        return future

    async def _answer(self, future: Future[T], limit_s: float) -> T:
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise self._stuck(limit_s) from None

    def _stuck(self, limit_s: float) -> SamplerError:
        return SamplerError(
            f"{self.name} did not answer within {limit_s:g} s: its thread is stuck in a step",
            hint="is the machine swapping? py-spy shows where the thread is",
        )

    # ------------------------------------------------------------------ engine thread

    def _run(self) -> None:
        error: SamplerError
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._take_calls()
                    now = time.monotonic()
                    self._expire(now)
                    if self._paused:
                        self._stepper.sweep(now)
                    elif not self._stepper.idle:
                        self._stepper.step()
            error = SamplerError(f"{self.name} was closed")
        except Exception as cause:
            logger.exception("%s died", self.name)
            error = self._death(cause)
        self._end(error)

    def _expire(self, now: float) -> None:
        gone = self._stepper.expire(now, self._ttl_s)
        if gone:
            logger.warning(
                "%s released %d sessions that nobody used for %g s, first `%s`",
                *(self.name, len(gone), self._ttl_s, gone[0]),
            )
            with self._lock:
                for session in gone:
                    self._sessions.pop(session, None)

    def _patience_s(self) -> float | None:
        """How long the thread may wait for a call; None = for ever."""
        if not self._stepper.idle:
            return PAUSE_TICK_S if self._paused else 0.0
        expiry = self._stepper.next_expiry(self._ttl_s)
        # A little late, so that many are found at once.
        late = self._ttl_s / 20
        return None if expiry is None else max(late, expiry - time.monotonic() + late)

    def _take_calls(self) -> None:
        """Do what callers asked for; waits for it when there is nothing else to do."""
        patience = self._patience_s()
        block = patience != 0.0
        while not self._closing:
            try:
                call = self._inbox.get(block=block, timeout=patience)
            except queue.Empty:
                return
            block = False
            try:
                call.run()
            except TreadleError as error:
                fail(call.future, error)
            except Exception as error:
                # Our own bookkeeping is broken: no later answer could be trusted.
                fail(call.future, self._death(error))
                raise

    def _death(self, cause: Exception) -> SamplerError:
        error = SamplerError(f"{self.name} died: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error

    def _end(self, error: SamplerError) -> None:
        """Nobody is left waiting, and nobody can begin to."""
        with self._lock:
            self._dead = error
            self._sessions.clear()
        try:
            self._stepper.fail_all(error)
        finally:
            while not self._inbox.empty():
                fail(self._inbox.get().future, again(error))
