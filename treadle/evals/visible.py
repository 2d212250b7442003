"""Text that a model, a task or a grader wrote, made safe to look at.

Guarantees: nothing that is returned can move a cursor, change the direction of the text around
it, or fail to be encoded: what does not print is shown as its escape (`\\x1b`, `\\u202e`).
Joiners stay, because emoji and several scripts need them. Markup is not touched: escaping is the
page's own business.

Takes: any str. Gives: a str of printable characters.
"""

from __future__ import annotations

import unicodedata

_KEPT = "\n\t\u200c\u200d"


def visible(text: str) -> str:
    """Line breaks, tabs and blanks stay; what else does not print is spelled out."""
    if text.isprintable():
        return text
    return "".join(
        c
        if c.isprintable() or c in _KEPT or unicodedata.category(c) == "Zs"
        else c.encode("unicode_escape").decode()
        for c in text
    )


def one_line(text: str, limit: int = 0) -> str:
    """On one line, at most `limit` characters when that is not 0."""
    line = visible(" ".join(text.split()))
    return line if not limit or len(line) <= limit else line[: limit - 1] + "\u2026"


def quoted(text: str, limit: int = 80) -> str:
    """In quotes, on one line with its line breaks spelled out, at most `limit` characters."""
    text = text if len(text) <= limit else text[: limit - 1] + "\u2026"
    return '"' + visible(text).replace("\n", "\\n").replace("\t", "\\t").replace('"', '\\"') + '"'


def middle_out(text: str, limit: int) -> str:
    """At most about `limit` characters: the beginning, how much was left out, the end."""
    if len(text) <= limit:
        return text
    head = limit * 2 // 3
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - limit:,} characters ...]\n{text[-tail:]}"
