"""The HTTP server in front of sessions: agents call it as if it were their provider.

    POST /s/KEY/v1/chat/completions | responses | messages | messages/count_tokens | completions
    GET  /s/KEY/v1/models           GET /health

The session is named by the address, or by its key as the API key (`Authorization: Bearer KEY`,
`x-api-key: KEY`) where the path has none. `v1` may be missing or doubled: some clients add it.

Guarantees:
- a call that names no session is refused with 401 (404 where its address names one that never was,
  410 once it is over) and told what to do; a sampler that cannot answer now is a 503 that says when
  to come back; every error has the shape of the dialect it was asked in; no request body gives a
  500;
- what is no HTTP, or too much of it, is refused in a shape that every dialect's clients read;
- a client that leaves cancels its turn in the sampler (one of HTTP/1.0 once its answer is written);
  one that only sends no more gets its answers; one that does not read, or does not finish its body,
  is cut off after a limit; bodies are bounded, and asked for where a client waits for that;
- an answer counts as delivered once its last byte has left this process.

Listens on loopback and, if asked, on a unix socket that only this user may open. The sampler
gives whole turns, so a stream is the whole turn in events; while it waits, pings keep it open.

Takes: HTTP. Gives: the sessions' answers. Waits for: the sampler (a turn's deadline), a client's
body (`READ_LIMIT_S`), a client's reading (`send_limit_s`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from types import TracebackType
from typing import Any, Protocol

from treadle.errors import ConfigError
from treadle.gateway import chat_completions, completions, messages, responses, wire
from treadle.gateway.refusals import Overflow
from treadle.gateway.sessions import Flight, Session, Sessions
from treadle.gateway.wire import Answer, Ask, RequestError

try:
    from aiohttp import HttpVersion11, web

    from treadle.gateway.connections import CONTINUE, Connection, Server
except ImportError as error:
    raise ConfigError(
        "the gateway needs an HTTP server that is not installed",
        hint="pip install 'treadle[gateway]'",
    ) from error

log = logging.getLogger(__name__)

READ_LIMIT_S = 60.0
"""For a client to send its body."""
PING_S = 10.0
"""A stream is opened, and kept open, in these steps while the turn is sampled."""
IDLE_LIMIT_S = 75.0
"""For a connection without a request."""
MAX_UNIX_PATH = 100
"""Bytes that the address of a unix socket can hold, a little below the smallest limit."""


class Dialect(Protocol):
    """A module that speaks one API."""

    @property
    def PATH(self) -> str: ...
    @property
    def PING(self) -> bytes: ...
    @property
    def ask(self) -> Callable[[Mapping[str, Any]], Ask]: ...
    @property
    def answer(self) -> Callable[[Ask, Answer], dict[str, Any]]: ...
    @property
    def events(self) -> Callable[[Ask, Answer], Iterator[bytes]]: ...
    @property
    def error(self) -> Callable[[RequestError], dict[str, Any]]: ...
    @property
    def error_event(self) -> Callable[[RequestError], bytes]: ...
    @property
    def context_message(self) -> Callable[[int, int], str]: ...


DIALECTS: dict[str, Dialect] = {
    chat_completions.PATH: chat_completions,
    responses.PATH: responses,
    messages.PATH: messages,
    completions.PATH: completions,
}


class Gateway:
    """One server and its sessions, on the event loop that started it.

    Args:
        port: 0 = any that is free; `url` has it then.
        unix_path: also listen there.
        ttl_s: seconds without a request after which a session expires.
        send_limit_s: for a client to take an answer.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        unix_path: str | os.PathLike[str] | None = None,
        ttl_s: float = 3600.0,
        max_body_bytes: int = 32 << 20,
        send_limit_s: float = 30.0,
    ) -> None:
        self.sessions = Sessions(ttl_s=ttl_s)
        self.unix_path = None if unix_path is None else os.fspath(unix_path)
        if self.unix_path is not None and len(os.fsencode(self.unix_path)) > MAX_UNIX_PATH:
            raise ConfigError(
                f"the unix socket `{self.unix_path}` has a name of "
                f"{len(os.fsencode(self.unix_path))} bytes, {MAX_UNIX_PATH} are possible"
            )
        self._host, self._port = host, port
        self._max_body = max_body_bytes
        self._send_limit_s = send_limit_s
        self._runner: web.ServerRunner | None = None
        self._sweeper: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ life

    async def start(self) -> Gateway:
        """Raises ConfigError where the address cannot be bound."""
        server = Server(
            self._handle,
            handler_cancellation=True,
            keepalive_timeout=IDLE_LIMIT_S,
            access_log=None,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        try:
            await self._runner.setup()
            site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
            await site.start()
            if self.unix_path is not None:
                await web.UnixSite(self._runner, self.unix_path, backlog=1024).start()
                os.chmod(self.unix_path, 0o600)
        except OSError as error:
            await self.close()
            raise ConfigError(
                f"the gateway cannot listen on {self._host}:{self._port}"
                + (f" and {self.unix_path}" if self.unix_path else "")
                + f": {error}"
            ) from error
        except BaseException:
            await self.close()
            raise
        self._port = self._runner.addresses[0][1]
        self._sweeper = asyncio.ensure_future(self._sweep())
        return self

    async def close(self) -> None:
        """End every session and every connection. Idempotent; bounded."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait({self._sweeper})
            self._sweeper = None
        await self.sessions.close_all()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            if self.unix_path is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.unix_path)

    async def __aenter__(self) -> Gateway:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def url(self) -> str:
        """http://HOST:PORT"""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    def base_url(self, session: Session) -> str:
        """What an agent is pointed at; its API key may then be anything."""
        return f"{self.url}/s/{session.key}/v1"

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(self.sessions.ttl_s / 4, 30.0))
            await self.sessions.sweep()

    # ------------------------------------------------------------------ one request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        key, tail = _address(request)
        dialect = DIALECTS.get(tail) or _dialect_of(request, tail)
        try:
            return await self._route(request, dialect, key, tail)
        except RequestError as refused:
            error = refused
        except (ConnectionError, _Gone):
            raise ConnectionResetError from None
        except Exception:
            log.exception("a request to %s failed", tail)
            error = RequestError(
                "the gateway failed; its log has the cause", status=500, code="internal_error"
            )
        if isinstance(error, Overflow):
            error.message = dialect.context_message(error.prompt, error.limit)
        headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s else {}
        return await self._send(request, error.status, dialect.error(error), headers)

    async def _route(
        self, request: web.BaseRequest, dialect: Dialect, key: str, tail: str
    ) -> web.StreamResponse:
        if tail in ("", "health"):
            return await self._send(request, 200, self._health(), {})
        session = self.sessions.find(key, addressed=request.path.startswith("/s/"))
        try:
            return await self._serve(request, dialect, session, tail)
        except (ConnectionError, _Gone):
            raise
        except Exception:
            session.counts["refused"] += 1
            raise

    async def _serve(
        self, request: web.BaseRequest, dialect: Dialect, session: Session, tail: str
    ) -> web.StreamResponse:
        """Raises RequestError; `_route` counts what is raised."""
        if tail == "models" or tail.startswith("models/"):
            return await self._send(request, 200, _models(session, tail), {})
        if tail not in DIALECTS and tail != messages.COUNT_PATH:
            raise RequestError(
                f"there is no `{tail}` here",
                hint="known: " + ", ".join((*DIALECTS, messages.COUNT_PATH, "models")),
                status=404,
                code="not_found",
            )
        if request.method != "POST":
            raise RequestError(f"`{tail}` is asked by POST", status=405, code="method_not_allowed")
        raw = await self._body(request)
        body = wire.read_json(raw)
        if tail == messages.COUNT_PATH:
            count = session.count_tokens(messages.count_ask(body))
            return await self._send(request, 200, {"input_tokens": count}, {})
        ask = dialect.ask(body)
        async with session.asked(
            ask,
            digest=blake2b(raw, digest_size=16, person=tail[:16].encode()).digest(),
            idempotency_key=request.headers.get("idempotency-key", ""),
            retry=_retry(request),
        ) as flight:
            headers = {"x-treadle-ignored": ", ".join(ask.ignored)} if ask.ignored else {}
            if ask.stream:
                return await self._stream(request, dialect, ask, session, flight, headers)
            answer = await session.arrival(flight)
            reply = await self._send(request, 200, dialect.answer(ask, answer), headers)
            flight.delivered = True
            return reply

    async def _stream(
        self,
        request: web.BaseRequest,
        dialect: Dialect,
        ask: Ask,
        session: Session,
        flight: Flight,
        headers: Mapping[str, str],
    ) -> web.StreamResponse:
        """Headers wait for the turn as long as PING_S, so that an early error has its status."""
        reply = web.StreamResponse(
            headers={
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                **headers,
            }
        )
        while not (await asyncio.wait({flight.task}, timeout=PING_S))[0]:
            await self._write(request, reply, dialect.PING)
        try:
            answer = await session.arrival(flight)
            frames = b"".join(dialect.events(ask, answer))
        except RequestError as error:
            if not reply.prepared:
                raise
            if isinstance(error, Overflow):
                error.message = dialect.context_message(error.prompt, error.limit)
            session.counts["refused"] += 1
            await self._write(request, reply, dialect.error_event(error), last=True)
            return reply
        await self._write(request, reply, frames, last=True)
        flight.delivered = True
        return reply

    def _health(self) -> dict[str, Any]:
        sessions = self.sessions
        return {
            "status": "ok",
            "sessions": len(sessions),
            "in_flight": sessions.in_flight,
            "opened": sessions.opened,
            "expired": sessions.expired,
        }

    # ------------------------------------------------------------------ bytes

    async def _body(self, request: web.BaseRequest) -> bytes:
        body = bytearray()
        if (request.content_length or 0) > self._max_body:
            raise self._too_large()
        _invite(request)
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                while chunk := await request.content.readany():
                    body += chunk
                    if len(body) > self._max_body:
                        raise self._too_large()
        except TimeoutError:
            raise RequestError(
                f"the request body did not arrive within {READ_LIMIT_S:g} s",
                status=408,
                code="request_timeout",
            ) from None
        except web.RequestPayloadError as error:
            raise RequestError(f"the request body is broken: {error}") from None
        return bytes(body)

    def _too_large(self) -> RequestError:
        return RequestError(
            f"the request body is larger than {self._max_body} bytes",
            status=413,
            code="request_too_large",
        )

    async def _send(
        self,
        request: web.BaseRequest,
        status: int,
        document: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> web.StreamResponse:
        reply = web.Response(
            body=json.dumps(document, separators=(",", ":")).encode(),
            status=status,
            content_type="application/json",
            headers=headers,
        )
        if _waits(request):
            reply.force_close()  # whether the body still comes is the client's choice
        await self._write(request, reply, b"", last=True)
        return reply

    async def _write(
        self,
        request: web.BaseRequest,
        reply: web.StreamResponse,
        data: bytes,
        *,
        last: bool = False,
    ) -> None:
        """Give bytes to the client and wait until they have left this process."""
        transport = request.transport
        if transport is None or transport.is_closing():
            raise _Gone
        transport.set_write_buffer_limits(high=0)
        try:
            async with asyncio.timeout(self._send_limit_s):
                if not reply.prepared:
                    await reply.prepare(request)
                if data:
                    await reply.write(data)
                if last:
                    await reply.write_eof()
                await request.writer.drain()
        except TimeoutError:
            log.warning("a client did not read its answer for %g s: cut off", self._send_limit_s)
            transport.abort()
            raise _Gone from None
        if transport.is_closing():
            raise _Gone


class _Gone(Exception):
    """The client is not there any more."""


def _waits(request: web.BaseRequest) -> bool:
    """Whether its client sends the body only when it is told to, and was not."""
    expects = "expect" in request.headers and request.version >= HttpVersion11
    invited = getattr(request.protocol, "invited", None) is request
    return expects and not invited and not request.content.is_eof()


def _invite(request: web.BaseRequest) -> None:
    """Ask for the body where a client waits for that."""
    if not _waits(request):
        return
    expected = request.headers["expect"]
    if expected.lower() != "100-continue":
        raise RequestError(
            f"`Expect: {expected[:40]}` cannot be met", status=417, code="expectation_failed"
        )
    if request.transport is None:
        raise _Gone
    if isinstance(request.protocol, Connection):
        request.protocol.invited = request
    request.transport.write(CONTINUE)


# --------------------------------------------------------------------------- requests


def _address(request: web.BaseRequest) -> tuple[str, str]:
    """(session key, path without its versions); the path's key goes before the header's."""
    parts = [p for p in request.path.split("/") if p]
    key = ""
    if len(parts) >= 2 and parts[0] == "s":
        key, parts = parts[1], parts[2:]
    else:
        bearer = request.headers.get("authorization", "")
        scheme, _, token = bearer.partition(" ")
        key = request.headers.get("x-api-key") or (token if scheme.lower() == "bearer" else "")
    while parts and parts[0] == "v1":
        parts = parts[1:]
    return key.strip(), "/".join(parts)


def _dialect_of(request: web.BaseRequest, tail: str) -> Dialect:
    """For errors outside of every dialect's own path."""
    anthropic = "anthropic-version" in request.headers or tail.startswith("messages")
    return messages if anthropic else chat_completions


def _retry(request: web.BaseRequest) -> int:
    given = request.headers.get("x-stainless-retry-count", "")
    return int(given) if given.isdecimal() and len(given) < 6 else 0


def _models(session: Session, tail: str) -> dict[str, Any]:
    one = {"id": session.model, "object": "model", "created": 0, "owned_by": "treadle"}
    if tail == "models":
        return {"object": "list", "data": [one]}
    return one | {"id": tail.removeprefix("models/")}
