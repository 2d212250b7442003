"""Answering a turn's tool calls: one tool message per call id, whatever happens.

Guarantees: a call of an unknown tool, with bad arguments, or that fails, is answered with the
error's text; only a ToolError (the tool itself is out of order, which is not an answer to the
model) ends the trajectory.

Takes: an assistant message. Gives: its tool messages, in order of the calls.
"""

from __future__ import annotations

from treadle.errors import ToolError, boundary
from treadle.harness.chat import Chat
from treadle.tools import Tools
from treadle.types import Message, ToolCall


async def answer_calls(message: Message, tools: Tools, chat: Chat) -> list[Message]:
    """Tool messages for every call of `message`; counts calls and errors on `chat`."""
    return [await _answer(call, tools, chat) for call in message.tool_calls]


async def _answer(call: ToolCall, tools: Tools, chat: Chat) -> Message:
    chat.tool_calls += 1
    chat.state = f"running tool {call.name} ({call.id}) after turn {chat.turns}"
    with boundary(ToolError, f"tool {call.name} ({call.id})"):
        result = await tools.call(call.name, call.arguments)
    chat.tool_errors += result.is_error
    return Message(role="tool", content=result.text, tool_call_id=call.id, name=call.name)
