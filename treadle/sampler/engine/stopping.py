"""When a turn ends, and why.

Guarantees: the reason alone says whether an answer is finished (EOS, STOP_STRING), truncated
(LENGTH) or lost (ABORTED); the ids are those that were drawn, with nothing cut and nothing
appended, also where a stop string ended the turn in the middle of a token.

Takes: the ids a turn has drawn. Gives: a StopReason, or None to go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treadle.types import SamplingParams, StopReason

_SLACK = 8
"""Tokens decoded in front of the longest possible match: a tokenizer may spell the first token
of a text differently (a leading space, the tail of a split character)."""


class StopRule:
    """Stop ids of the model, stop strings and the length limit of a request."""

    def __init__(self, stop_ids: Sequence[int], tokenizer: Any) -> None:
        self._stop_ids = frozenset(stop_ids)
        self._tokenizer = tokenizer

    def reason(self, ids: Sequence[int], first: int, params: SamplingParams) -> StopReason | None:
        """Why the turn ends with the last of `ids`; None when it does not.

        Args:
            ids: the prompt and what was drawn.
            first: index of the first drawn id.
        """
        if ids[-1] in self._stop_ids:
            return StopReason.EOS
        if params.stop and self._says(ids, first, params.stop):
            return StopReason.STOP_STRING
        if len(ids) - first >= params.max_new_tokens:
            return StopReason.LENGTH
        return None

    def _says(self, ids: Sequence[int], first: int, stop: Sequence[str]) -> bool:
        # A token is at least one byte of text, and an earlier match would have stopped the turn,
        # so a match lies in this many last tokens.
        window = max(len(s.encode()) for s in stop) + _SLACK
        tail = ids[max(first, len(ids) - window) :]
        text = self._tokenizer.decode(list(tail), skip_special_tokens=False)
        return any(s in text for s in stop)
