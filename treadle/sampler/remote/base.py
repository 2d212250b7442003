"""What every remote engine shares: its life, its sessions, and their turns.

    sample --> gate --> the engine's own request --> Drawn --> checks --> Completion
                ^ closed while full weights are replaced (`weights`)     (`truth`)

Guarantees:
- a turn ends with a Completion whose ids and logprobs the server gave, each token with the version
  that drew it; with ABORTED at its deadline or when its session is released; or with SamplerError;
- a caller that is cancelled closes its connection, and the server aborts the turn;
- the counts of sessions and turns are ours alone: another client of the same server is not seen.

Takes: prompt ids; directories with weights. Gives: Completions. Waits for: the server, bounded.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from treadle.errors import ConfigError, SamplerError
from treadle.sampler.checks import as_ids, check_ids, check_params, check_score
from treadle.sampler.remote.http import Http
from treadle.sampler.remote.truth import Drawn, completion_of, scores_of
from treadle.sampler.remote.weights import PUBLISH_S, Publishing, Served
from treadle.types import Completion, SamplerCapabilities, SamplerLoad, SamplingParams, StopReason

if TYPE_CHECKING:
    from treadle.models.policy import Policy

ASK_S = 30.0
"""Longest wait for an answer that needs no model: routes, metrics, adapters."""


@dataclass(eq=False, slots=True)
class Session:
    """The life of one rollout on this server."""

    name: str
    turn: asyncio.Task[Any] | None = None
    """The call of `sample` that is under way."""
    released: bool = False
    remote: str = ""
    """Name of the server's own session; empty = it has none."""
    held: tuple[int, ...] = ()
    """Ids whose KV the server's session holds."""
    epoch: object = None
    """Weights that computed them."""


class Remote(Publishing):
    """A `Replica` and a `WeightSink` over HTTP; what differs between servers is in subclasses."""

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        name: str = "",
        version: int = 0,
        stop_ids: Sequence[int] | None = None,
        policy: Policy | None = None,
        exchange: Path | str | None = None,
    ) -> None:
        """
        Args:
            url: of the server, e.g. "http://127.0.0.1:8000".
            key: bearer token; empty = none.
            name: in messages; empty = the URL's.
            version: PolicyVersion of what the server holds, or of the policy when one is given.
            stop_ids: ids that end a turn. None = the policy's, or without one the server's own.
            policy: where `start` and `publish` take weights from; None = the server's own are
                served, and only `adopt` moves it.
            exchange: directory, seen by the server under the same path, through which weights are
                handed over. None = a temporary one on this machine.

        Raises ConfigError: see `Http`; a stop id is not an id.
        """
        name = name or url.split("//")[-1].rstrip("/")
        super().__init__(
            Http(url, key=key, name=name),
            name,
            version=version,
            policy=policy,
            exchange=None if exchange is None else Path(exchange),
        )
        if stop_ids is None and policy is not None:
            stop_ids = [i for i in policy.loaded.stop_ids if i >= 0]
        if stop_ids is not None and any(i < 0 for i in stop_ids):
            raise ConfigError(f"`stop_ids` must be ids, got {list(stop_ids)}")
        self._stop_ids = None if stop_ids is None else tuple(stop_ids)
        self._sessions: dict[str, Session] = {}
        self._context: int | None = None
        self._vocab = None if policy is None else policy.shape.vocab
        self._counter = itertools.count()

    # ------------------------------------------------------------------ what servers differ in

    @property
    @abstractmethod
    def capabilities(self) -> SamplerCapabilities: ...

    @abstractmethod
    async def _attach(self) -> None:
        """Learn what the server is; SamplerError when it cannot be used."""

    @abstractmethod
    async def _generate(
        self, session: Session, served: Served, prompt: tuple[int, ...], params: SamplingParams
    ) -> Drawn: ...

    @abstractmethod
    async def _score(self, ids: tuple[int, ...], served: Served) -> Sequence[float | None]:
        """Logprob of every id at temperature 1; None for the first."""

    @abstractmethod
    async def _load(self) -> SamplerLoad: ...

    @abstractmethod
    async def _close_remote(self, session: Session) -> None:
        """End the server's own session, where there is one."""

    @abstractmethod
    def _check_params(self, params: SamplingParams) -> None:
        """Refuse what this server cannot answer truthfully."""

    # ------------------------------------------------------------------ life

    def start(self) -> Self:
        """Connect, learn what the server can do, and publish the policy where there is one.

        Raises SamplerError: it does not answer, or cannot give token truth; the hint says what to
        start it with. WeightsError: the policy could not be published.
        """
        self._io.start()
        try:
            self._io.wait(self._attach(), PUBLISH_S)
            if self._policy is not None:
                self.publish(self._first_version)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Waiting and later calls raise SamplerError; the server goes on. Idempotent."""
        self._io.close()
        if self._own_exchange and self._exchange is not None:
            shutil.rmtree(self._exchange, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.start)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    # ------------------------------------------------------------------ Replica

    async def open(self, session: str, *, group: str = "") -> None:
        """Start a session; see `Sampler`. `group` is for engines that share by group: servers find
        equal prompts by themselves. Raises SamplerError when the name is taken."""
        await self._io.call(self._open(session))

    async def sample(
        self, session: str, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        """Continue `prompt`; see `Sampler`. At the deadline the turn is ABORTED without tokens.

        Raises:
            ConfigError: a sampling parameter is out of range.
            SamplerError: the session is unknown or in the middle of a turn; the prompt is empty,
                has an id that is no integer or outside of the vocabulary, or leaves no room; the
                server cannot give what such a turn asks for; it refused, broke off, or answered
                with what is not token truth.
        """
        return await self._io.call(self._sample(session, as_ids(prompt), params))

    async def score(
        self, ids: Sequence[int], start: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """Teacher-forced logprobs; see `Sampler`. Servers score at temperature 1 only.

        Raises ConfigError: start or temperature is out of range. SamplerError: a temperature that
        is not 1, an id that is no integer or outside of the vocabulary, or no answer.
        """
        given = as_ids(ids)
        check_ids(given, self._vocab)
        check_score(given, start, temperature)
        if temperature != 1.0:
            raise SamplerError(
                f"{self.name} scores prompts at temperature 1 only, not {temperature}",
                hint="score with the built-in engine",
            )
        return await self._io.call(self._score_from(given, start))

    async def release(self, session: str) -> None:
        """End a session; a turn in flight ends ABORTED. Idempotent, silent on a closed sampler."""
        try:
            await self._io.call(self._release(session))
        except SamplerError:
            if not self._io.closed:
                raise

    async def load(self) -> SamplerLoad:
        """What the server says of itself now. Raises SamplerError when it is not healthy."""
        return await self._io.call(self._load_if_alive())

    # ------------------------------------------------------------------ on the I/O loop: turns

    async def _load_if_alive(self) -> SamplerLoad:
        self._check_alive()
        return await self._load()

    async def _open(self, name: str) -> None:
        self._check_alive()
        if name in self._sessions:
            raise SamplerError(
                f"session `{name}` is already open", hint="names are unique until release"
            )
        self._sessions[name] = Session(name)

    async def _release(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            return
        session.released = True
        if session.turn is not None:
            session.turn.cancel()
        await self._close_remote(session)

    async def _sample(
        self, name: str, prompt: tuple[int, ...], params: SamplingParams
    ) -> Completion:
        self._check_alive()
        check_params(params)
        check_ids(prompt, self._vocab)
        if params.experts:
            raise SamplerError(
                f"{self.name} does not return the choices of experts",
                hint="leave SamplingParams.experts empty",
            )
        self._check_params(params)
        session = self._sessions.get(name)
        if session is None:
            raise SamplerError(f"session `{name}` is not open", hint="call open() first")
        if session.turn is not None:
            raise SamplerError(f"session `{name}` is in the middle of a turn")
        room = self._room(prompt, params)
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        session.turn = task
        limit = asyncio.timeout(params.deadline_s)
        try:
            async with limit:
                return await self._turn(session, prompt, params, room)
        except TimeoutError:
            if not limit.expired():
                raise
        except asyncio.CancelledError:
            if not session.released:
                raise
            task.uncancel()
        finally:
            session.turn = None
        return Completion(
            ids=(), logprobs=(), versions=(), stop_reason=StopReason.ABORTED,
            prompt_tokens=len(prompt),
        )  # fmt: skip

    async def _turn(
        self, session: Session, prompt: tuple[int, ...], params: SamplingParams, room: int
    ) -> Completion:
        await self._flowing.wait()
        self._check_alive()
        served = self._served
        served.turns += 1
        try:
            drawn = await self._generate(session, served, prompt, params)
        finally:
            served.turns -= 1
            self._retire()
        return self._completion(drawn, served, prompt, room)

    def _room(self, prompt: tuple[int, ...], params: SamplingParams) -> int:
        """Tokens that may be drawn: what was asked, or what the context leaves."""
        if self._context is None:
            return params.max_new_tokens
        if len(prompt) >= self._context:
            raise SamplerError(
                f"a prompt of {len(prompt)} tokens leaves no room in the context of "
                f"{self._context} of {self.name}",
                hint="shorten the prompt, or start the server with a longer context",
            )
        return min(params.max_new_tokens, self._context - len(prompt))

    def _completion(
        self, drawn: Drawn, served: Served, prompt: tuple[int, ...], room: int
    ) -> Completion:
        """The answer, or SamplerError when it is not token truth."""
        return completion_of(
            drawn,
            prompt,
            room,
            version=served.version,
            labels=None if served.adapter else self._labels,
            stop_ids=self._stop_ids,
            vocab=self._vocab,
            name=self.name,
        )

    async def _score_from(self, ids: tuple[int, ...], start: int) -> tuple[float, ...]:
        self._check_alive()
        if self._context is not None and len(ids) >= self._context:
            raise SamplerError(
                f"{len(ids)} ids to score and one to draw exceed the context of {self._context}"
            )
        await self._flowing.wait()
        served = self._served
        served.turns += 1
        try:
            found = await self._score(ids, served)
        finally:
            served.turns -= 1
            self._retire()
        return scores_of(found, ids, start, self.name)

    # ------------------------------------------------------------------ small things

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        limit_s: float = ASK_S,
        attempts: int = 1,
        params: Mapping[str, str] | None = None,
        hint: str = "",
    ) -> str:
        """Text of a successful answer."""
        reply = await self._io.request(
            "POST", path, body, limit_s=limit_s, attempts=attempts, params=params
        )
        return reply.ok(hint).text

    @staticmethod
    def _seed(params: SamplingParams) -> int:
        """Within the integers that servers take, whose negative ones may mean "no seed"."""
        return params.seed & (2**63 - 1)

    def _new_id(self) -> str:
        return f"{self._prefix}-{next(self._counter)}"
