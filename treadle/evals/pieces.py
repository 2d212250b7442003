"""Token ids as pieces of text, where the run's tokenizer is on this machine.

Guarantees: nothing is downloaded and nothing imports torch; the pieces of a turn are shown only
when together they hold the text that the run stored for it, so that another model's tokenizer
under the same name cannot speak for this one.

Takes: the model's name in the run's config. Gives: one piece per id, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from treadle.models import catalog, hub

Pieces = Callable[[Sequence[int], str], list[str] | None]
"""(ids, stored text) -> one piece per id; None when they do not fit."""


def pieces_of(model: str) -> Pieces:
    """How to read the ids of a run of this model; one that never knows when it is not here."""
    folder = _folder(model)
    file = None if folder is None else folder / "tokenizer.json"
    if file is None or not file.is_file():
        return lambda ids, text: None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the library raises plain Exception for a file that it cannot read
        return lambda ids, text: None

    def read(ids: Sequence[int], text: str) -> list[str] | None:
        try:
            whole = tokenizer.decode(list(ids), skip_special_tokens=False)
            if text.strip() not in whole:
                return None
            return _split(lambda n: tokenizer.decode(list(ids[:n]), skip_special_tokens=False), ids)
        except (OverflowError, TypeError):
            return None

    return read


def _split(prefix: Callable[[int], str], ids: Sequence[int]) -> list[str]:
    """What each id adds to the text before it; the last byte of a character brings all of it."""
    out, before = [], ""
    for n in range(1, len(ids) + 1):
        after = prefix(n).rstrip("\ufffd")
        out.append(after[len(before) :] if after.startswith(before) else "")
        before = after if len(after) >= len(before) else before
    return out


def _folder(model: str) -> Path | None:
    path = Path(model)
    if path.is_dir():
        return path
    if model in catalog.KNOWN:
        return catalog.present(catalog.KNOWN[model])
    return hub.cached(model)
