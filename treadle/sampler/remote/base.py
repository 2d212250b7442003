"""What every remote engine shares: sessions, deadlines, versions, and moving to newer weights.

    sample --> gate --> the engine's own request --> Drawn --> checks --> Completion
                ^ closed while full weights are replaced

Guarantees:
- a turn ends with a Completion whose ids and logprobs the server gave, each token with the version
  that drew it; with ABORTED at its deadline or when its session is released; or with SamplerError;
- a caller that is cancelled closes its connection, and the server aborts the turn;
- an adapter is published under a name of its own version: turns in flight end on the one they
  began with, new turns take the new one, and an adapter is unloaded when its last turn has ended,
  so that no number of publications fills the server;
- full weights are replaced while the server is paused and keeps its turns; one that fails is
  undone, and a server of which nobody knows what it holds serves no more;
- the counts of sessions and turns are ours alone: another client of the same server is not seen.

Takes: prompt ids; directories with weights. Gives: Completions. Waits for: the server, bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from treadle.errors import ConfigError, SamplerError, TreadleError, WeightsError
from treadle.sampler.remote.http import Http
from treadle.types import Completion, SamplerCapabilities, SamplerLoad, SamplingParams, StopReason

if TYPE_CHECKING:
    from treadle.models.policy import Policy

logger = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_config.json"
"""What tells the directory of an adapter from that of a model."""
ASK_S = 30.0
"""Longest wait for an answer that needs no model: routes, metrics, adapters."""
PUBLISH_S = 600.0
"""Longest publication, writing not included."""
GRACE_S = 30.0
"""A request is given up this much after the deadline of its turn."""
MISSING_NATS = -9999.0
"""What servers send for a logprob that they do not have."""
LOGPROB_SLACK = 1e-3
MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading an answer of another form than expected raises."""


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


@dataclass(eq=False, slots=True)
class Served:
    """Weights that turns are drawn from."""

    version: int
    adapter: str = ""
    """The server's name of the adapter; empty = the model's own weights."""
    folder: Path | None = None
    """Where they were loaded from; None = what the server was started with."""
    turns: int = 0
    """In flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """An answer in the server's own terms."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str
    stop: int | str | None
    """The id or string that ended the turn, where the server says so."""
    prompt_tokens: int
    cached_tokens: int
    spans: tuple[tuple[str, int, int], ...] | None
    """(label of the weights, first token, end); None = the server does not say."""


class Remote(ABC):
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
        self.name = name or url.split("//")[-1].rstrip("/")
        self._io = Http(url, key=key, name=self.name)
        if stop_ids is None and policy is not None:
            stop_ids = [i for i in policy.loaded.stop_ids if i >= 0]
        if stop_ids is not None and any(i < 0 for i in stop_ids):
            raise ConfigError(f"`stop_ids` must be ids, got {list(stop_ids)}")
        self._stop_ids = None if stop_ids is None else tuple(stop_ids)
        self._policy = policy
        self._exchange = None if exchange is None else Path(exchange)
        self._own_exchange = exchange is None
        self._prefix = f"treadle-{secrets.token_hex(4)}"
        self._first_version = version
        # All below is touched on the I/O loop alone, or before it runs.
        self._served = Served(version)
        self._published = False
        self._old: list[Served] = []
        self._sessions: dict[str, Session] = {}
        self._labels: dict[str, int] = {}
        self._tells_versions = False
        self._context: int | None = None
        self._dead: SamplerError | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._publishing = asyncio.Lock()
        self._chores: set[asyncio.Task[None]] = set()
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
    async def _load_adapter(self, name: str, folder: Path) -> None: ...

    @abstractmethod
    async def _unload_adapter(self, name: str) -> None: ...

    @abstractmethod
    async def _pause(self) -> None:
        """Stop drawing, keep every turn."""

    @abstractmethod
    async def _resume(self) -> None: ...

    @abstractmethod
    async def _load_weights(self, version: int, folder: Path | None) -> None:
        """Replace the model's own weights and name them `str(version)`; the server is paused.
        folder None = those that it was started with."""

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

    @property
    def version(self) -> int:
        return self._served.version

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
            SamplerError: the session is unknown or in the middle of a turn; the prompt is empty or
                leaves no room; the server cannot give the logprobs of such a turn; it refused,
                broke off, or answered with what is not token truth.
        """
        return await self._io.call(self._sample(session, tuple(int(i) for i in prompt), params))

    async def score(
        self, ids: Sequence[int], start: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        """Teacher-forced logprobs; see `Sampler`. Servers score at temperature 1 only.

        Raises ConfigError: start is out of range. SamplerError: another temperature, or no answer.
        """
        if temperature != 1.0:
            raise SamplerError(
                f"{self.name} scores prompts at temperature 1 only, not {temperature}",
                hint="score with the built-in engine",
            )
        given = tuple(int(i) for i in ids)
        if not 1 <= start <= len(given):
            raise ConfigError(f"`start` must be in 1..{len(given)}, got {start}")
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

    # ------------------------------------------------------------------ WeightSink

    def publish(self, version: int) -> None:
        """Write the policy's weights and serve them as `version`. Blocks until they are served.

        Raises WeightsError: there is no policy, the version is not newer, or the server could not
        load what was written; the old weights keep serving.
        """
        if self._policy is None:
            raise WeightsError(
                f"{self.name} has no policy to take weights from",
                hint="pass policy=, or hand a directory to adopt()",
            )
        self._check_version(version)
        folder = self._write(self._policy, version)
        try:
            self._io.wait(self._adopt(version, folder), PUBLISH_S + GRACE_S)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    async def adopt(self, version: int, folder: Path | str) -> None:
        """Serve what a directory holds, a PEFT adapter or a whole model, as `version`.

        This machine and the server's see it under one path. Raises WeightsError as `publish` does.
        """
        await self._io.call(self._adopt(version, Path(folder)))

    def _check_version(self, version: int) -> None:
        if version < self.version or (version == self.version and self._published):
            raise WeightsError(
                f"version {version} was to be published, {self.name} serves {self.version}: "
                "versions only grow"
            )

    def _write(self, policy: Policy, version: int) -> Path:
        """The policy's weights as a directory that appears whole."""
        from treadle.models.lora import save_adapter, save_merged

        if self._exchange is None:
            self._exchange = Path(tempfile.mkdtemp(prefix="treadle-weights-"))
        self._exchange.mkdir(parents=True, exist_ok=True)
        folder = self._exchange / f"{self._prefix}-v{version}"
        partial = Path(tempfile.mkdtemp(prefix=".writing-", dir=self._exchange))
        try:
            (save_adapter if policy.lora is not None else save_merged)(policy, partial)
            partial.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        except OSError as error:
            raise WeightsError(f"{folder}: cannot be written: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return folder

    # ------------------------------------------------------------------ on the I/O loop: turns

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise SamplerError(self._dead.message, hint=self._dead.hint)

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
        if not prompt:
            raise SamplerError("the prompt is empty")
        if min(prompt) < 0:
            raise SamplerError(f"{min(prompt)} in the prompt is not an id")
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
        n = len(drawn.ids)
        if len(drawn.logprobs) != n:
            raise SamplerError(
                f"{self.name} returned {n} ids but {len(drawn.logprobs)} logprobs",
                hint="one per sampled token is needed, the stop id included",
            )
        if n > room:
            raise SamplerError(f"{self.name} returned {n} tokens, {room} were allowed")
        for i, logprob in enumerate(drawn.logprobs):
            if not math.isfinite(logprob) or not MISSING_NATS < logprob <= LOGPROB_SLACK:
                raise SamplerError(
                    f"{self.name}: token {i} of {n} has logprob {logprob}",
                    hint="a token without a behaviour logprob cannot be trained on",
                )
        if drawn.prompt_tokens != len(prompt):
            raise SamplerError(
                f"{self.name} continued {drawn.prompt_tokens} tokens, the prompt has {len(prompt)}",
                hint="the server changed the prompt: tokens drawn from it are of another context",
            )
        reason = self._reason(drawn)
        if served.adapter or drawn.spans is None:
            versions = (served.version,) * n
        else:
            versions = versions_of(drawn.spans, n, self._labels, self.name)
        return Completion(
            ids=drawn.ids,
            logprobs=tuple(min(0.0, x) for x in drawn.logprobs),
            versions=versions,
            stop_reason=reason,
            prompt_tokens=len(prompt),
            cached_tokens=drawn.cached_tokens,
        )

    def _reason(self, drawn: Drawn) -> StopReason:
        if drawn.finish == "length":
            return StopReason.LENGTH
        if drawn.finish == "abort":
            return StopReason.ABORTED
        if drawn.finish != "stop":
            raise SamplerError(f"{self.name} ended a turn for an unknown reason {drawn.finish!r}")
        if isinstance(drawn.stop, str):
            return StopReason.STOP_STRING
        ended = drawn.ids[-1] if drawn.ids else None
        wanted = self._stop_ids if drawn.stop is None else (drawn.stop,)
        if ended is None or (wanted and ended not in wanted):
            raise SamplerError(
                f"{self.name} stopped at {drawn.stop} but the last of {len(drawn.ids)} ids is "
                f"{ended}",
                hint="the server must return the stop id: without it the end is never learnt",
            )
        return StopReason.EOS

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
        if len(found) != len(ids):
            raise SamplerError(f"{self.name} scored {len(found)} of {len(ids)} ids")
        scores: list[float] = []
        for i, value in enumerate(found[start:], start):
            if value is None or not math.isfinite(value) or value <= MISSING_NATS:
                raise SamplerError(f"{self.name} gave no logprob for id {i} of {len(ids)}")
            scores.append(min(0.0, value))
        return tuple(scores)

    # ------------------------------------------------------------------ on the I/O loop: weights

    async def _adopt(self, version: int, folder: Path) -> None:
        limit = asyncio.timeout(PUBLISH_S)
        try:
            async with limit, self._publishing:
                self._check_alive()
                self._check_version(version)
                if not folder.is_dir():
                    raise WeightsError(
                        f"{folder} is no directory on this machine",
                        hint="this machine and the server's must see it under one path",
                    )
                if (folder / ADAPTER_FILE).exists():
                    await self._adopt_adapter(version, folder)
                else:
                    await self._adopt_weights(version, folder)
                self._published = True
        except TimeoutError:
            if not limit.expired():
                raise
            raise WeightsError(
                f"version {version} was not published within {PUBLISH_S:g} s",
                hint=f"look at the log of {self.name}",
            ) from None

    async def _adopt_adapter(self, version: int, folder: Path) -> None:
        name = f"{self._prefix}-v{version}"
        try:
            await self._load_adapter(name, folder)
        except SamplerError as error:
            raise WeightsError(
                f"version {version} was not published, {self.version} still serves: "
                f"{error.message}",
                hint=error.hint,
            ) from error
        self._old.append(self._served)
        self._served = Served(version, name, folder)
        self._retire()

    async def _adopt_weights(self, version: int, folder: Path) -> None:
        before = self._served
        if before.adapter:
            raise WeightsError(
                f"{self.name} serves an adapter: its base cannot be replaced under it"
            )
        self._flowing.clear()
        try:
            if not self._tells_versions:
                await self._drain()
            await self._paused_or_not(version)
            await self._swap(before, version, folder)
        finally:
            self._flowing.set()
        self._retire()

    async def _paused_or_not(self, version: int) -> None:
        try:
            await self._pause()
        except SamplerError as error:
            with contextlib.suppress(SamplerError):
                await self._resume()
            raise WeightsError(
                f"version {version} was not published, {self.version} still serves: "
                f"{error.message}",
                hint=error.hint,
            ) from error

    async def _swap(self, before: Served, version: int, folder: Path) -> None:
        """On a paused server: the new weights, or the ones before, or nothing ever again."""
        settled = False
        try:
            failure: SamplerError | None = None
            try:
                await self._load_weights(version, folder)
            except SamplerError as error:
                failure = error
                await self._load_weights(before.version, before.folder)
            else:
                # Turns in flight go on under the new weights; the server tells which drew what.
                self._labels[str(version)] = version
                self._served = Served(version, "", folder)
                self._old.append(before)
            await self._resume()
            settled = True
        except SamplerError as error:
            raise WeightsError(
                f"version {version} was not published and {self.name} serves no more: "
                f"{error.message}",
                hint=error.hint or "restart the server",
            ) from error
        finally:
            if not settled:
                self._dead = SamplerError(
                    f"{self.name} was left between versions {before.version} and {version}: "
                    "nobody knows what it holds",
                    hint="restart the server",
                )
        if failure is not None:
            raise WeightsError(
                f"version {version} was not published, {before.version} serves again: "
                f"{failure.message}",
                hint=failure.hint,
            ) from failure

    async def _drain(self) -> None:
        """Wait until no turn runs: a server that does not say which weights drew a token must not
        change them under it."""
        while self._served.turns + sum(old.turns for old in self._old) > 0:
            await asyncio.sleep(0.02)

    def _retire(self) -> None:
        """Let go of weights that no turn draws from."""
        for old in [s for s in self._old if s.turns <= 0]:
            self._old.remove(old)
            self._start(self._forget(old))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Something to do that nobody waits for; `work` handles its own errors."""
        chore = asyncio.ensure_future(work)
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    async def _forget(self, old: Served) -> None:
        try:
            if old.adapter:
                await self._unload_adapter(old.adapter)
        except TreadleError as error:
            logger.warning("%s: adapter %s was not unloaded: %s", self.name, old.adapter, error)
        if old.folder is not None and old.folder.name.startswith(self._prefix):
            shutil.rmtree(old.folder, ignore_errors=True)

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

    def _new_id(self) -> str:
        return f"{self._prefix}-{next(self._counter)}"


def check_params(params: SamplingParams) -> None:
    """Raises ConfigError: a sampling parameter is out of range."""
    checks = {
        "max_new_tokens": (params.max_new_tokens, params.max_new_tokens >= 1, ">= 1"),
        "temperature": (
            params.temperature,
            math.isfinite(params.temperature) and params.temperature >= 0,
            "finite and >= 0",
        ),
        "top_p": (params.top_p, 0 < params.top_p <= 1, "in (0, 1]"),
        "top_k": (params.top_k, params.top_k >= 0, ">= 0"),
        "deadline_s": (params.deadline_s, params.deadline_s > 0, "> 0"),
    }
    for name, (value, good, wanted) in checks.items():
        if not good:
            raise ConfigError(f"`{name}` must be {wanted}, got {value}")


def versions_of(
    spans: Sequence[tuple[str, int, int]], count: int, labels: Mapping[str, int], name: str
) -> tuple[int, ...]:
    """The version of each token from the server's spans, which must cover them all in order."""
    versions: list[int] = []
    for label, start, end in spans:
        if label not in labels:
            raise SamplerError(
                f"{name} drew tokens from weights named {label!r}; known are {sorted(labels)}",
                hint="does another program publish to this server?",
            )
        if start != len(versions) or end < start:
            raise SamplerError(f"{name} gave version spans with a gap at token {len(versions)}")
        versions += [labels[label]] * (end - start)
    if len(versions) != count:
        raise SamplerError(f"{name} gave versions for {len(versions)} of {count} tokens")
    return tuple(versions)
