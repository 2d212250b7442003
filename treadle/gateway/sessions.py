"""Sessions: what one agent asks, told apart from all others and recorded as one trajectory.

A request tells the whole conversation each time. It is laid over what the session has recorded,
message by message:

    recorded      sys  user  A1  tool  A2          request           what happens
                  |    |     |   |     |           sys user A1 tool A2 user2   spliced after A2
                  |    |     |   |                 sys user A1 tool            A2 drawn once more
                  |    |     |                     sys user A1 tool A2' user2  rewritten: after A1
                                                   sys' ...                    a sub-agent: new root

Guarantees:
- what matches is continued by ids and never encoded again; what does not match becomes a branch
  from the last reply that still holds, its new text untrained;
- a reply's thinking need not come back, outer white space and the layout of JSON arguments do not
  matter; any other change of a reply is a rewrite, and counted;
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
import json
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from treadle.errors import (
    ConfigError,
    DataError,
    LimitExceeded,
    SamplerError,
    TreadleError,
    boundary,
)
from treadle.gateway.recorder import ContextExceeded, Place, Recorder, Turn
from treadle.gateway.wire import Answer, Ask, RequestError
from treadle.types import Completion, Message, Status, StopReason, ToolCall

log = logging.getLogger(__name__)

MAX_LANES = 16
"""Turns of one session at a time; further ones wait for a lane."""
MAX_REMEMBERED = 64
"""Answers per session kept for a resend."""
MAX_TOMBSTONES = 4096
"""Closed sessions that are still told from unknown ones."""
RELEASE_LIMIT_S = 5.0

Key = tuple[object, ...]
Raw = str | tuple[int, ...]
"""A plain prompt."""


class Overflow(RequestError):
    """The prompt leaves no room in the context; worded by each dialect."""

    prompt = 0
    limit = 0

    @classmethod
    def of(cls, prompt: int, limit: int) -> Overflow:
        error = cls("context length exceeded", code="context_length_exceeded", param="messages")
        error.prompt, error.limit = prompt, limit
        return error


@dataclass(slots=True, eq=False)
class _Point:
    """One message of a recorded conversation."""

    message: Message
    parent: _Point | None
    leaf: int | None = None
    """Node at which the tokens up to here are complete; None inside a prompt."""
    reply: bool = False
    lane: str = ""
    """Sampler session that holds these tokens' KV."""
    children: dict[Key, list[_Point]] = field(default_factory=dict)


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
        """requests, replays, rewrites, conversations, undelivered, cancelled, refused."""
        self.wishes: list[dict[str, Any]] = []
        """Distinct sampling parameters that clients asked for, the first 16."""
        self.ignored: Counter[str] = Counter()
        self._roots: dict[Key, _Point] = {}
        self._answers: OrderedDict[str, tuple[_Point, int]] = OrderedDict()
        self._by_key: OrderedDict[str, Flight] = OrderedDict()
        self._flights: set[Flight] = set()
        """In the sampler."""
        self._unread: set[Flight] = set()
        """Answered, and not (yet) known to be received."""
        self._readers = 0
        self._no_readers = asyncio.Event()
        self._no_readers.set()
        self._idle: list[str] = [recorder.session]
        self._lanes: set[str] = {recorder.session}
        self._num_lanes = 0
        self._free = asyncio.Semaphore(MAX_LANES)
        self._overflow = ""
        self._releasing: set[asyncio.Task[None]] = set()

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
        self.counts["refused"] += 1
        if isinstance(error, RequestError):
            return error
        if isinstance(error, ContextExceeded):
            return Overflow.of(error.prompt_tokens, error.max_context)
        if isinstance(error, LimitExceeded):
            status = 504 if self.recorder.ended is Status.ABORTED else 400
            return RequestError(error.message, status=status, code="limit_reached")
        if isinstance(error, DataError | ConfigError):
            return RequestError(error.message, hint=error.hint, param="messages")
        return RequestError(error.message, status=503, code="sampler_failed")

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
            prompt: tuple[int, ...] | None = None
            if ask.raw is not None:
                found, place, new, prompt = self._find_raw(ask.raw)
            else:
                found, place, new = self._find(ask)
            lane = ""
            try:
                lane = await self._lane(found)
                turn = await self.recorder.turn(
                    place,
                    new,
                    tools=ask.tools,
                    prompt=prompt,
                    session=lane,
                    max_new_tokens=ask.max_tokens,
                    stop=ask.stop,
                    read=lambda completion: self._read(completion, ask),
                )
            except BaseException as error:
                self._failed(error, lane)
                raise
            self._idle.append(lane)
        self.error, self._overflow = None, ""
        point = found
        for message in new:
            point = _add(point, message)
        if new:
            point.leaf = turn.prompt
        reply = _add(point, turn.message, reply=True)
        reply.leaf, reply.lane = turn.node, lane
        answer = self._answer(ask, turn)
        if ask.continuable:
            _remember(self._answers, answer.id, (reply, ask.instructions))
        return turn, answer

    def _failed(self, error: BaseException, lane: str) -> None:
        if isinstance(error, ContextExceeded | DataError | ConfigError):  # nothing was sampled
            self._idle.append(lane)
            if isinstance(error, ContextExceeded):
                self._overflow = error.message
            return
        if isinstance(error, SamplerError):
            self.error = error
        if lane:
            self._drop_lane(lane)

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
        past = _path(found[0])[found[1] :]
        split = ask.instructions
        return replace(ask, messages=(*ask.messages[:split], *past, *ask.messages[split:]))

    # ----------------------------------------------------------------------- history

    def _find(self, ask: Ask) -> tuple[_Point, Place, tuple[Message, ...]]:
        """The deepest point from which the request can go on, and what is new after it."""
        root = self._root(("chat", _digest(ask.tools)))
        path = [root]
        for message in ask.messages:
            child = _child(path[-1], message)
            if child is None:
                break
            path.append(child)
        whole = len(path) - 1 == len(ask.messages)
        while len(path) > 1:
            point = path[-1]
            if point.leaf is not None and (point.reply or whole):
                break
            whole = False
            path.pop()
        matched = len(path) - 1
        point, new = path[-1], ask.messages[matched:]
        if self.recorder.turns and any(m.role == "assistant" for m in new):
            self.counts["rewrites"] += 1
        if point is root:
            self.counts["conversations"] += 1
            return root, Place(), new
        ids = self.recorder.ids(point.leaf)
        return point, Place(point.leaf, ids, tuple(p.message for p in path[1:])), new

    def _root(self, kind: Key) -> _Point:
        root = self._roots.get(kind)
        if root is None:
            root = self._roots[kind] = _Point(Message(role=""), None)
        return root

    def _find_raw(self, raw: Raw) -> tuple[_Point, Place, tuple[Message, ...], tuple[int, ...]]:
        """A plain prompt after the longest recorded text (or ids) that it begins with."""
        recorder, template = self.recorder, self.recorder.renderer.template
        root = self._root(("text" if isinstance(raw, str) else "ids",))
        found, rest = _longest(root, raw, recorder)
        if isinstance(rest, tuple):
            size = len(template.tokenizer)
            if bad := [i for i in rest if not 0 <= i < size]:
                raise RequestError(f"`prompt` holds id {bad[0]}, known are 0 to {size - 1}")
            ids, shown = rest, template.decode(rest)
        else:
            ids = template.encode(rest) if found is root else template.encode_after(rest)
            shown = rest
        if found is root:
            self.counts["conversations"] += 1
            place = Place()
        else:
            place = Place(found.leaf, recorder.ids(found.leaf))
        if not place.ids and not ids:
            raise RequestError("`prompt` has no tokens", param="prompt")
        new = (Message(role="user", content=shown),) if ids else ()
        return found, place, new, (*place.ids, *ids)

    # ----------------------------------------------------------------------- replies

    def _read(self, completion: Completion, ask: Ask) -> Message:
        """The reply as the client gets it: cut at its stop string, calls only if all parse."""
        renderer, ids = self.recorder.renderer, completion.ids
        if ask.raw is not None:
            return _cut(Message(role="assistant", content=renderer.text(ids)), completion, ask)
        tools = bool(ask.tools) and ask.read_calls
        message = renderer.parse(ids, tools=tools, first_call=self.recorder.calls)
        broken = [c for c in message.tool_calls if not _sound(c)]
        if broken or (message.tool_calls and completion.stop_reason is StopReason.LENGTH):
            message = renderer.parse(ids, tools=False)
        calls = tuple(replace(c, arguments=c.arguments or "{}") for c in message.tool_calls)
        return _cut(replace(message, tool_calls=calls), completion, ask)

    def _answer(self, ask: Ask, turn: Turn) -> Answer:
        completion = turn.completion
        tokens: tuple[tuple[str, float], ...] = ()
        if ask.logprobs:
            template = self.recorder.renderer.template
            texts = [template.decode((i,)) for i in completion.ids]
            tokens = tuple(zip(texts, completion.logprobs, strict=True))
        return Answer(
            id=secrets.token_hex(12),
            created=int(time.time()),
            message=turn.message,
            stop_reason=completion.stop_reason,
            stop=_stop_of(completion, ask, self.recorder),
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=len(completion.ids),
            cached_tokens=min(completion.cached_tokens, turn.prompt_tokens),
            tokens=tokens,
        )

    # ----------------------------------------------------------------------- lanes

    async def _lane(self, point: _Point) -> str:
        """A sampler session for one turn; the one that holds the KV if it is free."""
        if point.lane in self._idle:
            self._idle.remove(point.lane)
            return point.lane
        if self._idle:
            return self._idle.pop()
        self._num_lanes += 1
        name = f"{self.recorder.session}~{self._num_lanes}"
        with boundary(SamplerError, f"session {name}: open"):
            await self.recorder.sampler.open(name)
        self._lanes.add(name)
        return name

    def _drop_lane(self, lane: str) -> None:
        """A turn that did not end well may still be in the sampler: its session goes with it."""
        self._lanes.discard(lane)
        task = asyncio.ensure_future(self._release(lane))
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    async def _release(self, lane: str) -> None:
        try:
            async with asyncio.timeout(RELEASE_LIMIT_S):
                await self.recorder.sampler.release(lane)
        except Exception as error:
            self.counts["leaked_lanes"] += 1
            log.warning("session %s: %s could not be released: %s", self.key[:6], lane, error)

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
        lanes, self._lanes = self._lanes, set()
        for lane in lanes:
            self._drop_lane(lane)
        if self._releasing:
            await asyncio.wait(tuple(self._releasing), timeout=2 * RELEASE_LIMIT_S)
        for table in (self._by_key, self._unread, self._answers, self._roots, self._idle):
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

    def find(self, key: str) -> Session:
        """Raises RequestError: 401 for a key that never was, 410 for a session that is over."""
        session = self._open.get(key)
        if session is not None:
            return session
        if key in self._gone:
            raise RequestError(self._gone[key], status=410, code="session_closed")
        raise RequestError(
            "this call names no open session, so nothing could be recorded for it",
            hint="use the session's own base URL (.../s/KEY/v1), or its key as the API key",
            status=401,
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


# --------------------------------------------------------------------------- matching


def message_key(message: Message) -> Key:
    """Equal for messages that say the same, however a client wrote them down."""
    calls = tuple((c.name, _canonical(c.arguments)) for c in message.tool_calls)
    if message.role == "assistant":
        return ("assistant", message.content.strip(), calls)
    return (message.role, message.content, message.tool_call_id)


def _child(point: _Point, message: Message) -> _Point | None:
    """Of several equal replies, the one with these call ids, else the last."""
    same = point.children.get(message_key(message), ())
    ids = [c.id for c in message.tool_calls]
    best: _Point | None = None
    for candidate in same:
        thought = candidate.message.reasoning
        if message.reasoning and message.reasoning.strip() != thought.strip():
            continue
        best = candidate
        if ids and [c.id for c in candidate.message.tool_calls] == ids:
            return candidate
    return best


def _add(point: _Point, message: Message, *, reply: bool = False) -> _Point:
    """A child that says `message`: a prompt's is shared, every reply has its own."""
    same = point.children.setdefault(message_key(message), [])
    if not reply:
        for child in same:
            if not child.reply and child.message.reasoning == message.reasoning:
                return child
    child = _Point(message, point, reply=reply)
    same.append(child)
    return child


def _path(point: _Point) -> tuple[Message, ...]:
    out: list[Message] = []
    at: _Point | None = point
    while at is not None and at.parent is not None:
        out.append(at.message)
        at = at.parent
    return tuple(reversed(out))


def _longest(root: _Point, raw: Raw, recorder: Recorder) -> tuple[_Point, Raw]:
    """Where a plain prompt can go on, and what it says after that.

    After a reply, or at a prompt that is the whole of it. As text, a reply is not continued that
    ended with a stop id or was cut: the client's text does not say all of its tokens.
    """
    best, best_rest = root, raw
    stack = [(root, raw)]
    while stack:
        point, rest = stack.pop()
        usable = point.reply or (point.leaf is not None and not rest)
        if usable and len(rest) < len(best_rest):
            best, best_rest = point, rest
        for child in (c for same in point.children.values() for c in same):
            ids = () if child.leaf is None else recorder.nodes[child.leaf].ids
            if isinstance(rest, tuple):
                said: str | tuple[int, ...] = ids
                fits = rest[: len(ids)] == ids
            else:
                said = child.message.content
                fits = rest.startswith(said)
                if child.reply:
                    fits = fits and not _says_more(ids, said, recorder)
            if fits and said:
                stack.append((child, rest[len(said) :]))
    return best, best_rest


def _says_more(ids: tuple[int, ...], said: str, recorder: Recorder) -> bool:
    stopped = bool(ids) and ids[-1] in recorder.renderer.stop_ids
    return stopped or recorder.renderer.text(ids) != said


def _canonical(arguments: str) -> str:
    """JSON arguments in one layout; what is no JSON stays as it is."""
    try:
        return json.dumps(json.loads(arguments or "{}", parse_float=_number), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


def _digest(tools: tuple[Mapping[str, Any], ...]) -> bytes:
    if not tools:
        return b""
    return blake2b(json.dumps([dict(t) for t in tools]).encode(), digest_size=16).digest()


# --------------------------------------------------------------------------- reading replies


def _sound(call: ToolCall) -> bool:
    """A call that a client can run: named, with a JSON object (or nothing) as arguments."""
    if not call.name:
        return False
    if not call.arguments:
        return True
    try:
        return isinstance(json.loads(call.arguments, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(name: str) -> float:
    raise ValueError(name)


def _stops(completion: Completion, ask: Ask) -> tuple[str, ...]:
    return ask.stop if completion.stop_reason is StopReason.STOP_STRING else ()


def _cut(message: Message, completion: Completion, ask: Ask) -> Message:
    """Without the stop string that ended it and what its last token brought along."""
    ends = [at for s in _stops(completion, ask) if (at := message.content.find(s)) >= 0]
    return replace(message, content=message.content[: min(ends)]) if ends else message


def _stop_of(completion: Completion, ask: Ask, recorder: Recorder) -> str:
    given = _stops(completion, ask)
    if not given:
        return ""
    said = recorder.renderer.text(completion.ids)
    found = [(at, s) for s in given if (at := said.find(s)) >= 0]
    return min(found)[1] if found else ""


def _remember(table: OrderedDict[Any, Any], key: object, value: object) -> None:
    table[key] = value
    table.move_to_end(key)
    while len(table) > MAX_REMEMBERED:
        table.popitem(last=False)
