"""What one session was told and has said, as a tree; and where a request fits into it.

A request tells the whole conversation each time. It is laid over the tree message by message:

    recorded      sys  user  A1  tool  A2          request           what happens
                  |    |     |   |     |           sys user A1 tool A2 user2   spliced after A2
                  |    |     |   |                 sys user A1 tool            A2 drawn once more
                  |    |     |                     sys user A1 tool A2' user2  rewritten: after A1
                                                   sys' ...                    a sub-agent: new root

Guarantees:
- what matches is continued by ids and never encoded again; what does not match becomes a branch
  from the last reply that still holds;
- a reply's thinking need not come back, outer white space, the layout of JSON arguments and how
  half a surrogate pair is written in them do not matter; any other change of a reply is a rewrite,
  and counted;
- a plain prompt continues the longest recorded one that it begins with; as text, never one whose
  tokens say more than its text.

Takes: Asks, and the turns that answered them. Gives: places in the recorder's graph.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from treadle.gateway.recorder import Place, Recorder, Turn
from treadle.gateway.wire import Ask, RequestError, clean, clean_tree
from treadle.types import Message

Key = tuple[object, ...]
Raw = str | tuple[int, ...]
"""A plain prompt."""


@dataclass(slots=True, eq=False)
class Point:
    """One message of a recorded conversation."""

    message: Message
    parent: Point | None
    leaf: int | None = None
    """Node at which the tokens up to here are complete; None inside a prompt."""
    reply: bool = False
    lane: str = ""
    """Lane that holds these tokens' KV."""
    children: dict[Key, list[Point]] = field(default_factory=dict)

    @property
    def path(self) -> tuple[Message, ...]:
        """The messages from the root to here."""
        out: list[Message] = []
        at: Point | None = self
        while at is not None and at.parent is not None:
            out.append(at.message)
            at = at.parent
        return tuple(reversed(out))


@dataclass(frozen=True, slots=True)
class Found:
    """Where a request goes on."""

    point: Point
    place: Place
    new: tuple[Message, ...]
    """What it says after that."""
    prompt: tuple[int, ...] | None = None
    """All ids, of a plain prompt."""


class History:
    """Of one session, over its recorder's graph.

    Args:
        counts: `rewrites` are requests that tell a reply as it was not given, `conversations` those
            that continue nothing.
    """

    def __init__(self, recorder: Recorder, counts: Counter[str]) -> None:
        self._recorder = recorder
        self._counts = counts
        self._roots: dict[Key, Point] = {}

    def find(self, ask: Ask) -> Found:
        """The deepest point from which the request can go on, and what is new after it."""
        return self._find_chat(ask) if ask.raw is None else self._find_raw(ask.raw)

    def add(self, found: Found, turn: Turn, lane: str) -> Point:
        """Remember a turn that went on from `found`; the point of its reply."""
        point = found.point
        for message in found.new:
            point = _add(point, message)
        if found.new:
            point.leaf = turn.prompt
        reply = _add(point, turn.message, reply=True)
        reply.leaf, reply.lane = turn.node, lane
        return reply

    def clear(self) -> None:
        self._roots.clear()

    # ----------------------------------------------------------------------- finding

    def _root(self, kind: Key) -> Point:
        root = self._roots.get(kind)
        if root is None:
            root = self._roots[kind] = Point(Message(role=""), None)
        return root

    def _find_chat(self, ask: Ask) -> Found:
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
        point, new = path[-1], ask.messages[len(path) - 1 :]
        if self._recorder.turns and any(m.role == "assistant" for m in new):
            self._counts["rewrites"] += 1
        if point is root:
            self._counts["conversations"] += 1
            return Found(root, Place(), new)
        ids = self._recorder.ids(point.leaf)
        return Found(point, Place(point.leaf, ids, tuple(p.message for p in path[1:])), new)

    def _find_raw(self, raw: Raw) -> Found:
        recorder, template = self._recorder, self._recorder.renderer.template
        root = self._root(("text" if isinstance(raw, str) else "ids",))
        point, rest = _longest(root, raw, recorder)
        if isinstance(rest, tuple):
            size = len(template.tokenizer)
            if bad := [i for i in rest if not 0 <= i < size]:
                raise RequestError(f"`prompt` holds id {bad[0]}, known are 0 to {size - 1}")
            ids, shown = rest, template.decode(rest)
        else:
            ids = template.encode(rest) if point is root else template.encode_after(rest)
            shown = rest
        if point is root:
            self._counts["conversations"] += 1
            place = Place()
        else:
            place = Place(point.leaf, recorder.ids(point.leaf))
        if not place.ids and not ids:
            raise RequestError("`prompt` has no tokens", param="prompt")
        new = (Message(role="user", content=shown),) if ids else ()
        return Found(point, place, new, (*place.ids, *ids))


# --------------------------------------------------------------------------- matching


def message_key(message: Message) -> Key:
    """Equal for messages that say the same, however a client wrote them down."""
    calls = tuple((clean(c.name), _canonical(c.arguments)) for c in message.tool_calls)
    if message.role == "assistant":
        return ("assistant", message.content.strip(), calls)
    return (message.role, message.content, message.tool_call_id)


def _child(point: Point, message: Message) -> Point | None:
    """Of several equal replies, the one with these call ids, else the last."""
    same = point.children.get(message_key(message), ())
    ids = [c.id for c in message.tool_calls]
    best: Point | None = None
    for candidate in same:
        thought = candidate.message.reasoning
        if message.reasoning and message.reasoning.strip() != thought.strip():
            continue
        best = candidate
        if ids and [c.id for c in candidate.message.tool_calls] == ids:
            return candidate
    return best


def _add(point: Point, message: Message, *, reply: bool = False) -> Point:
    """A child that says `message`: a prompt's is shared, every reply has its own."""
    same = point.children.setdefault(message_key(message), [])
    if not reply:
        for child in same:
            if not child.reply and child.message.reasoning == message.reasoning:
                return child
    child = Point(message, point, reply=reply)
    same.append(child)
    return child


def _longest(root: Point, raw: Raw, recorder: Recorder) -> tuple[Point, Raw]:
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
                said: Raw = ids
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
    """JSON arguments in one layout; what is no JSON stays as it is.

    Half a surrogate pair, which some clients escape and others replace, is the replacement
    character.
    """
    try:
        given = json.loads(arguments or "{}", parse_float=_number)
        return json.dumps(clean_tree(given, "arguments"), sort_keys=True)
    except (ValueError, RecursionError, RequestError):
        return clean(arguments)


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


def _digest(tools: tuple[Mapping[str, Any], ...]) -> bytes:
    if not tools:
        return b""
    return blake2b(json.dumps([dict(t) for t in tools]).encode(), digest_size=16).digest()
