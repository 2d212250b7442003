"""Packing: rows to micro-batches of a bounded number of tokens, shared prompts stored once.

Guarantees:
- every sample is in exactly one micro-batch, every trained token in it exactly once, with its own
  behaviour logprob, advantage, weight, temperature and version;
- a micro-batch holds at most `micro_tokens` packed tokens, unless one row alone is longer: it then
  stands alone and a warning names it. Nothing is ever cut;
- rows of different groups share no segment, so no token can attend to a neighbour;
- the result is a function of the samples and their order.

    rows of a group   [p q r | a b]      segments   0: p q r      parent None
                      [p q r | c]                   1: a b        parent 0
                                                    2: c          parent 0
    packed ids        p q r a b c        targets    a b c   (the trained tokens)
                      0 1 2 3 4 5        index      2 3 2   (packed place of the token before each)

Takes: Samples. Gives: MicroBatches of numpy arrays; torch is not needed here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.batch.tree import PromptTree, build_layout
from treadle.batch.weights import token_weights
from treadle.errors import ContractError
from treadle.types import Layout, Sample

log = logging.getLogger(__name__)

LARGEST = float(np.finfo(np.float32).max)
"""What a micro-batch can hold."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """What one forward and backward sees: N packed tokens of which n are predicted and trained."""

    ids: NDArray[np.int64]
    """[N] token ids, segment after segment."""
    layout: Layout
    """Which of them continue which."""
    index: NDArray[np.int64]
    """[n] packed place of the token whose hidden state predicts the target; rows that share a
    prompt share the place before their first completion token."""
    targets: NDArray[np.int64]
    """[n] the trained ids."""
    behaviour: NDArray[np.float32]
    """[n] log mu(target) in nats; NaN for demonstrations, which were not sampled."""
    advantage: NDArray[np.float32]
    """[n]"""
    weight: NDArray[np.float32]
    """[n] what the token's loss is multiplied by; its denominators are those of the whole step."""
    prox: NDArray[np.float32]
    """[n] the trainer's log-probability by the weights that sampled; NaN where not measured."""
    temperature: NDArray[np.float32]
    """[n] sampling temperature."""
    version: NDArray[np.int64]
    """[n] policy version that sampled the target; -1 for demonstrations."""
    overtaken: NDArray[np.bool_]
    """[n] its prefix is in part of older weights than itself, as `Sample.overtaken`."""
    row: NDArray[np.int64]
    """[n] index of the target's sample in the sequence that was packed."""
    sequence: NDArray[np.int64]
    """[n] the same, counted from 0 within this micro-batch: a row is never cut over two."""
    position: NDArray[np.int64]
    """[n] index of the target in its sample's ids."""

    @property
    def num_tokens(self) -> int:
        """N: what memory and time of a micro-batch depend on."""
        return len(self.ids)

    @property
    def num_trained(self) -> int:
        """n"""
        return len(self.targets)


def pack(
    samples: Sequence[Sample], *, micro_tokens: int, weights: Sequence[float] | None = None
) -> list[MicroBatch]:
    """Pack by groups, first fit in the order of the samples.

    Rows of one group (equal `ordinal`) form a tree over their prompts, the tokens before the first
    trained one; each distinct stretch is stored once. A group that does not fit into
    `micro_tokens` is split between rows, its prompt repeated.

    Args:
        samples: rows of one step, any order; each has a trained token and trained[0] is False.
        micro_tokens: packed tokens per micro-batch, shared prompts counted once.
        weights: of each sample's trained tokens, by `token_weights` over the whole step; None =
            these samples are the whole step, and every token weighs the same.

    Raises:
        ContractError: fields of a sample differ in length, no token is trained, the first is, or
            a trained token has no advantage, or one beyond float32.
    """
    for sample in samples:
        _check(sample)
    if weights is None:
        weights = token_weights(samples, "token_mean")
    elif len(weights) != len(samples):
        raise ContractError(f"{len(samples)} samples came with {len(weights)} weights")
    groups: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        groups.setdefault(sample.ordinal, []).append(row)

    bins: list[list[list[int]]] = []
    room: list[int] = []
    for rows in groups.values():
        for part, cost in _split(samples, rows, micro_tokens):
            place = next((i for i, left in enumerate(room) if cost <= left), len(bins))
            if place == len(bins):
                bins.append([])
                room.append(micro_tokens)
            bins[place].append(part)
            room[place] -= cost
    return [_micro_batch(samples, weights, parts) for parts in bins]


def _split(
    samples: Sequence[Sample], rows: list[int], micro_tokens: int
) -> list[tuple[list[int], int]]:
    """Runs of rows of one group with their packed tokens, each within budget where possible."""
    parts: list[tuple[list[int], int]] = []
    tree, part, cost = PromptTree(), list[int](), 0
    for row in rows:
        ids, prompt = samples[row].ids, _prompt(samples[row])
        added = len(ids) - tree.shared(prompt)
        if part and cost + added > micro_tokens:
            parts.append((part, cost))
            tree, part, cost, added = PromptTree(), [], 0, len(ids)
        if added > micro_tokens and not part:
            log.warning(
                "a row of %d tokens (trajectory %s) is longer than micro_tokens = %d: it is "
                "trained alone and needs more memory than planned",
                len(ids),
                samples[row].trajectory_id,
                micro_tokens,
            )
        tree.add(prompt)
        part.append(row)
        cost += added
    parts.append((part, cost))
    return parts


def _micro_batch(
    samples: Sequence[Sample], weights: Sequence[float], parts: list[list[int]]
) -> MicroBatch:
    rows = [row for part in parts for row in part]
    layout, places = build_layout(
        [[(samples[row].ids, len(_prompt(samples[row]))) for row in part] for part in parts]
    )
    ids = np.zeros(layout.num_tokens, dtype=np.int64)
    for row, place in zip(rows, places, strict=True):
        ids[place] = samples[row].ids
    trained = [np.flatnonzero(samples[row].trained) for row in rows]
    counts = [len(t) for t in trained]

    def floats(values: Sequence[Sequence[float]]) -> NDArray[np.float32]:
        """Per-token values of each row, at its trained tokens."""
        columns = [np.asarray(v, dtype=np.float32)[t] for v, t in zip(values, trained, strict=True)]
        return np.concatenate(columns)

    def ints(values: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        columns = [np.asarray(v, dtype=np.int64)[t] for v, t in zip(values, trained, strict=True)]
        return np.concatenate(columns)

    def per_row(values: Sequence[float]) -> NDArray[np.float32]:
        return np.repeat(np.asarray(values, dtype=np.float32), counts)

    chosen = [samples[row] for row in rows]
    return MicroBatch(
        ids=ids,
        layout=layout,
        index=np.concatenate([p[t - 1] for p, t in zip(places, trained, strict=True)]),
        targets=ints([sample.ids for sample in chosen]),
        behaviour=floats([sample.logprobs for sample in chosen]),
        advantage=floats([sample.advantages for sample in chosen]),
        weight=per_row([weights[row] for row in rows]),
        prox=floats([s.prox_logprobs or (math.nan,) * len(s.ids) for s in chosen]),
        temperature=per_row([sample.temperature for sample in chosen]),
        version=ints([sample.versions for sample in chosen]),
        overtaken=ints([s.overtaken or (False,) * len(s.ids) for s in chosen]).astype(np.bool_),
        row=np.repeat(np.asarray(rows, dtype=np.int64), counts),
        sequence=np.repeat(np.arange(len(rows), dtype=np.int64), counts),
        position=np.concatenate(trained).astype(np.int64),
    )


def _prompt(sample: Sample) -> tuple[int, ...]:
    return sample.ids[: sample.trained.index(True)]


def _check(sample: Sample) -> None:
    fields = (sample.ids, sample.trained, sample.logprobs, sample.versions, sample.advantages)
    optional = [x for x in (sample.prox_logprobs, sample.overtaken) if x]
    lengths = [len(x) for x in (*fields, *optional)]
    if len(set(lengths)) != 1:
        raise ContractError(
            f"sample of trajectory {sample.trajectory_id}: ids, trained, logprobs, versions, "
            f"advantages (and prox_logprobs, overtaken) have lengths {lengths}, expected one length"
        )
    if not any(sample.trained):
        raise ContractError(
            f"sample of trajectory {sample.trajectory_id} ({len(sample.ids)} tokens) has no "
            "trained token: it would be computed for nothing"
        )
    if sample.trained[0]:
        raise ContractError(
            f"sample of trajectory {sample.trajectory_id}: its first token is marked as trained, "
            "but nothing precedes it that could predict it"
        )
    missing = [
        t
        for t, a in enumerate(sample.advantages)
        if sample.trained[t] and not abs(a) <= LARGEST  # not so for NaN
    ]
    if missing:
        raise ContractError(
            f"sample of trajectory {sample.trajectory_id}: trained token {missing[0]} of "
            f"{len(sample.ids)} has advantage {sample.advantages[missing[0]]}",
            hint="an estimator gives every trained token an advantage that float32 can hold",
        )
