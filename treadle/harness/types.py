"""The shape of a harness: an async function that drives one conversation.

Takes: a task, a chat, tools, limits. Gives: nothing; it returns when the task is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from treadle.harness.chat import Chat, Limits
from treadle.tools import Tools
from treadle.types import Task

Harness = Callable[[Task, Chat, Tools, Limits], Awaitable[None]]
"""Returning means done; LimitExceeded (raised by the chat) means cut; anything else failed."""
