"""Reading text: when two texts are the same, which split a text belongs to, what a reply says.

Guarantees: the split of a text depends on the text alone (not on a seed, an order or a process),
so equal texts never straddle two splits, whatever else differs between two runs. Reading a reply
never raises and takes time linear in its length.

Takes: text. Gives: a digest, a split, a number, yes or no.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import deque
from datetime import date
from decimal import Decimal, InvalidOperation

from treadle.errors import DataError

SPLITS = ("train", "val", "test")

TRAIN_FRAC, VAL_FRAC = 0.8, 0.1
"""Shares of the distinct texts; the rest is test."""

NUMBER = re.compile(
    r"(?:(?<![\w.)\]])[-+])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
)
"""A sign counts only where it cannot be a minus between two operands: "10-5" ends in 5."""

_EDGE = ".,;:!?\"'`*()[]{}<>$#_~\u201c\u201d\u2018\u2019"
"""Stripped from both ends of a word before words are compared: quotes, fences, brackets, marks."""

_MINUS = {0x2212: "-", 0x2013: "-", 0xFF0D: "-"}


def normalise(text: str) -> str:
    """NFKC, case folded, runs of white space made one blank: what "equal text" means here."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def digest(text: str, size: int = 8) -> bytes:
    """BLAKE2b of the text as it stands; lone surrogates are hashed, not refused."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


def split_of(text: str) -> str:
    """The split of a text by the hash of its normalised form: 80% train, 10% val, 10% test."""
    share = int.from_bytes(digest("split/" + normalise(text)), "big") / 2**64
    if share < TRAIN_FRAC:
        return "train"
    return "val" if share < TRAIN_FRAC + VAL_FRAC else "test"


def split_by_date(text: str, published: str, test_from: date) -> str:
    """ "test" for what became public on `test_from` or later; the rest is train or val by text.

    A model whose training data ends before `test_from` cannot have seen the test split.

    Raises:
        DataError: `published` is not an ISO date.
    """
    if parse_date(published) >= test_from:
        return "test"
    share = int.from_bytes(digest("split/" + normalise(text)), "big") / 2**64
    return "train" if share < TRAIN_FRAC / (TRAIN_FRAC + VAL_FRAC) else "val"


def parse_date(text: str) -> date:
    """An ISO date; a time after it is ignored. Raises DataError."""
    try:
        return date.fromisoformat(text[:10])
    except (ValueError, TypeError):
        raise DataError(f"{text!r} is not a date", hint="write it as 2026-01-31") from None


def as_number(text: str) -> Decimal | None:
    """The number that `text` is (commas of thousands allowed), or None if it is anything else."""
    text = text.strip().translate(_MINUS)
    return _decimal(text) if NUMBER.fullmatch(text) else None


def last_number(text: str) -> Decimal | None:
    """The last number written in `text`: the usual place of a final answer."""
    found = deque(NUMBER.finditer(text.translate(_MINUS)), maxlen=1)
    return _decimal(found[0].group()) if found else None


def says(reply: str, gold: str) -> bool:
    """The lenient reading: does the reply *end* in the answer, whatever it wrote before?

    A numeric gold answer must be the last number of the reply ("7 + 5 = 12." says 12). Any other
    must be its last words, case, spacing and punctuation at the edges of words aside ("The
    answer is: **Yes**" says yes). A gold answer without any word must be the whole reply.
    """
    number = as_number(gold)
    if number is not None:
        return last_number(reply) == number
    wanted, words = _words(gold), _words(reply)
    if not wanted:
        return reply.strip() == gold.strip()
    return words[-len(wanted) :] == wanted


def _words(text: str) -> list[str]:
    return [word for raw in normalise(text).split() if (word := raw.strip(_EDGE))]


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
