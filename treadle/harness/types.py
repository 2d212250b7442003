"""The shape of a harness: an async function that drives one conversation.

Takes: a task, a chat, tools, limits. Gives: nothing; it returns when the task is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from treadle.harness.chat import Chat, Limits
from treadle.tools import Tools
from treadle.types import Task, Trajectory

Harness = Callable[[Task, Chat, Tools, Limits], Awaitable[None]]
"""Returning means done; LimitExceeded (raised by the chat) means cut; anything else failed."""


@runtime_checkable
class Handed(Protocol):
    """A harness that hands its trajectories to somebody outside, who cannot play one twice."""

    async def __call__(self, task: Task, chat: Chat, tools: Tools, limits: Limits) -> None: ...

    def again(self, trajectory: Trajectory, allowed: bool) -> bool:
        """Told of every try that has ended: is the same place to be tried again?"""
        ...
