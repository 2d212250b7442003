"""HTTP to one server, from any thread and any event loop.

    any event loop / thread          I/O thread, one loop, one connection pool
    call(coroutine), wait(...) --->  request(method, path) ---> the server

Guarantees:
- every request ends: with a Reply, or with SamplerError naming the server, the path and the cause,
  at the latest after `limit_s`; retries happen inside of that limit, only where nothing was
  delivered, and at most `attempts` times;
- cancelling a caller of `call` closes its connection, which is how a server learns of it;
- after `close` no call waits any more, and later ones raise at once;
- the key is sent to this server alone (no redirects, no proxies) and is in no message.

Takes: a base URL and a key. Gives: Replies. Waits for: the server.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from treadle.errors import ConfigError, SamplerError

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

CONNECT_S = 10.0
"""Longest wait for a connection."""
KEEP_ALIVE_S = 2.0
"""An idle connection is not used again after this; servers close theirs after about 5 s."""
BACKOFF_S = 0.1
"""Before the first retry; doubled for each further one, and at most MAX_BACKOFF_S."""
MAX_BACKOFF_S = 5.0
BUSY = (429, 502, 503, 504)
"""Answers that ask for another try."""
QUOTE = 400
"""Characters of a server's answer that a message quotes."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered."""

    status: int
    text: str
    where: str
    """Server, method and path, for messages."""

    def ok(self, hint: str = "") -> Reply:
        """Self, or SamplerError when the status is no success."""
        if self.status < 400:
            return self
        if self.status in (401, 403) and not hint:
            hint = "the server wants a key: pass key="
        raise SamplerError(f"{self.where} answered {self.status}: {self.quote()}", hint=hint)

    def json(self, hint: str = "") -> dict[str, Any]:
        """The object in a successful answer; SamplerError when it is anything else."""
        self.ok(hint)
        try:
            value = json.loads(self.text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise SamplerError(
                f"{self.where} answered with no JSON object: {self.quote()}",
                hint="is this the right server?",
            )
        return value

    def quote(self) -> str:
        """Beginning of the text on one line: it is data of another program, not ours."""
        line = " ".join(self.text.split())
        return repr(line[:QUOTE]) + (f" and {len(line) - QUOTE} more" if len(line) > QUOTE else "")


class Http:
    """A connection pool on a thread of its own."""

    def __init__(self, url: str, *, key: str = "", name: str = "server") -> None:
        """
        Args:
            url: e.g. "http://127.0.0.1:8000"; a path in it is a prefix of all paths.
            key: sent as a bearer token; empty = none.
            name: in messages, and of the thread.

        Raises ConfigError: the URL is not http(s), or holds a password; aiohttp is missing.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"`url` must begin with http:// or https://, got {url!r}")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ConfigError(
                f"`url` of {name} must hold neither a name, a password nor a query",
                hint="pass the secret as key=",
            )
        try:
            import aiohttp
        except ImportError:
            raise ConfigError(
                "remote engines need aiohttp", hint="pip install 'treadle[remote]'"
            ) from None
        self._aiohttp = aiohttp
        self.url = url.rstrip("/")
        self.name = name
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: aiohttp.ClientSession | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Http({self.url!r}, name={self.name!r})"

    # ------------------------------------------------------------------ life

    def start(self) -> Http:
        if self._thread is not None:
            raise SamplerError(f"{self.name} was started before", hint="make a new one")
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name=f"http {self.name}", daemon=True
        )
        self._thread.start()
        started.result(CONNECT_S)
        return self

    def close(self, timeout_s: float = 10.0) -> None:
        """End every call with SamplerError and the thread with it. Idempotent."""
        if self._closed or self._thread is None or self._loop is None:
            self._closed = True
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    def _run(self, started: Future[None]) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            client = self._client = loop.run_until_complete(self._open())
            self._loop = loop
            started.set_result(None)
            loop.run_forever()
            while tasks := asyncio.all_tasks(loop):  # what is cancelled may start its clean-up
                for task in tasks:
                    task.cancel()
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            loop.run_until_complete(client.close())
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
                return
            raise
        finally:
            loop.close()

    async def _open(self) -> aiohttp.ClientSession:
        connector = self._aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        timeout = self._aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        return self._aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=self._headers, trust_env=False
        )

    @property
    def closed(self) -> bool:
        return self._closed

    # ------------------------------------------------------------------ from outside

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the I/O loop; it is cancelled with the caller."""
        future = self._submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task is not None and task.cancelling()):
                raise self.gone() from None
            raise

    def wait(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """The same from plain code. Blocks its thread, at most `limit_s`."""
        if threading.current_thread() is self._thread:
            work.close()
            raise SamplerError(f"{self.name} was asked to wait for itself")
        future = self._submit(work)
        try:
            return future.result(limit_s)
        except TimeoutError:
            future.cancel()
            raise SamplerError(f"{self.name} did not end within {limit_s:g} s") from None
        except asyncio.CancelledError:
            raise self.gone() from None

    def gone(self) -> SamplerError:
        if self._thread is None:
            return SamplerError(f"{self.name} is not running", hint="call start(), or use `with`")
        return SamplerError(f"{self.name} was closed")

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed or self._loop is None:
            work.close()
            raise self.gone()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    # ------------------------------------------------------------------ on the I/O loop

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        limit_s: float,
        attempts: int = 1,
        params: Mapping[str, str] | None = None,
    ) -> Reply:
        """One answer, whatever its status; see `Reply.ok`.

        Raises SamplerError: no connection, one that broke, or no answer within `limit_s`.
        """
        where = f"{self.name} at {self.url}: {method} {path}"
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                return await self._tries(method, path, body, where, attempts, params)
        except TimeoutError:
            if not limit.expired():
                raise
            raise SamplerError(
                f"{where} was not answered within {limit_s:g} s",
                hint="is the server overloaded or stuck? look at its log",
            ) from None

    async def _tries(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        where: str,
        attempts: int,
        params: Mapping[str, str] | None,
    ) -> Reply:
        assert self._client is not None
        for attempt in range(attempts):
            last = attempt + 1 == attempts
            pause = min(MAX_BACKOFF_S, BACKOFF_S * 2**attempt)
            try:
                async with self._client.request(
                    method, self.url + path, json=body, params=params, allow_redirects=False
                ) as response:
                    text = await response.text(errors="replace")
                    if response.status not in BUSY or last:
                        return Reply(response.status, text, where)
                    pause = _retry_after(response.headers.get("Retry-After", ""), pause)
            except (self._aiohttp.ClientError, OSError) as error:
                if last:
                    raise SamplerError(
                        f"{where} failed: {type(error).__name__}: {error}",
                        hint="is the server running? look at its log",
                    ) from error
            await asyncio.sleep(pause)
        raise AssertionError("unreachable")


def _retry_after(header: str, default_s: float) -> float:
    """What the server asks for, where it is a number of seconds and not too long."""
    try:
        wanted = float(header)
    except ValueError:
        return default_s
    return min(MAX_BACKOFF_S, max(default_s, wanted)) if wanted == wanted else default_s
