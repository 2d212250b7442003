"""Credit within a node: spans of tokens that a reviewer flagged as bad.

Guarantees: a flagged token never gains: where its advantage is above 0 it leaves the mask (NaN),
where it is below 0 the blame is amplified; a token in several spans is changed once; all other
tokens keep their advantage.

Takes: Groups, advantages, spans. Gives: advantages per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from treadle.advantage.tokens import Advantage, map_tokens
from treadle.errors import ContractError
from treadle.types import Group, TokenSpan, Trajectory

AMPLIFY = 2.0
"""Factor of the blame of a flagged token; ours, the source names none."""


def span_credit(
    groups: Sequence[Group],
    values: Mapping[str, Advantage],
    spans: Mapping[str, Sequence[TokenSpan]],
    *,
    amplify: float = AMPLIFY,
) -> dict[str, Advantage]:
    """The advantages, with flagged tokens of good runs masked and of bad runs amplified.

    Good and bad is the sign of the token's own advantage; at 0 nothing changes.

    Args:
        spans: by trajectory id.
        amplify: >= 1.

    Raises ContractError: a span lies outside of its node, or of every trajectory of the groups.

    Source: token-level credit of MiMo-V2.6 (arXiv:2610.11959).
    """
    out = dict(values)
    members = {t.id: t for group in groups for t in group.scored}
    for id, flagged in spans.items():
        if id not in members:
            raise ContractError(f"spans of trajectory {id}, which does not count in these groups")
        marked = _marked(members[id], flagged)
        out[id] = map_tokens(
            members[id],
            values[id],
            lambda node, i, x, marked=marked: (
                x if (node.id, i) not in marked or x == 0 else math.nan if x > 0 else amplify * x
            ),
        )
    return out


def _marked(trajectory: Trajectory, spans: Sequence[TokenSpan]) -> set[tuple[int, int]]:
    sizes = {node.id: len(node.ids) for node in trajectory.nodes}
    for span in spans:
        if not 0 <= span.start < span.end <= sizes.get(span.node, -1):
            raise ContractError(
                f"trajectory {trajectory.id}: span {span.start}..{span.end} lies outside of node "
                f"{span.node}, which has {sizes.get(span.node, 'no')} tokens"
            )
    return {(span.node, i) for span in spans for i in range(span.start, span.end)}
