"""Reward functions that a config can name.

    tasks.0.reward = "treadle.reward.builtin:shaped"

Takes: a Trajectory whose `reward.parts` holds the task set's own scores. Gives: a number.
"""

from __future__ import annotations

from treadle.errors import RewardError
from treadle.tasks.text import as_number
from treadle.types import Trajectory

FORM = 0.2
"""For a reply that reads like an answer, right or wrong: a number where the answer is one, else as
many words as the answer has."""

SAID = 0.2
"""On top of it for a reply that ends in the right answer; half of it when that is far from being
the answer alone."""


def shaped(trajectory: Trajectory) -> float:
    """1 for a strict answer, at most FORM + SAID for anything else.

    With s the strict score, l the lenient one, f = 1 if the reply reads like an answer, and
    c = min(1, len(answer) / len(reply)) in characters:

        R = s + (1 - s) * (FORM * f + SAID * l * (1 + c) / 2)

    Small models begin with almost no strict successes, so a strict reward has nothing to compare.
    Credit for a lenient success alone teaches to write the whole equation, where that credit is
    easiest, and by the time it pays no more the bare answer is never sampled. Credit for the form
    is learnt first, in a dozen steps; then all replies of a group have it, it cancels out of the
    advantage, and what is left is the strict score.

    Raises RewardError: the task set gives no "score".
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
    credit = SAID * parts.get("lenient", 0.0) * (1 + closeness) / 2
    if _reads_like(reply, gold):
        credit += FORM
    return parts["score"] + (1 - parts["score"]) * credit


def _reads_like(reply: str, gold: str) -> bool:
    if as_number(gold) is not None:
        return as_number(reply) is not None
    return reply != "" and len(reply.split()) == len(gold.split())
