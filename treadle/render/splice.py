"""What a template puts after an assistant turn, and whether a prompt may be continued at all.

A conversation may be continued by splicing where the template, given the whole conversation,
prints exactly: the prompt that was used, the turn as the model wrote it, then new text. Some
templates do not: they drop earlier thinking, move the tools, or print a system message last.
Whether they do depends on the *shape* of the conversation (roles, thinking, tool calls), not on
its words. So each shape is tried once, with stand-in messages, and the answer is remembered.

Takes: shapes and messages. Gives: text that follows a turn; a verdict per shape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from treadle.errors import DataError, TreadleError
from treadle.render.template import PROBE_TOOL, Template, ToolSpec
from treadle.render.thinking import CLOSE, OPEN, split_message
from treadle.types import Message, ToolCall

_STAND_IN = "stand-in reply 58301"
"""Content of the placeholder turn; what the template prints after it is what is wanted."""

EMPTY_THOUGHT = re.compile(rf"^\s*{OPEN}\s*{CLOSE}\s*")

Shape = tuple[str, bool, bool, int]
"""Role, has content, has reasoning, number of tool calls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether a shape may be continued by splicing."""

    stable: bool
    turn: str = ""
    """The last assistant turn as the template prints it inside the longer conversation."""
    token: int = -1
    """Index of the first token that would differ; -1 where stable."""
    reason: str = ""


def shape(message: Message) -> Shape:
    reasoning, content = split_message(message)
    return (message.role, bool(content), bool(reasoning), len(message.tool_calls))


def stand_ins(shapes: Sequence[Shape]) -> list[Message]:
    """Messages of these shapes, all with different words; tool results answer the calls in order.

    Templates compare messages by content (some look for "the last user message"), hence the
    different words.
    """
    out: list[Message] = []
    open_calls: list[str] = []
    num_calls = 0
    for i, (role, has_content, has_reasoning, calls) in enumerate(shapes):
        made = tuple(
            ToolCall(id=f"call{n:05d}", name="probe_tool", arguments=f'{{"value": {n}}}')
            for n in range(num_calls, num_calls + calls)
        )
        num_calls += calls
        open_calls += [c.id for c in made]
        answered = ""
        if role == "tool":
            answered = open_calls.pop(0) if open_calls else "call99999"
        out.append(
            Message(
                role=role,
                content=f"words {i} {role}" if has_content or role != "assistant" else "",
                reasoning=f"thought {i}" if has_reasoning else "",
                tool_calls=made,
                tool_call_id=answered,
                name="probe_tool" if role == "tool" else "",
            )
        )
    return out


def after_turn(
    template: Template,
    before: Sequence[Message],
    new: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    *,
    generation: bool = True,
) -> str:
    """Text that follows an assistant turn: its end, the new messages, the generation prompt.

    `before` are stand-ins for what precedes the turn; `new` are the real messages. Raises
    DataError where the template refuses them.
    """
    plain = Message(role="assistant", content=_STAND_IN)
    try:
        text = template.text([*before, plain, *new], tools, generation=generation)
    except TreadleError:
        if not new or new[0].role != "tool":
            raise
    else:
        if _STAND_IN not in text:
            raise DataError("the chat template does not show the content of an assistant message")
        return text.partition(_STAND_IN)[2]
    # Templates that insist on a call before a result: let the stand-in be an argument of calls
    # with the ids that are answered, then drop what closes the calls.
    ids = [m.tool_call_id for m in new if m.role == "tool"]
    arguments = f'{{"value": "{_STAND_IN}"}}'
    calls = tuple(ToolCall(id=i, name="probe_tool", arguments=arguments) for i in ids)
    caller = replace(plain, content="", tool_calls=calls)
    text = template.text([*before, caller, *new], tools, generation=generation)
    alone = template.text([*before, caller], tools, generation=False)
    end = after_turn(template, before, (), tools, generation=False)
    closing = alone.rpartition(_STAND_IN)[2].removesuffix(end)
    found = text.split(_STAND_IN)[len(ids) :]
    return _STAND_IN.join(found).removeprefix(closing)


def judge(
    template: Template, history: Sequence[Shape], new: Sequence[Shape], *, tools: bool
) -> Verdict:
    """Try a shape: `history` ends with an assistant turn, `new` follows it.

    Assumes that the prompt of that turn was the template's own text for what precedes it; true
    of a fresh prompt, and kept true by refusing every unstable continuation.
    """
    specs = (PROBE_TOOL,) if tools else ()
    messages = stand_ins([*history, *new])
    before, turn, following = (
        messages[: len(history) - 1],
        messages[len(history) - 1],
        messages[len(history) :],
    )
    try:
        prompt = template.text(before, specs, generation=True)
        whole = template.text(messages, specs, generation=True)
        tail = after_turn(template, before, following, specs)
        alone = template.text(messages[: len(history)], specs, generation=False)
        end = after_turn(template, before, (), specs, generation=False)
    except TreadleError as error:
        return Verdict(stable=False, reason=f"unsupported: {error.message}")
    if not whole.startswith(prompt):
        return _differs(template, prompt, whole, "the text before the turn changes")
    if not whole.endswith(tail) or len(whole) < len(prompt) + len(tail):
        return _differs(template, prompt, whole, "what follows the turn depends on its content")
    printed = whole[len(prompt) : len(whole) - len(tail)]
    written = turn.content
    if turn.reasoning or turn.tool_calls:  # as the template prints it while it is the last turn
        fresh = alone[len(prompt) :].removesuffix(end) if alone.startswith(prompt) else ""
        if not turn.reasoning:  # some templates print an empty block that no model writes
            fresh = EMPTY_THOUGHT.sub("", fresh)
        written = fresh if fresh and turn.reasoning in fresh else turn.reasoning + turn.content
    if printed.strip() != written.strip():
        spliced = f"{prompt}{written}{tail}"
        return _differs(template, spliced, whole, "the turn is printed otherwise once it is past")
    ids = template.encode(prompt) + template.encode_after(printed) + template.encode_after(tail)
    if ids != template.encode(whole):
        return _differs(template, ids, whole, "tokens merge across the end of the turn")
    return Verdict(stable=True, turn=printed)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Index of the first differing id; the shorter length where one begins the other."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return i
    return min(len(ours), len(theirs))


def readable_difference(template: Template, ours: Sequence[int], theirs: Sequence[int]) -> str:
    """One line: where two id lists part, and what each goes on with."""
    at = first_difference(ours, theirs)
    lead = template.decode(ours[max(0, at - 6) : at])
    here, there = template.decode(ours[at : at + 12]), template.decode(theirs[at : at + 12])
    return f"token {at}, after {lead!r}: spliced {here!r}, template {there!r}"


def _differs(template: Template, ours: str | tuple[int, ...], whole: str, reason: str) -> Verdict:
    spliced = template.encode(ours) if isinstance(ours, str) else ours
    theirs = template.encode(whole)
    return Verdict(
        stable=False,
        token=first_difference(spliced, theirs),
        reason=f"{reason}; {readable_difference(template, spliced, theirs)}",
    )
