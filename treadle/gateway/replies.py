"""From sampled ids to what the client reads.

Guarantees: a reply's text is cut at the stop string that ended it; its tool calls are calls only if
all of them can be run, and its turn was not cut off; the ids themselves are never touched.

Takes: a Completion and the Ask it answers. Gives: a Message, and the Answer around it.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace

from treadle.gateway import wire
from treadle.gateway.recorder import Recorder, Turn
from treadle.gateway.wire import Answer, Ask
from treadle.render import Renderer
from treadle.types import Completion, Message, StopReason, ToolCall


def read(recorder: Recorder, completion: Completion, ask: Ask) -> Message:
    """The reply as the client gets it."""
    renderer, ids = recorder.renderer, completion.ids
    if ask.raw is not None:
        return _cut(Message(role="assistant", content=renderer.text(ids)), completion, ask)
    tools = bool(ask.tools) and ask.read_calls
    message = renderer.parse(ids, tools=tools, first_call=recorder.calls)
    broken = [c for c in message.tool_calls if not _sound(c)]
    if broken or (message.tool_calls and completion.stop_reason is StopReason.LENGTH):
        message = renderer.parse(ids, tools=False)
    calls = tuple(
        replace(c, name=wire.clean(c.name), arguments=wire.clean(c.arguments or "{}"))
        for c in message.tool_calls
    )
    return _cut(replace(message, tool_calls=calls), completion, ask)


def answer(renderer: Renderer, ask: Ask, turn: Turn) -> Answer:
    """A recorded turn as an answer to `ask`."""
    completion = turn.completion
    tokens: tuple[tuple[str, float], ...] = ()
    if ask.logprobs:
        texts = [renderer.template.decode((i,)) for i in completion.ids]
        tokens = tuple(zip(texts, completion.logprobs, strict=True))
    return Answer(
        id=secrets.token_hex(12),
        created=int(time.time()),
        message=turn.message,
        stop_reason=completion.stop_reason,
        stop=_stop_of(renderer, completion, ask),
        prompt_tokens=turn.prompt_tokens,
        completion_tokens=len(completion.ids),
        cached_tokens=min(completion.cached_tokens, turn.prompt_tokens),
        tokens=tokens,
    )


def _sound(call: ToolCall) -> bool:
    """A call that a client can run: named, with a JSON object (or nothing) as arguments."""
    if not call.name:
        return False
    return not call.arguments or wire.read_arguments(call.arguments) is not None


def _stops(completion: Completion, ask: Ask) -> tuple[str, ...]:
    return ask.stop if completion.stop_reason is StopReason.STOP_STRING else ()


def _cut(message: Message, completion: Completion, ask: Ask) -> Message:
    """Without the stop string that ended it and what its last token brought along."""
    ends = [at for s in _stops(completion, ask) if (at := message.content.find(s)) >= 0]
    return replace(message, content=message.content[: min(ends)]) if ends else message


def _stop_of(renderer: Renderer, completion: Completion, ask: Ask) -> str:
    given = _stops(completion, ask)
    if not given:
        return ""
    said = renderer.text(completion.ids)
    found = [(at, s) for s in given if (at := said.find(s)) >= 0]
    return min(found)[1] if found else ""
