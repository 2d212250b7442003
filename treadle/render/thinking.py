"""Thinking and answer of one assistant turn, told apart in one place.

A turn's reasoning may arrive in its own field or inline between think tags; both are brought to
one form before anything is rendered, so both give the same tokens.

Takes: text of an assistant turn. Gives: (reasoning, content).
"""

from __future__ import annotations

from treadle.types import Message

OPEN = "<think>"
CLOSE = "</think>"


def split(text: str, *, opened: bool = False) -> tuple[str, str]:
    """(reasoning, content) of a turn.

    `opened`: the generation prompt already opened the tag, so the text starts as thinking.
    Thinking that was never closed is all reasoning: an unfinished thought is not an answer.
    """
    head = text.lstrip()
    if head.startswith(OPEN):
        head = head[len(OPEN) :]
    elif not opened:
        return "", text
    thought, closed, answer = head.partition(CLOSE)
    return thought.strip("\n"), answer.lstrip("\n") if closed else ""


def split_message(message: Message) -> tuple[str, str]:
    """(reasoning, content) of a message, whichever way its reasoning is stored."""
    if message.role != "assistant" or message.reasoning:
        return message.reasoning, message.content
    return split(message.content)
