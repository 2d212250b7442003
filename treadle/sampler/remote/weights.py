"""What a server serves, and moving it to newer weights while turns run.

    publish   the policy's weights as a directory   --> adopt
    adopt     an adapter: loaded beside the old one, which goes when its last turn has ended
              full weights: replaced while the server is paused and keeps its turns
    reload    the same directory once more, for a server that was restarted

Guarantees:
- an adapter is published under a name of its own version: turns in flight end on the one they
  began with, new turns take the new one, and an adapter is unloaded when its last turn has ended,
  so that no number of publications fills the server;
- full weights that cannot be loaded are undone, and a server of which nobody knows what it holds
  serves no more;
- directories appear whole, and are removed when nothing is served from them.

Takes: a policy, or directories. Gives: `Served`, which turns draw from. Waits for: the server, at
most `PUBLISH_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import SamplerError, TreadleError, WeightsError
from treadle.sampler.remote.http import Http

if TYPE_CHECKING:
    from treadle.models.policy import Policy

logger = logging.getLogger(__name__)

ADAPTER_FILE = "adapter_config.json"
"""What tells the directory of an adapter from that of a model."""
PUBLISH_S = 600.0
"""Longest publication, writing not included."""
GRACE_S = 30.0
"""A request is given up this much after the deadline of its turn."""


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


class Publishing(ABC):
    """The weights of one server; a `WeightSink`. How a server takes them is in subclasses.

    What begins with `_` runs on the I/O loop alone, or before it runs.
    """

    def __init__(
        self, io: Http, name: str, *, version: int, policy: Policy | None, exchange: Path | None
    ) -> None:
        self.name = name
        self._io = io
        self._policy = policy
        self._exchange = exchange
        self._own_exchange = exchange is None
        self._prefix = f"treadle-{secrets.token_hex(4)}"
        self._first_version = version
        self._served = Served(version)
        self._published = False
        self._old: list[Served] = []
        """What turns in flight still draw from."""
        self._labels: dict[str, int] = {}
        """The server's names of full weights -> our versions."""
        self._tells_versions = False
        """It says which weights drew which token."""
        self._dead: SamplerError | None = None
        self._flowing = asyncio.Event()
        """Cleared while full weights are replaced."""
        self._flowing.set()
        self._publishing = asyncio.Lock()
        self._chores: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ what servers differ in

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

    # ------------------------------------------------------------------ WeightSink

    @property
    def version(self) -> int:
        return self._served.version

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

    @property
    def folder(self) -> Path | None:
        """Where the weights lie that it serves; None = the server was started with them."""
        return self._served.folder

    async def reload(self) -> None:
        """Load what it serves once more: for a server that may have been restarted meanwhile.

        Raises WeightsError: the server does not take it. Full weights that a server took in part
        serve no more.
        """
        await self._io.call(self._reload())

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

    # ------------------------------------------------------------------ on the I/O loop

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise SamplerError(self._dead.message, hint=self._dead.hint)

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

    async def _reload(self) -> None:
        async with self._publishing:
            self._check_alive()
            served = self._served
            self._flowing.clear()
            try:
                if served.adapter and served.folder is not None:
                    with contextlib.suppress(SamplerError):  # there is none after a restart
                        await self._unload_adapter(served.adapter)
                    await self._loaded(served.version, served.adapter, served.folder)
                else:
                    await self._paused_or_not(served.version)
                    await self._swap(served, served.version, served.folder)
            finally:
                self._flowing.set()

    async def _adopt_adapter(self, version: int, folder: Path) -> None:
        name = f"{self._prefix}-v{version}"
        await self._loaded(version, name, folder)
        self._old.append(self._served)
        self._served = Served(version, name, folder)
        self._retire()

    async def _loaded(self, version: int, name: str, folder: Path) -> None:
        try:
            await self._load_adapter(name, folder)
        except SamplerError as error:
            raise WeightsError(
                f"version {version} was not published, {self.version} still serves: "
                f"{error.message}",
                hint=error.hint,
            ) from error

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

    async def _swap(self, before: Served, version: int, folder: Path | None) -> None:
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
                if version != before.version:
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
