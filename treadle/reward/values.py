"""From what a grader returned to a Reward. Only a finite number is a reward.

Takes: a worker's reply. Gives: Reward, unscored with the reason where the reply is no number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from treadle.errors import ErrorRecord, RewardError, record
from treadle.types import Reward, TokenSpan, Trajectory

MAX_ABS_REWARD = 1e6
"""A larger number is taken for a mistake of units; advantages of it would drown all others."""


FLAGGED = "flagged"
"""The entry of a returned mapping that holds spans of tokens, [[node id, start, end], ...]."""


def failed(name: str, what: str, cause: Exception | None = None, *, hint: str = "") -> Reward:
    """An unscored reward: `reward NAME WHAT`."""
    error = RewardError(f"reward {name} {what}", hint=hint)
    error.__cause__ = cause
    return Reward(value=None, error=record(error, f"reward {name}"))


def reward_of(name: str, reply: Mapping[str, Any], trajectory: Trajectory) -> Reward:
    """The reward of `trajectory` that a worker's last reply holds.

    A number (True and False count as 1 and 0) is the value. Of a mapping of numbers, "reward"
    is the value, else "score"; all but "reward" become `parts`, and "flagged" holds spans of the
    trajectory's tokens, [node id, start, end] each. Anything else, NaN, infinities, numbers beyond
    MAX_ABS_REWARD and spans outside of their node are unscored.
    """
    if "raised" in reply:
        when = "could not be loaded in a worker:" if reply["event"] == "unloaded" else "raised"
        said = f"{reply['raised']}: {reply['message']}" if reply["message"] else reply["raised"]
        return Reward(
            value=None,
            error=ErrorRecord(
                kind="RewardError",
                where=f"reward {name}",
                message=f"reward {name} {when} {said}",
                hint=reply["hint"],
                cause=reply["cause"],
            ),
        )
    value = reply["value"]
    if not isinstance(value, Mapping) or "?" in value:
        wrong = _wrong(value)
        if wrong:
            return failed(name, f"returned {wrong}", hint=_hint(value))
        return Reward(value=float(cast(float, value)))
    if "reward" not in value and "score" not in value:
        return failed(
            name,
            f"returned a mapping without `reward` or `score`; keys: {', '.join(value) or 'none'}",
            hint='return {"score": 1.0, "other": 0.5}; every entry is recorded',
        )
    value = dict(value)
    spans = value.pop(FLAGGED, [])
    if wrong := _wrong_spans(spans, trajectory):
        return failed(
            name,
            f"returned {wrong} as `{FLAGGED}`",
            hint="return a list of (node.id, start, end); 0 and len(node.ids) flag a whole turn",
        )
    for part, number in value.items():
        wrong = _wrong(number)
        if wrong:
            return failed(name, f"returned {wrong} as `{part}`", hint=_hint(number))
    parts = {part: float(number) for part, number in value.items()}
    reward = parts.pop("reward", parts.get("score"))
    flagged = tuple(TokenSpan(*map(int, span)) for span in spans)
    return Reward(value=reward, parts=parts, flagged=flagged)


def _wrong_spans(spans: Any, trajectory: Trajectory) -> str:
    """What is wrong with the spans that a grader returned; empty when all are good."""
    if not isinstance(spans, list):
        return _described(spans)
    sizes = {node.id: len(node.ids) for node in trajectory.nodes}
    for span in spans:
        if not (
            isinstance(span, list)
            and len(span) == 3
            and all(isinstance(n, int | float) and float(n).is_integer() for n in span)
        ):
            return _described(span)
        node, start, end = map(int, span)
        if not 0 <= start < end <= sizes.get(node, -1):
            of = f"has {sizes[node]} tokens" if node in sizes else "does not exist"
            return f"tokens {start}..{end} of node {node}, which {of},"
    return ""


def _described(value: Any) -> str:
    said = value.get("?", "a mapping") if isinstance(value, Mapping) else repr(value)
    return str(said)[:80]


def _wrong(value: Any) -> str:
    """What is wrong with a value as a reward; empty when it is one."""
    if value is None:
        return "None"
    if isinstance(value, str):
        return f"text {value[:60]!r}"
    if isinstance(value, Mapping):
        return str(value.get("?", "a mapping"))
    if not math.isfinite(value):
        return str(float(value))
    if abs(value) > MAX_ABS_REWARD:
        return f"{value:g}, beyond +-{MAX_ABS_REWARD:g}"
    return ""


def _hint(value: Any) -> str:
    if value is None:
        return "does every path of the function end in a return? To leave it unscored, raise"
    if isinstance(value, str):
        return "return a number: float(...)"
    if isinstance(value, float) and not math.isfinite(value):
        return "look for a division by zero or a logarithm of zero; to leave it unscored, raise"
    return "return a finite number"
