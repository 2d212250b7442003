"""Attention over KV blocks, in torch: any device, any head count.

Guarantees: new keys and values are in the cache before a query of this pass reads them; a query
sees exactly the positions of its own sequence up to its own; the arithmetic is
`models.attention.core`, the same as in training, so both round alike.

Spans of one length, with tables of similar width, are one batched product. The query heads
of a key head are folded into the query length.

Takes: spans of packed tokens with their tables. Gives: a `forward.Attend`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.models.attention import MAX_QUERIES, core
from treadle.sampler.engine.blocks import BLOCK, blocks_for
from treadle.sampler.engine.kv import KvStore

MAX_KEYS = 1 << 16
"""Keys of one batch, padding included: bounds what is gathered from the cache at a time."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence."""

    first: int
    """Index of its first token in the packed vector of the pass."""
    count: int
    position: int
    """Position of its first token in its sequence."""
    blocks: Sequence[int]
    """The sequence's table; covers at least position + count."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Spans of one length, their tables padded to one width."""

    queries: Tensor
    """[B * T] packed indices."""
    keys: Tensor
    """[B * Hkv * K / BLOCK] rows of a layer's cache seen as [num_blocks * Hkv, BLOCK * D]."""
    mask: Tensor
    """[B, 1, T, K]: 0 or -inf."""
    shape: tuple[int, int, int]
    """B, T, K."""
    whole: bool
    """The batch is all tokens in order, one query each."""


class PagedAttend:
    """`forward.Attend` of one pass; [1, H, N, D] with N the sum of the spans."""

    def __init__(self, store: KvStore, spans: Sequence[Span]) -> None:
        self._store = store
        self._kv_heads = store.shape.kv_heads
        device, dtype = store.keys.device, store.keys.dtype
        self.num_tokens = sum(span.count for span in spans)
        rows = np.concatenate([_rows(span, self._kv_heads) for span in spans])
        self._new = torch.from_numpy(rows).to(device)
        self._batches = [
            _pad(batch, self._kv_heads, self.num_tokens, dtype, device)
            for batch in _batches(_cut(spans))
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        heads, dim = q.shape[1], q.shape[3]
        keys, values = self._store.keys[layer], self._store.values[layer]
        keys.view(-1, dim).index_copy_(0, self._new, k[0].transpose(0, 1).reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, self._new, v[0].transpose(0, 1).reshape(-1, dim))

        # A power of two commutes with rounding, and there are fewer queries than keys.
        exact = math.frexp(scale)[0] == 0.5
        queries = q[0].transpose(0, 1)
        if exact:
            queries = queries * scale
        out = torch.empty((self.num_tokens, heads, dim), dtype=q.dtype, device=q.device)
        for batch in self._batches:
            size, length, num_keys = batch.shape
            past_k = keys.view(-1, BLOCK * dim).index_select(0, batch.keys)
            past_v = values.view(-1, BLOCK * dim).index_select(0, batch.keys)
            if not exact:
                past_k.mul_(scale)
            mine = queries if batch.whole else queries.index_select(0, batch.queries)
            group = heads // self._kv_heads
            folded = mine.view(size, length, self._kv_heads, group, dim).permute(0, 2, 3, 1, 4)
            result = core(
                folded.reshape(size * self._kv_heads, group * length, dim),
                past_k.view(size * self._kv_heads, num_keys, dim),
                past_v.view(size * self._kv_heads, num_keys, dim),
                batch.mask,
            )
            result = result.view(size, self._kv_heads, group, length, dim).permute(0, 3, 1, 2, 4)
            if batch.whole:
                return result.reshape(1, self.num_tokens, heads, dim)
            out.index_copy_(0, batch.queries, result.reshape(size * length, heads, dim))
        return out[None]


def _rows(span: Span, kv_heads: int) -> NDArray[np.int64]:
    """Where the span's keys go: rows of a layer's cache seen as [num_blocks * Hkv * BLOCK, D]."""
    positions = np.arange(span.position, span.position + span.count)
    blocks = np.asarray(span.blocks, np.int64)[positions // BLOCK]
    heads = blocks[:, None] * kv_heads + np.arange(kv_heads)
    return (heads * BLOCK + (positions % BLOCK)[:, None]).ravel()


def _cut(spans: Sequence[Span]) -> list[Span]:
    """Long spans in pieces, so that few scores are computed to be masked."""
    return [
        Span(
            span.first + start,
            min(MAX_QUERIES, span.count - start),
            span.position + start,
            span.blocks,
        )
        for span in spans
        for start in range(0, span.count, MAX_QUERIES)
    ]


def _width(span: Span) -> int:
    return blocks_for(span.position + span.count)


def _batches(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans of one length and similar width together, in packed order where that is free."""
    if len({span.count for span in spans}) == 1:
        widest = max(map(_width, spans))
        total = sum(map(_width, spans))
        if widest * len(spans) <= 1.15 * total + 64 and widest * len(spans) * BLOCK <= MAX_KEYS:
            return [list(spans)]
    batches: list[list[Span]] = []
    used = 0
    for span in sorted(spans, key=lambda s: (s.count, _width(s)), reverse=True):
        if batches and batches[-1][0].count == span.count:
            padded = _width(batches[-1][0]) * (len(batches[-1]) + 1)
            if padded <= 1.15 * (used + _width(span)) + 64 and padded * BLOCK <= MAX_KEYS:
                batches[-1].append(span)
                used += _width(span)
                continue
        batches.append([span])
        used = _width(span)
    return batches


def _pad(
    spans: Sequence[Span], kv_heads: int, num_tokens: int, dtype: torch.dtype, device: torch.device
) -> _Batch:
    size, length = len(spans), spans[0].count
    width = max(map(_width, spans))
    tables = np.zeros((size, width), np.int64)
    for i, span in enumerate(spans):
        tables[i, : _width(span)] = span.blocks[: _width(span)]
    keys = (tables[:, None, :] * kv_heads + np.arange(kv_heads)[None, :, None]).ravel()
    first = np.array([span.first for span in spans])
    queries = (first[:, None] + np.arange(length)).ravel()
    last = np.array([span.position for span in spans])[:, None] + np.arange(length)
    mask = np.where(np.arange(width * BLOCK) <= last[..., None], 0.0, -np.inf).astype(np.float32)
    return _Batch(
        queries=torch.from_numpy(queries).to(device),
        keys=torch.from_numpy(keys).to(device),
        mask=torch.from_numpy(mask)[:, None].to(device, dtype),
        shape=(size, length, width * BLOCK),
        whole=length == 1 and size == num_tokens and bool((queries == np.arange(size)).all()),
    )
