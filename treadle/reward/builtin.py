"""Reward functions that a config can name.

    tasks.0.reward = "treadle.reward.builtin:shaped"

Takes: a Trajectory whose `reward.parts` holds the task set's own scores. Gives: a number.
"""

from __future__ import annotations

from treadle.errors import RewardError
from treadle.types import Trajectory

SAID = 0.1
"""For a reply that ends in the right answer, however it got there."""

CLOSE = 0.4
"""On top of it, as the reply comes close to being the answer alone."""


def shaped(trajectory: Trajectory) -> float:
    """1 for a strict answer, at most a half for a right answer in the wrong form, else 0.

    With s the strict score, l the lenient one, and c = len(answer) / len(reply) in characters,
    at most 1:  R = s + (1 - s) * l * (SAID + CLOSE * c).

    Small models begin with almost no strict successes, so a strict reward has nothing to
    compare. Flat half credit for a lenient one starts learning but teaches to write the whole
    equation, where credit is easiest. Here every step from "7 + 5 = 12, so it is 12." to "12"
    pays more than the one before it, and nothing but the strict form pays over a half.

    Raises RewardError: the task set gives no "score", or no "lenient" where the task has an
    answer.
    """
    parts = trajectory.reward.parts
    if "score" not in parts:
        raise RewardError(
            f"`shaped` needs the scores of a task set, but {trajectory.task.taskset} gave none",
            hint="name it as tasks.N.reward of a task set that can grade",
        )
    gold = str(trajectory.task.data.get("answer", ""))
    reply = trajectory.answer.strip()
    closeness = min(1.0, len(gold) / len(reply)) if reply else 0.0
    credit = parts.get("lenient", 0.0) * (SAID + CLOSE * closeness)
    return parts["score"] + (1 - parts["score"]) * credit
