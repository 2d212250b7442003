"""Connections of the gateway: what HTTP leaves to the server, below any request.

Guarantees: what is no HTTP gets a 400 (431 where it is too much of it) in a shape that every
dialect's clients read; a body that breaks or ends early fails at once, not at its time limit; a
client that sends no more is answered what it asked, and one that is gone ends its request.

It looks at internals of aiohttp's protocol, which are the same from 3.12 to 3.14: pyproject.toml
bounds the version, tests/gateway/test_http.py fails where they change.

Takes: bytes. Gives: aiohttp's requests.
"""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import _ErrInfo  # pyright: ignore[reportPrivateUsage]

PROBE_S = 10.0
"""Between probes of a client that sends no more."""
LOOK_S = 0.05
"""Between looks at it."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Server(web.Server):
    """Makes our connections."""

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)

    def _make_request(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        protocol.payload = payload
        return super()._make_request(message, payload, protocol, writer, task)


class Connection(web.RequestHandler):
    """One connection. A client that sends no more (it has closed its half, or all of it: the two
    look alike) is answered what it asked, and then the connection is closed."""

    payload: Any = None
    """Body of the latest request."""
    invited: web.BaseRequest | None = None
    """Latest request whose body was asked for."""
    broken: bool = False
    """Its body is no HTTP: it is told, and so is nothing else after it."""
    seeing_off: asyncio.Task[None] | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages and isinstance(error := self._messages[-1][0], _ErrInfo):
            self.broken = self.broken or self._break_off(error.message or "it is no HTTP")

    def eof_received(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.seeing_off is None:
            if self._is_idle():
                return False
            self._break_off("it ended before its end")
            self.seeing_off = asyncio.ensure_future(self._see_off())
        return True

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.seeing_off is not None:
            self.seeing_off.cancel()
        super().connection_lost(exc)

    async def _see_off(self) -> None:
        """Close once all is answered, or when a probe shows that nobody is there to read."""
        loop, probed = asyncio.get_running_loop(), -math.inf
        while (transport := self.transport) is not None and not self._is_idle():
            request = self._current_request
            if (
                request is not None
                and request.writer.output_size == 0
                and request.version >= HttpVersion11
                and loop.time() >= probed + PROBE_S
            ):
                probed = loop.time()
                transport.write(CONTINUE)  # what has closed all of it resets the connection
            await asyncio.sleep(LOOK_S)
            peer = transport.get_extra_info("socket")
            if not transport.is_closing() and peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                transport.abort()
                return
        self.force_close()

    def _break_off(self, reason: str) -> bool:
        """End a body that still arrives; False = there is none."""
        for payload in (self.payload, *(payload for _, payload in self._messages)):
            if payload is not None and not payload.is_eof() and payload.exception() is None:
                payload.set_exception(web.RequestPayloadError(_short(reason)))
                return True
        return False

    def _is_idle(self) -> bool:
        """It waits for a request."""
        waiter = self._waiter
        return not self._messages and waiter is not None and not waiter.done()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What cannot be read as a request has no dialect: this shape is that of all of them."""
        if self.broken or request.writer.output_size > 0:
            raise ConnectionError("it was told, or half an answer was sent, already")
        if isinstance(exc, LineTooLong) or (message or "").startswith("Too many headers"):
            status = 431
        kind = "invalid_request_error" if status < 500 else "server_error"
        told = _short(message or "the gateway failed")
        error = {"type": kind, "message": told, "param": None, "code": "bad_request"}
        reply = web.json_response({"type": "error", "error": error}, status=status)
        reply.force_close()
        return reply


def _short(text: str) -> str:
    return " ".join(text.split())[:200]
