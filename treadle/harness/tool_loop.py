"""Turns until the model stops calling tools.

Takes: a task and tools. Gives: a conversation whose last turn holds no call (or a limit's error).
"""

from __future__ import annotations

from treadle.harness.chat import Chat, Limits
from treadle.harness.tool_calls import answer_calls
from treadle.tools import Tools
from treadle.types import Task


async def tool_loop(task: Task, chat: Chat, tools: Tools, limits: Limits) -> None:
    """Show the task, answer every call of a turn, and go on until a turn has none.

    A turn cut by its length ends the conversation: half a call is never run.
    """
    message = await chat.turn(task.messages)
    while message.tool_calls and not chat.truncated:
        message = await chat.turn(await answer_calls(message, tools, chat))
