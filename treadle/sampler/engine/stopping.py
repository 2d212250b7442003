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

    def reason(self, drawn: Sequence[int], params: SamplingParams) -> StopReason | None:
        """Why the turn ends with the last of `drawn`; None when it does not."""
        if drawn[-1] in self._stop_ids:
            return StopReason.EOS
        if params.stop and self._says(drawn, params.stop):
            return StopReason.STOP_STRING
        if len(drawn) >= params.max_new_tokens:
            return StopReason.LENGTH
        return None

    def _says(self, drawn: Sequence[int], stop: Sequence[str]) -> bool:
        # A token is at least one byte of text, and an earlier match would have stopped the turn,
        # so a match lies in this many last tokens.
        window = max(len(s.encode()) for s in stop) + _SLACK
        text = self._tokenizer.decode(list(drawn[-window:]), skip_special_tokens=False)
        return any(s in text for s in stop)
