"""Arguments that several commands take, and what they accept.

Takes: a parser. Gives: arguments; a value that is not accepted is a usage error.
"""

from __future__ import annotations

import argparse
import math

from treadle.types import MIN_TEMPERATURE

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def add_set(parser: argparse.ArgumentParser, example: str) -> None:
    """`--set KEY=VALUE`, any number of times, as `settings`."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help=f"override a setting, e.g. --set {example}",
    )


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a number >= 1")
    return int(text)


def count(text: str) -> int:
    """A whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"`{text}` is not a number >= 0")
    return int(text)


def temperature(text: str) -> float:
    """0, or a finite number that is not too small to divide by."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value != 0 and not MIN_TEMPERATURE <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"`{text}` is neither 0 nor a number >= {MIN_TEMPERATURE:g}"
        )
    return value


def age(text: str) -> float:
    """Seconds of "90s", "30m", "12h", "7d" or "2w"."""
    number, unit = text[:-1], text[-1:]
    if unit not in UNITS_S or not number.replace(".", "", 1).isdecimal():
        raise argparse.ArgumentTypeError(
            f"`{text}` is not an age: a number and one of {', '.join(UNITS_S)}, e.g. 7d"
        )
    return float(number) * UNITS_S[unit]
