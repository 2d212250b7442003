"""Length-prefixed frames over a pipe, with a deadline for every byte.

A reader or writer that only polls cannot be wedged by a peer that stops half way, floods its
error stream, or dies: each ends in EOFError or TimeoutError, and the caller kills the peer.

Takes: bytes. Gives: bytes.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import time

HEADER = struct.Struct(">Q")

MAX_FRAME = 1 << 30
"""Bytes. A larger length is a broken frame, not a message."""


class Pipes:
    """The parent's ends of a worker's pipes: requests, replies, and what user code prints.

    What arrives on `noise` is drained while waiting, and only its last bytes are kept.
    """

    def __init__(self, requests: int, replies: int, noise: int, *, keep_bytes: int = 2_000) -> None:
        self._requests, self._replies, self._noise = requests, replies, noise
        self._keep = keep_bytes
        self._tail = b""
        for fd in (requests, replies, noise):
            os.set_blocking(fd, False)
        self._poll = select.poll()
        self._poll.register(noise, select.POLLIN)

    @property
    def printed(self) -> str:
        """The last that the worker's user code printed."""
        return self._tail.decode("utf-8", "replace").strip()

    def send(self, payload: bytes, deadline: float) -> None:
        """Raises TimeoutError at `deadline` (of time.monotonic) and EOFError when the peer died."""
        data = memoryview(HEADER.pack(len(payload)) + payload)
        self._poll.register(self._requests, select.POLLOUT)
        try:
            while data:
                self._wait(self._requests, deadline)
                try:
                    data = data[os.write(self._requests, data) :]
                except BlockingIOError:
                    continue
                except BrokenPipeError:
                    raise EOFError from None
        finally:
            self._poll.unregister(self._requests)

    def receive(self, deadline: float) -> bytes:
        """The next frame. Raises TimeoutError and EOFError."""
        self._poll.register(self._replies, select.POLLIN)
        try:
            (length,) = HEADER.unpack(self._read(HEADER.size, deadline))
            if length > MAX_FRAME:
                raise EOFError
            return self._read(length, deadline)
        finally:
            self._poll.unregister(self._replies)

    def drain(self) -> None:
        """Read what is left of the noise, without waiting, up to what a pipe holds."""
        for _ in range(64):
            if not self._read_noise():
                return

    def _read(self, count: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            self._wait(self._replies, deadline)
            try:
                got = os.read(self._replies, min(count - len(parts), 1 << 20))
            except BlockingIOError:
                continue
            if not got:
                raise EOFError
            parts += got
        return bytes(parts)

    def _wait(self, fd: int, deadline: float) -> None:
        """Until `fd` is ready or at its end; draining the noise meanwhile."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready = {f for f, _ in self._poll.poll(left * 1000)}
            if self._noise in ready:
                self._read_noise()
            if fd in ready:
                return

    def _read_noise(self) -> bool:
        try:
            got = os.read(self._noise, 1 << 16)
        except BlockingIOError:
            return False
        if not got:
            # At its end it would be ready for ever.
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._noise)
            return False
        self._tail = (self._tail + got)[-self._keep :]
        return True
