"""Sessions: what one agent asks, told apart from all others and recorded as one trajectory.

    request --> resend? --> the first answer
                   `-> history: where it goes on --> a lane --> recorder, sampler --> reply

Guarantees:
- a resend gets the first answer: the same idempotency key, or a retry counter above 0 on an equal
  request whose answer did not arrive. Equal requests otherwise are independent samples;
- nobody left to wait for a turn cancels it in the sampler; a reply that nobody received is not
  trained;
- parallel requests of one session run at once, each on a sampler session of its own, at most
  MAX_LANES; all of them are released when the session closes, expires, or its turn is cancelled;
- an abandoned session expires `ttl_s` after its last request: counts return to zero.

Takes: Asks. Gives: Answers, and the recorder's graph. Waits for: the sampler, bounded by the
deadline of the turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from treadle.errors import ConfigError, DataError, SamplerError, TreadleError
from treadle.gateway import replies
from treadle.gateway.history import History, Point
from treadle.gateway.lanes import RELEASE_LIMIT_S, Lanes
from treadle.gateway.recorder import ContextExceeded, Recorder, Turn
from treadle.gateway.refusals import refusal
from treadle.gateway.wire import Answer, Ask, RequestError
from treadle.types import Status

log = logging.getLogger(__name__)

MAX_LANES = 16
"""Turns of one session at a time; further ones wait for a lane."""
MAX_REMEMBERED = 64
"""Answers per session kept for a resend."""
MAX_TOMBSTONES = 4096
"""Closed sessions that are still told from unknown ones."""


@dataclass(slots=True, eq=False)
class Flight:
    """One turn that was asked for, and everyone who waits for its answer."""

    digest: bytes
    task: asyncio.Task[tuple[Turn, Answer]]
    waiters: int = 0
    cancelled: bool = False
    delivered: bool = False
    """Set by the server once an answer has left it whole."""

    @property
    def answered(self) -> bool:
        task = self.task
        return task.done() and not task.cancelled() and task.exception() is None


class Session:
    """One agent's side of one trajectory; made by `Sessions.open`."""

    def __init__(self, recorder: Recorder, *, key: str, model: str) -> None:
        self.recorder = recorder
        self.key = key
        self.model = model
        self.closed = ""
        """Why it takes no more requests; empty while it does."""
        self.last_used = 0.0
        self.error: SamplerError | None = None
        """Of the last turn, if the sampler failed."""
        self.counts: Counter[str] = Counter()
        """requests, replays, undelivered, cancelled, refused; rewrites, conversations (`history`);
        leaked_lanes."""
        self.wishes: list[dict[str, Any]] = []
        """Distinct sampling parameters that clients asked for, the first 16."""
        self.ignored: Counter[str] = Counter()
        self._history = History(recorder, self.counts)
        self._lanes = Lanes(recorder, self.counts)
        self._free = asyncio.Semaphore(MAX_LANES)
        self._answers: OrderedDict[str, tuple[Point, int]] = OrderedDict()
        self._by_key: OrderedDict[str, Flight] = OrderedDict()
        self._flights: set[Flight] = set()
        """In the sampler."""
        self._unread: set[Flight] = set()
        """Answered, and not (yet) known to be received."""
        self._readers = 0
        self._no_readers = asyncio.Event()
        self._no_readers.set()
        self._overflow = ""

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    # ----------------------------------------------------------------------- asking

    @contextlib.asynccontextmanager
    async def asked(
        self, ask: Ask, *, digest: bytes = b"", idempotency_key: str = "", retry: int = 0
    ) -> AsyncIterator[Flight]:
        """The answer to `ask`, for a reader who sets `delivered` once it has it.

        The block may run before the answer is there: `await arrival(flight)`. Leaving it without
        `delivered` tells that the reader is gone.
        """
        self._check_open()
        self.last_used = asyncio.get_running_loop().time()
        self.counts["requests"] += 1
        flight = self._resend(digest, idempotency_key, retry)
        if flight is None:
            flight = self._start(ask, digest, idempotency_key)
        else:
            self.counts["replays"] += 1
        flight.waiters += 1
        self._readers += 1
        self._no_readers.clear()
        try:
            yield flight
        finally:
            flight.waiters -= 1
            self._readers -= 1
            if not self._readers:
                self._no_readers.set()
            self.last_used = asyncio.get_running_loop().time()
            if flight.delivered:
                self._unread.discard(flight)
            elif flight.waiters == 0 and not flight.task.done():
                flight.cancelled = True
                self.counts["cancelled"] += 1
                flight.task.cancel()

    async def arrival(self, flight: Flight) -> Answer:
        """Raises RequestError in the words for the client."""
        try:
            return (await asyncio.shield(flight.task))[1]
        except asyncio.CancelledError:
            if flight.task.cancelled() and self.closed:
                raise RequestError(self.closed, status=410, code="session_closed") from None
            raise
        except TreadleError as error:
            raise self._refusal(error) from error

    def count_tokens(self, ask: Ask) -> int:
        """Tokens of the prompt that `ask` would be answered from, rendered anew."""
        self._check_open()
        try:
            return len(self.recorder.renderer.prompt(ask.messages, ask.tools))
        except TreadleError as error:
            raise self._refusal(error) from error

    def _check_open(self) -> None:
        if self.closed:
            raise RequestError(self.closed, status=410, code="session_closed")

    def _refusal(self, error: TreadleError) -> RequestError:
        return refusal(error, out_of_time=self.recorder.ended is Status.ABORTED)

    # ----------------------------------------------------------------------- resends

    def _resend(self, digest: bytes, idempotency_key: str, retry: int) -> Flight | None:
        """The flight whose answer this request is owed, if it is a resend."""
        if idempotency_key:
            flight = self._by_key.get(idempotency_key)
            if flight is not None and flight.digest != digest:
                raise RequestError(
                    "the idempotency key was used before for another request",
                    code="idempotency_key_reused",
                )
            if flight is None or flight.cancelled:
                return None
            return flight if flight.answered or not flight.task.done() else None
        if retry > 0:
            for flight in self._unread:
                if flight.digest == digest and flight.waiters == 0:
                    return flight
        return None

    def _start(self, ask: Ask, digest: bytes, idempotency_key: str) -> Flight:
        flight = Flight(digest, asyncio.ensure_future(self._fly(ask)))
        self._flights.add(flight)

        def landed(task: asyncio.Task[tuple[Turn, Answer]]) -> None:
            self._flights.discard(flight)
            if not task.cancelled() and task.exception() is None:
                self._unread.add(flight)

        flight.task.add_done_callback(landed)
        if idempotency_key:
            _remember(self._by_key, idempotency_key, flight)
        return flight

    # ----------------------------------------------------------------------- one turn

    async def _fly(self, ask: Ask) -> tuple[Turn, Answer]:
        ask = self._resolve(ask)
        self._note(ask)
        async with self._free:
            found, lane = self._history.find(ask), ""
            try:
                lane = await self._lanes.take(found.point.lane)
                turn = await self.recorder.turn(
                    found.place,
                    found.new,
                    tools=ask.tools,
                    prompt=found.prompt,
                    session=lane,
                    max_new_tokens=ask.max_tokens,
                    stop=ask.stop,
                    read=lambda completion: replies.read(self.recorder, completion, ask),
                )
            except BaseException as error:
                self._failed(error, lane)
                raise
            self._lanes.give_back(lane)
        self.error, self._overflow = None, ""
        reply = self._history.add(found, turn, lane)
        answer = replies.answer(self.recorder.renderer, ask, turn)
        if ask.continuable:
            _remember(self._answers, answer.id, (reply, ask.instructions))
        return turn, answer

    def _failed(self, error: BaseException, lane: str) -> None:
        if isinstance(error, ContextExceeded | DataError | ConfigError):  # nothing was sampled
            self._lanes.give_back(lane)
            if isinstance(error, ContextExceeded):
                self._overflow = error.message
            return
        if isinstance(error, SamplerError):
            self.error = error
        if lane:
            self._lanes.drop(lane)

    def _note(self, ask: Ask) -> None:
        self.ignored.update(ask.ignored)
        asked = dict(ask.wishes)
        if ask.stop:
            asked["stop"] = list(ask.stop)
        if asked and asked not in self.wishes and len(self.wishes) < 16:
            self.wishes.append(asked)

    def _resolve(self, ask: Ask) -> Ask:
        """Put the conversation that `previous` names in front."""
        if not ask.previous:
            return ask
        found = self._answers.get(ask.previous)
        if found is None:
            raise RequestError(
                f"previous response `resp_{ask.previous}` is not known in this session",
                status=404,
                code="previous_response_not_found",
                param="previous_response_id",
            )
        past = found[0].path[found[1] :]
        split = ask.instructions
        return replace(ask, messages=(*ask.messages[:split], *past, *ask.messages[split:]))

    # ----------------------------------------------------------------------- the end

    async def close(self, why: str) -> None:
        """Cancel what runs, let readers finish, release the sampler, settle what is trained.

        Idempotent; at most a few times RELEASE_LIMIT_S.
        """
        if self.closed:
            return
        self.closed = why
        tasks = [f.task for f in self._flights]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=RELEASE_LIMIT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_LIMIT_S):
                await self._no_readers.wait()
        self._settle()
        await self._lanes.close()
        self._history.clear()
        for table in (self._by_key, self._unread, self._answers):
            table.clear()

    def _settle(self) -> None:
        """Replies that nobody received teach nothing; an overflow that nothing followed is an end.

        A reply that a later request continues was received, whatever the socket said.
        """
        recorder = self.recorder
        parents = {n.parent for n in recorder.nodes}
        for flight in self._unread:
            node = flight.task.result()[0].node
            if node not in parents:
                recorder.untrain(node)
                self.counts["undelivered"] += 1
        if self._overflow and recorder.ended is None:
            recorder.end(Status.TRUNCATED, self._overflow)

    def info(self) -> dict[str, object]:
        """For the trajectory's record; JSON values."""
        return {
            **{k: v for k, v in sorted(self.counts.items()) if v},
            "client_sampling": self.wishes,
            "ignored": dict(self.ignored),
        }


class Sessions:
    """Every session of a gateway, by its key."""

    def __init__(self, *, ttl_s: float = 3600.0) -> None:
        if not ttl_s > 0:
            raise ConfigError(f"`ttl_s` must be > 0, got {ttl_s}")
        self.ttl_s = ttl_s
        self.opened = 0
        self.expired = 0
        self._open: dict[str, Session] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def in_flight(self) -> int:
        return sum(s.in_flight for s in self._open.values())

    def open(self, recorder: Recorder, *, model: str = "policy") -> Session:
        """A session that records into `recorder`, under a key that cannot be guessed.

        The recorder's own sampler session is open already; this one releases it.
        """
        session = Session(recorder, key=secrets.token_urlsafe(24), model=model)
        session.last_used = asyncio.get_running_loop().time()
        self._open[session.key] = session
        self.opened += 1
        return session

    def find(self, key: str, *, addressed: bool = False) -> Session:
        """Raises RequestError: 410 for a session that is over; for a key that never was 404 where
        the address named it (`addressed`), else 401."""
        session = self._open.get(key)
        if session is not None:
            return session
        if key in self._gone:
            raise RequestError(self._gone[key], status=410, code="session_closed")
        raise RequestError(
            "this call names no open session, so nothing could be recorded for it",
            hint="use the session's own base URL (.../s/KEY/v1), or its key as the API key",
            status=404 if addressed else 401,
            code="unknown_session",
        )

    async def close(self, session: Session, why: str = "the session is over") -> None:
        """End a session; idempotent. Later calls with its key are told why."""
        if self._open.pop(session.key, None) is not None:
            self._gone[session.key] = why
            while len(self._gone) > MAX_TOMBSTONES:
                self._gone.popitem(last=False)
        await session.close(why)

    async def close_all(self) -> None:
        for session in list(self._open.values()):
            await self.close(session, "the gateway was closed")

    async def sweep(self) -> int:
        """Expire what was abandoned; how many that were."""
        now = asyncio.get_running_loop().time()
        old = [s for s in self._open.values() if not s.in_flight and now - s.last_used > self.ttl_s]
        why = f"the session expired after {self.ttl_s:g} s without use"
        await asyncio.gather(*(self.close(session, why) for session in old))
        self.expired += len(old)
        if old:
            log.warning(
                "%d sessions expired after %g s without a request; their %d turns are lost",
                len(old),
                self.ttl_s,
                sum(s.recorder.turns for s in old),
            )
        return len(old)


def _remember(table: OrderedDict[Any, Any], key: object, value: object) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > MAX_REMEMBERED:
        table.popitem(last=False)
