"""What a server's logprobs are: tested, not believed.

One next-token distribution is asked for twice, at temperatures 1 and 2. The differences between
candidates halve when logprobs are those of the tempered distribution, and stay when they are not;
the probabilities of the candidates sum to at most 1 unless the numbers are no logprobs at all.

Takes: the best candidates of one position. Gives: a Mode. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

from treadle.errors import SamplerError

PROBE_TEMPERATURE = 2.0
NUM_CANDIDATES = 20
"""The default limit of both servers or below it."""
SUM_SLACK = 0.02
"""Rounding of a bfloat16 head."""


class Mode(StrEnum):
    TEMPERED = "tempered"
    """Of the distribution that is drawn from, at its temperature."""
    RAW = "raw"
    """Always at temperature 1."""


def tell_mode(cold: Mapping[int, float], hot: Mapping[int, float], name: str) -> Mode:
    """The mode, from logprobs by id at temperature 1 (`cold`) and PROBE_TEMPERATURE (`hot`).

    Raises SamplerError: the numbers are no logprobs, or of neither mode.
    """
    for logprobs in (cold, hot):
        mass = math.fsum(math.exp(min(x, 50.0)) for x in logprobs.values())
        if len(logprobs) < 2 or not mass <= 1 + SUM_SLACK:
            raise SamplerError(
                f"{name}: the {len(logprobs)} best candidates have a probability of {mass:.3g}: "
                "these are no logprobs",
                hint="start vLLM with --logprobs-mode processed_logprobs",
            )
    both = sorted(cold.keys() & hot.keys(), key=lambda i: -cold[i])
    if len(both) < 2:
        raise SamplerError(f"{name}: the best candidates changed with the temperature")
    first, last = both[0], both[-1]
    gap = cold[first] - cold[last]
    if gap < 0.5:
        raise SamplerError(f"{name}: the probe's candidates are too alike ({gap:.3g} nats)")
    ratio = (hot[first] - hot[last]) / gap
    if abs(ratio - 1 / PROBE_TEMPERATURE) < 0.1:
        return Mode.TEMPERED
    if abs(ratio - 1) < 0.1:
        return Mode.RAW
    raise SamplerError(
        f"{name}: at temperature {PROBE_TEMPERATURE:g} differences of logprobs scale by "
        f"{ratio:.3g}; expected {1 / PROBE_TEMPERATURE:g} or 1",
        hint="does the server apply penalties or a bias of its own?",
    )
