"""One state for all replicas: the newest weights, and all running or all standing still.

    publish --> every replica that answers --> took it and says so ----> serves
                                            `-> failed, or was away ----> behind: serves nothing
                                                                            |  after health checks
                 serves again <--- holds what the others hold <--- catch up +

Guarantees:
- a publication reaches every replica, several at a time; it is done when each has taken it or has
  failed, and it fails as a whole (the old version serves on) when none has taken it;
- what serves is in unison: a replica that failed to take a version, was away, or fell back to
  older weights is out of service, its turns are asked again elsewhere, and it is brought to the
  newest version before it serves again; tries go on, less and less often, until the next
  publication settles it;
- catching up proves itself: the replica says the fingerprint that the others said, or it loaded
  the very files that another one serves. Weights that the policy has by then are not taken for
  those it had;
- the same holds for standing still: a replica that does not pause (or resume) with the others is
  out of service until it has.

Takes: a version; pause and resume. Gives: replicas in one state. Waits for: each replica, at most
`publish_limit_s`; for `pause` and `resume` `call_limit_s`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from treadle.errors import SamplerError, TreadleError, WeightsError, said
from treadle.sampler.router.places import Handle, Places
from treadle.sampler.router.terms import RouterLimits
from treadle.threads import in_thread
from treadle.types import SamplerCapabilities

logger = logging.getLogger(__name__)


@runtime_checkable
class TakesWeights(Protocol):
    """A replica that is a `WeightSink` too."""

    def publish(self, version: int) -> None: ...


@runtime_checkable
class SaysWeights(Protocol):
    """A replica that knows what it serves."""

    def fingerprint(self) -> str:
        """Empty = it cannot say."""
        ...


@runtime_checkable
class TakesFiles(Protocol):
    """A replica whose weights lie in a directory that others can load too."""

    @property
    def version(self) -> int: ...

    @property
    def folder(self) -> Path | None: ...

    async def adopt(self, version: int, folder: Path | str) -> None: ...

    async def reload(self) -> None:
        """Load again what it serves, on a server that may have been restarted."""
        ...


class CanPause(Protocol):
    """A replica whose capabilities say so."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def offload(self) -> None: ...


class Motion(StrEnum):
    """What all replicas are to do."""

    RUN = "resume"
    PAUSE = "pause"
    OFFLOAD = "offload"


class Unison:
    """Keeps the replicas of one router in one state."""

    def __init__(self, handles: Sequence[Handle], places: Places, limits: RouterLimits) -> None:
        self._handles = handles
        self._places = places
        self._limits = limits
        self.version: int | None = None
        """The one that was published last; None = none was."""
        self.lapses = 0
        self.readmissions = 0
        self.stops = 0
        """Times that all were told to stand still."""
        self._print = ""
        """Fingerprint of `version`; empty = no replica could say."""
        self._motion: Motion | None = None
        """What was asked for last; None = nothing ever was."""
        self._publishing = asyncio.Lock()
        self._moving = asyncio.Lock()
        self._publications: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ what is served

    @property
    def served(self) -> list[int]:
        """Versions of the replicas that serve; of all of them when none does."""
        serving = [h for h in self._handles if h.healthy] or self._handles
        return [handle.replica.version for handle in serving]

    def fingerprint(self) -> str:
        """What every replica that serves says it serves; empty = one cannot say, or differs."""
        prints = {_says(handle) for handle in self._handles if handle.healthy}
        return prints.pop() if len(prints) == 1 else ""

    # ------------------------------------------------------------------ publishing

    async def publish(self, version: int) -> None:
        """See `WeightSink`. Raises WeightsError when no replica serves the version now."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._publications.add(task)
        try:
            async with self._publishing:
                await self._publish(version)
        finally:
            self._publications.discard(task)

    async def _publish(self, version: int) -> None:
        mute = [h.name for h in self._handles if not isinstance(h.replica, TakesWeights)]
        if mute:
            raise WeightsError(
                f"version {version} was not published: {_names(mute)} cannot take weights",
                hint="publish to its server by its own means, or leave it out of this router",
            )
        if self.version is not None and version < self.version:
            raise WeightsError(
                f"version {version} was to be published, but {self.version} was already: "
                "versions only grow"
            )
        asked = [h for h in self._handles if h.standing.healthy]
        if not asked:
            raise WeightsError(
                f"version {version} was not published: none of {len(self._handles)} replicas "
                "answers"
            )
        outcomes = await asyncio.gather(*(self._take(handle, version) for handle in asked))
        took = {h: o for h, o in zip(asked, outcomes, strict=True) if isinstance(o, str)}
        errors = {h: o for h, o in zip(asked, outcomes, strict=True) if not isinstance(o, str)}
        if not took:
            handle, error = next(iter(errors.items()))
            raise WeightsError(
                f"version {version} was published to none of {len(asked)} replicas, the one before "
                f"still serves; {handle.name}: {_short(error)}",
                hint=error.hint if isinstance(error, TreadleError) else "",
            ) from error
        told = Counter(said_ for said_ in took.values() if said_)
        self.version, self._print = version, told.most_common(1)[0][0] if told else ""
        for handle in self._handles:
            if not handle.standing.healthy:
                self.lost(handle)
            elif handle in took and took[handle] in ("", self._print):
                self._in_unison(handle)
            elif handle in took:
                self.out(handle, f"it took weights {took[handle]} as version {version}")
            else:
                self.out(handle, _short(errors[handle]) if handle in errors else "it was away")

    async def _take(self, handle: Handle, version: int) -> str | Exception:
        """Publish to one replica; what it then says it serves, or what went wrong."""
        replica = handle.replica
        assert isinstance(replica, TakesWeights), "checked before"
        try:
            async with asyncio.timeout(self._limits.publish_limit_s), handle.lock:
                await in_thread(replica.publish, version)
                if handle.behind and self._motion is not None:
                    await _mover(handle, self._motion)()
        except Exception as error:  # whatever it is, the replica is not where the others are
            return error
        if replica.version != version:
            return WeightsError(f"it took version {version} and serves {replica.version}")
        return _says(handle)

    # ------------------------------------------------------------------ standing still

    def able(self, motion: Motion) -> list[str]:
        """Names of the replicas that cannot be told so."""
        return [h.name for h in self._handles if not _can(h.replica.capabilities, motion)]

    async def move(self, motion: Motion) -> None:
        """Tell every replica that answers. Raises SamplerError: one of all cannot, then nothing
        was done; or none did."""
        if unable := self.able(motion):
            raise SamplerError(
                f"{motion.value} is not supported here: {_names(unable)} cannot",
                hint="capabilities say what all replicas can do",
            )
        async with self._moving:
            before, self._motion = self._motion, motion
            self.stops += motion is not Motion.RUN
            asked = [h for h in self._handles if h.standing.healthy]
            done = await asyncio.gather(*(self._tell(handle) for handle in asked))
            failed = {h: e for h, e in zip(asked, done, strict=True) if e is not None}
            if asked and len(failed) == len(asked):
                self._motion = before
                name, error = asked[0].name, failed[asked[0]]
                raise SamplerError(f"no replica did {motion.value}; {name}: {_short(error)}")
            for handle in self._handles:
                if handle in failed:
                    self.out(handle, f"it did not {motion.value}: {_short(failed[handle])}")
                elif not handle.standing.healthy:
                    self.lost(handle)

    async def _tell(self, handle: Handle) -> Exception | None:
        motion = self._motion
        assert motion is not None, "set before anything is told"
        try:
            async with asyncio.timeout(self._limits.call_limit_s):
                await _mover(handle, motion)()
        except Exception as error:  # the caller decides what that means
            return error
        return None

    # ------------------------------------------------------------------ out of service, and back

    def out(self, handle: Handle, why: str) -> None:
        """It serves nothing until it is where the others are."""
        if handle.healthy:
            logger.warning("replica %s is out of service: %s", handle.name, why)
            self.lapses += 1
            handle.behind = True  # before its sessions look for another home
            self._places.lose(handle)
        handle.behind = True
        handle.retry_s = max(handle.retry_s, self._limits.poll_s)
        handle.retry_at_s = asyncio.get_running_loop().time() + handle.retry_s

    def lost(self, handle: Handle) -> None:
        """It does not answer: who knows what it will hold when it does again."""
        if self.version is not None or self._motion is not None:
            handle.behind = True
            handle.retry_s = handle.retry_at_s = 0.0

    def look(self, handle: Handle) -> None:
        """After a good health check: is it where it should be, and is it time for a try?"""
        if not handle.behind:
            if self.version is not None and handle.replica.version < self.version:
                self.out(handle, f"it serves version {handle.replica.version} again")
                handle.retry_at_s = 0.0
            else:
                return
        now = asyncio.get_running_loop().time()
        if handle.following is None and now >= handle.retry_at_s:
            handle.following = asyncio.ensure_future(self._follow(handle))

    async def _follow(self, handle: Handle) -> None:
        """Try to bring a replica to where the others are; it serves if that worked."""
        wanted = version, motion, _ = self.version, self._motion, handle.epoch
        try:
            async with asyncio.timeout(self._limits.publish_limit_s):
                if version is not None:
                    async with handle.lock:
                        await self._bring(handle, version)
                if motion is not None:
                    await _mover(handle, motion)()
        except Exception as error:  # whatever it is, it is not where it should be
            handle.retry_s = min(
                self._limits.catch_up_s, max(2 * handle.retry_s, self._limits.poll_s)
            )
            handle.retry_at_s = asyncio.get_running_loop().time() + handle.retry_s
            logger.warning(
                "replica %s stays out of service: %s; next try in %g s",
                *(handle.name, _short(error), handle.retry_s),
            )
        else:
            if wanted == (self.version, self._motion, handle.epoch):  # all the time
                self._in_unison(handle)
        finally:
            handle.following = None

    async def _bring(self, handle: Handle, version: int) -> None:
        replica = handle.replica
        if isinstance(replica, TakesFiles):
            if replica.version == version and replica.folder is not None:
                await replica.reload()
                return
            if (folder := self._files(version)) is not None:
                await replica.adopt(version, folder)
                return
        elif self._proves(handle, version):
            return
        if not isinstance(replica, TakesWeights):
            raise WeightsError(f"it cannot take version {version}")
        await in_thread(replica.publish, version)
        if not self._proves(handle, version):
            raise WeightsError(
                f"nothing proves that it holds version {version}: it says `{_says(handle)}`, the "
                f"others `{self._print}`",
                hint="the policy has moved on; the next publication settles it",
            )

    def _files(self, version: int) -> Path | None:
        """Where a version lies, by a replica that serves it."""
        for handle in self._handles:
            replica = handle.replica
            if handle.healthy and isinstance(replica, TakesFiles) and replica.version == version:
                return replica.folder
        return None

    def _proves(self, handle: Handle, version: int) -> bool:
        says = _says(handle)
        return handle.replica.version == version and says != "" and says == self._print

    def _in_unison(self, handle: Handle) -> None:
        was, handle.behind = handle.behind, False
        handle.retry_s = handle.retry_at_s = 0.0
        if was:
            logger.warning("replica %s serves again", handle.name)
            self.readmissions += 1
            self._places.admit()

    async def close(self) -> None:
        """End every try and every publication in progress; what they called may go on."""
        tasks = {h.following for h in self._handles if h.following is not None}
        for task in tasks | self._publications:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _says(handle: Handle) -> str:
    replica = handle.replica
    return replica.fingerprint() if isinstance(replica, SaysWeights) else ""


def _can(capabilities: SamplerCapabilities, motion: Motion) -> bool:
    return capabilities.offload if motion is Motion.OFFLOAD else capabilities.pause


def _mover(handle: Handle, motion: Motion) -> Callable[[], Awaitable[None]]:
    return getattr(handle.replica, motion.value)


def _names(names: Sequence[str]) -> str:
    return "replica " + ", ".join(names)


def _short(error: BaseException) -> str:
    if isinstance(error, TreadleError):
        return error.message
    return f"{type(error).__name__}: {said(error)}".rstrip(": ")
