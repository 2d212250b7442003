"""What a turn may ask for: one set of rules for every sampler, whatever it samples with.

Guarantees: what passes can be computed as it is asked: nothing is rounded, no number is too small
or too large for float32 and the integers of a batch, no id is outside of the vocabulary; what does
not is refused by the name of the parameter, with its value and the rule.

Takes: parameters and ids from a caller. Gives: the ids as integers, or an error. Pure.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from treadle.errors import ConfigError, SamplerError
from treadle.types import MIN_TEMPERATURE, SamplingParams

MAX_TOP_K = 2**31 - 1
"""Larger than any vocabulary; more would not fit the integers of a batch."""
LOGPROB_SLACK = 1e-3
"""Nats above 0 that rounding may give a logprob of a near-certain token."""


def check_params(params: SamplingParams) -> None:
    """Raises ConfigError naming the parameter, its value and the rule."""
    rules = (
        ("max_new_tokens", int, lambda v: v >= 1, "an integer >= 1"),
        (
            "temperature",
            float,
            lambda v: v == 0 or v >= MIN_TEMPERATURE,
            f"0 (greedy) or a finite number >= {MIN_TEMPERATURE:g}",
        ),
        ("top_p", float, lambda v: 0 < v <= 1, "in (0, 1] (1 = off)"),
        ("top_k", int, lambda v: 0 <= v <= MAX_TOP_K, f"in 0..{MAX_TOP_K} (0 = off)"),
        ("seed", int, lambda v: True, "an integer"),
        ("deadline_s", float, lambda v: v > 0, "finite seconds > 0"),
    )
    for name, kind, holds, rule in rules:
        value = getattr(params, name)
        typed = isinstance(value, int | kind) and not isinstance(value, bool)
        if not (typed and (kind is int or _is_finite(value)) and holds(value)):
            raise ConfigError(f"sampling parameter `{name}` must be {rule}, got {value!r}")
    if params.experts not in ("", "full", "delta"):
        raise ConfigError(
            f"sampling parameter `experts` must be `full`, `delta` or empty, got {params.experts!r}"
        )
    if not isinstance(params.stop, tuple | list) or not all(map(_is_text, params.stop)):
        raise ConfigError(
            "sampling parameter `stop` must be a tuple of non-empty strings that UTF-8 can hold, "
            f"got {params.stop!r}"
        )


def check_score(ids: Sequence[int], start: int, temperature: float) -> None:
    """Raises ConfigError: `start` is no position that can be scored, or the temperature cannot."""
    if isinstance(start, bool) or not isinstance(start, int) or not 1 <= start <= len(ids):
        raise ConfigError(f"`start` must be in 1..{len(ids)}, got {start!r}")
    typed = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not (typed and _is_finite(temperature) and temperature >= MIN_TEMPERATURE):
        raise ConfigError(
            f"`temperature` must be a finite number >= {MIN_TEMPERATURE:g}, got {temperature!r}"
        )


def as_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """The ids as Python's integers. Raises SamplerError when one is not an integer."""
    try:
        return tuple(map(operator.index, ids))
    except TypeError:
        raise SamplerError(
            f"ids must be integers, got {_odd(ids)}", hint="encode text with the model's tokenizer"
        ) from None


def check_ids(ids: Sequence[int], vocab: int | None) -> None:
    """Raises SamplerError when there is no id, or one that the model has no embedding for.

    Args:
        vocab: ids that the model has; None = not known here, and no id is below 0.
    """
    if not ids:
        raise SamplerError("the prompt is empty: a model needs at least one token to continue")
    low, high = min(ids), max(ids)
    if low < 0 or (vocab is not None and high >= vocab):
        bad = low if low < 0 else high
        known = "0 or above" if vocab is None else f"in the vocabulary 0..{vocab - 1}"
        raise SamplerError(
            f"id {bad} at position {list(ids).index(bad)} of {len(ids)} is not {known}",
            hint="was the prompt encoded with another model's tokenizer?",
        )


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_text(value: object) -> bool:
    """Whether text that a tokenizer decoded can contain it."""
    try:
        return isinstance(value, str) and len(value.encode()) > 0
    except UnicodeEncodeError:
        return False


def _odd(ids: object) -> str:
    """The first of the ids that is no integer, and where it is."""
    if isinstance(ids, Sequence):
        for i, value in enumerate(ids):
            try:
                operator.index(value)
            except TypeError:
                return f"{value!r} at position {i} of {len(ids)}"
    return repr(ids)
