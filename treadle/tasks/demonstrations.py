"""What a task set of demonstrations gives beside its tasks: what is to be learnt of each.

Guarantees: a demonstration is a function of its task alone; it is held either as messages, which
the renderer turns into tokens, or as the nodes of a rollout, whose tokens are never encoded again.

Takes: a Task. Gives: a Demonstration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from treadle.types import Message, Node, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """What follows the messages of a task: `turns`, or in their place `nodes`."""

    turns: tuple[Message, ...] = ()
    """From the first assistant turn that is learnt to the last; every assistant turn here is
    learnt, all other messages are shown."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Specs that the prompt shows."""
    nodes: tuple[Node, ...] = ()
    """A rollout as it was sampled, prompt included; its trained tokens are learnt."""


@runtime_checkable
class Demonstrations(Protocol):
    """A Taskset that demonstrates; `grade` and `gold` of one are never asked."""

    def demonstration(self, task: Task) -> Demonstration:
        """Of a task that this set gave."""
        ...
