"""One prompt, one reply.

Takes: a task. Gives: a conversation of one turn.
"""

from __future__ import annotations

from treadle.harness.chat import Chat, Limits
from treadle.tools import Tools
from treadle.types import Task


async def single_turn(task: Task, chat: Chat, tools: Tools, limits: Limits) -> None:
    """Show the task, take the reply as the answer. Tools are neither shown nor called."""
    await chat.turn(task.messages)
