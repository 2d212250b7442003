"""Programs over a policy: each drives a Chat until its task is done."""

from typing import Literal

from treadle.harness.chat import Chat, Limits
from treadle.harness.environment import environment_loop
from treadle.harness.single_turn import single_turn
from treadle.harness.tool_calls import answer_calls
from treadle.harness.tool_loop import tool_loop
from treadle.harness.types import Harness


def harness_named(name: Literal["single_turn", "tool_loop"]) -> Harness:
    """The harness that `rollout.harness` names."""
    return {"single_turn": single_turn, "tool_loop": tool_loop}[name]


__all__ = [
    "Chat",
    "Harness",
    "Limits",
    "answer_calls",
    "environment_loop",
    "harness_named",
    "single_turn",
    "tool_loop",
]
