"""Rewards of the agents' runs; graders import nothing heavier than this."""

from __future__ import annotations

from treadle.types import Trajectory


def used_the_tool(trajectory: Trajectory) -> float:
    """Half for a call, half for an answer that says what the tool said."""
    results = [m.content for m in trajectory.messages if m.role == "tool"]
    right = bool(results) and trajectory.answer.strip() == results[-1]
    return 0.5 * bool(results) + 0.5 * right


def written(trajectory: Trajectory) -> str:
    """What the policy wrote, over all branches."""
    return "".join(n.message.content for n in trajectory.nodes if n.party == "policy" and n.message)


def digits(trajectory: Trajectory) -> float:
    """Share of digits in it."""
    text = written(trajectory)
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def letters(trajectory: Trajectory) -> float:
    """Depends on what was sampled, so that a random model's groups differ inside."""
    return (sum(map(ord, written(trajectory))) % 7) / 7
