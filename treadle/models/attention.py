"""Attention over a packed vector of tokens: a forest of segments, shared prefixes stored once.

Guarantees:
- a token sees the tokens of its ancestors' segments and, causally, its own segment; trees of one
  pack never see each other, and neither order nor padding changes what a token sees;
- the gradient of a shared prefix's keys and values is the sum over everything that reads them,
  taken in fp32;
- memory beyond q, k, v is bounded: scores are made per block of at most MAX_SCORES numbers,
  in forward and again in backward, and never kept.

How: every segment is cut into tiles of at most MAX_QUERIES tokens; a tile's keys are its path up
to its last token. Tiles of similar size are padded to one block, a batched product. The query
heads of one key head are folded into the query length (grouped-query attention without copies).
`core` is the arithmetic; the sampling engine uses the same, so that both round alike.

Takes: types.Layout. Gives: a `forward.Attend`.
"""

# autograd.Function takes any number of arguments; ours have names.
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from treadle.errors import ContractError
from treadle.types import Layout

MAX_QUERIES = 128
"""Tokens of a tile: a longer segment is cut, so that few masked scores are computed."""
MAX_SCORES = 1 << 23
"""Scores of a block, all heads together (16 MiB in bf16): beyond it a block is split."""


def core(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention of one padded block of B rows.

    Args:
        q: [B * Hkv, G * T, D], the G query heads of a key head folded into the query length.
        k: [B * Hkv, K, D], already multiplied by the scale.
        v: [B * Hkv, K, D].
        mask: [B, 1, T, K], added to the scores: 0 or -inf, in q's dtype.

    Returns:
        [B * Hkv, G * T, D]. Scores are rounded to q's dtype; the softmax is taken in fp32.
    """
    return torch.bmm(probabilities(q, k, mask), v)


def probabilities(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax of the scores, [B * Hkv, G * T, K]; arguments as `core`."""
    scores = torch.bmm(q, k.transpose(1, 2))
    if mask is not None:
        batch, _, queries, keys = mask.shape
        scores.view(batch, -1, queries, keys).add_(mask)
    return torch.softmax(scores, dim=-1)


# --------------------------------------------------------------------------- the plan


@dataclass(frozen=True, slots=True)
class _Tile:
    tokens: np.ndarray
    """Packed indices of its queries."""
    path: np.ndarray
    """Packed indices of its keys, from the root to its last query."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Tiles padded to one shape."""

    queries: Tensor
    """[B, T] packed indices; 0 where padded."""
    padded: Tensor
    """[B, T] bool, True where padded."""
    keys: Tensor
    """[B, K] packed indices; 0 where padded."""
    mask: Tensor
    """[B, 1, T, K] fp32: 0 where a query may see a key, else -inf."""


@dataclass(frozen=True, slots=True)
class _Heads:
    """The plan at one number of heads: indices into rows [token * head, D]."""

    queries: Tensor
    """Row of each query slot; slots run over blocks, then [B, Hkv, G, T]."""
    keys: Tensor
    """Row of each key slot; slots run over blocks, then [B, Hkv, K]."""
    padded: Tensor
    """Query slots that hold no token."""
    slot: Tensor
    """Query slot of each row."""
    masks: tuple[Tensor, ...]
    """Per block, in the compute dtype."""
    shapes: tuple[tuple[int, int, int, int, int], ...]
    """(B, Hkv, G, T, K) per block."""


class PackedAttend:
    """`forward.Attend` over one layout; [1, H, N, D] with N = layout.num_tokens.

    Raises:
        ContractError: the layout's segments do not tile 0..N-1, or a position is not its path's
            length, or a parent does not precede its child.
    """

    def __init__(self, layout: Layout, *, device: str | torch.device = "cpu") -> None:
        _check(layout)
        self._device = torch.device(device)
        self._num_tokens = layout.num_tokens
        self._blocks: list[_Block] | None = None
        self._tiles = _tiles(layout)
        self._plans: dict[tuple[int, int, torch.dtype], _Heads] = {}
        spans = [np.arange(s.position, s.position + s.length) for s in layout.segments]
        positions = np.empty(self._num_tokens, dtype=np.int64)
        for segment, span in zip(layout.segments, spans, strict=True):
            positions[segment.start : segment.start + segment.length] = span
        self.positions = torch.from_numpy(positions)[None].to(self._device)
        """Position ids [1, N]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if q.shape[0] != 1 or q.shape[2] != self._num_tokens:
            raise ContractError(
                f"layer {layer}: queries {tuple(q.shape)} for a layout of {self._num_tokens} tokens"
            )
        plan = self._plan(q.shape[1], k.shape[1], q.dtype)
        return _Attention.apply(q, k, v, plan, scale)  # pyright: ignore[reportReturnType]

    def _plan(self, heads: int, kv_heads: int, dtype: torch.dtype) -> _Heads:
        key = (heads, kv_heads, dtype)
        if key not in self._plans:
            if self._blocks is None:
                self._blocks = [_pad(b, self._device) for b in _group(self._tiles, heads)]
            self._plans[key] = _expand(self._blocks, heads, kv_heads, dtype, self._num_tokens)
        return self._plans[key]


def _check(layout: Layout) -> None:
    ends: list[int] = []
    next_start = 0
    for i, s in enumerate(sorted(layout.segments, key=lambda s: s.start)):
        if s.start != next_start or s.length < 1:
            raise ContractError(
                f"layout: segment {i} of {len(layout.segments)} covers {s.start}.."
                f"{s.start + s.length - 1}, expected to start at {next_start} and not be empty"
            )
        next_start += s.length
    for i, s in enumerate(layout.segments):
        if s.parent is not None and not 0 <= s.parent < i:
            raise ContractError(f"layout: segment {i} has parent {s.parent}, which is not before")
        expected = 0 if s.parent is None else ends[s.parent]
        if s.position != expected:
            raise ContractError(
                f"layout: segment {i} starts at position {s.position}, its path is {expected} long"
            )
        ends.append(expected + s.length)


def _tiles(layout: Layout) -> list[_Tile]:
    paths: list[np.ndarray] = []
    tiles: list[_Tile] = []
    for s in layout.segments:
        own = np.arange(s.start, s.start + s.length)
        path = own if s.parent is None else np.concatenate([paths[s.parent], own])
        paths.append(path)
        for first in range(0, s.length, MAX_QUERIES):
            last = min(first + MAX_QUERIES, s.length)
            tiles.append(_Tile(own[first:last], path[: s.position + last]))
    return tiles


def _group(tiles: list[_Tile], heads: int) -> list[list[_Tile]]:
    """Tiles in blocks: similar sizes together, little padding, few blocks, bounded scores."""
    blocks: list[list[_Tile]] = []
    real = 0
    # A block costs about as much as this many scores: a few calls of small kernels.
    overhead = 100_000
    for tile in sorted(tiles, key=lambda t: (len(t.path), len(t.tokens)), reverse=True):
        area = len(tile.tokens) * len(tile.path)
        if blocks:
            block = blocks[-1]
            queries = max(len(t.tokens) for t in (block[0], tile))
            queries = max(queries, len(block[-1].tokens))
            padded = heads * queries * len(block[0].path) * (len(block) + 1)
            if padded <= MAX_SCORES and padded <= 1.15 * heads * (real + area) + overhead:
                block.append(tile)
                real += area
                continue
        blocks.append([tile])
        real = area
    return blocks


def _pad(tiles: list[_Tile], device: torch.device) -> _Block:
    num_queries = max(len(t.tokens) for t in tiles)
    num_keys = max(len(t.path) for t in tiles)
    queries = np.zeros((len(tiles), num_queries), dtype=np.int64)
    padded = np.ones((len(tiles), num_queries), dtype=bool)
    keys = np.zeros((len(tiles), num_keys), dtype=np.int64)
    limit = np.zeros((len(tiles), num_queries), dtype=np.int64)
    for i, tile in enumerate(tiles):
        count, length = len(tile.tokens), len(tile.path)
        queries[i, :count] = tile.tokens
        padded[i, :count] = False
        keys[i, :length] = tile.path
        limit[i] = np.minimum(length - count + np.arange(num_queries), length - 1)
    mask = np.where(np.arange(num_keys) <= limit[..., None], 0.0, -np.inf).astype(np.float32)
    return _Block(
        queries=torch.from_numpy(queries).to(device),
        padded=torch.from_numpy(padded).to(device),
        keys=torch.from_numpy(keys).to(device),
        mask=torch.from_numpy(mask)[:, None].to(device),
    )


def _expand(
    blocks: list[_Block], heads: int, kv_heads: int, dtype: torch.dtype, num_tokens: int
) -> _Heads:
    device = blocks[0].keys.device
    group = heads // kv_heads
    kv = torch.arange(kv_heads, device=device)
    head = torch.arange(heads, device=device).view(kv_heads, group)
    queries, keys, padded, shapes = [], [], [], []
    for block in blocks:
        batch, length = block.queries.shape
        shape = (batch, kv_heads, group, length)
        rows = block.queries[:, None, None, :] * heads + head[None, :, :, None]
        queries.append(rows.flatten())
        padded.append(block.padded[:, None, None, :].expand(shape).flatten())
        keys.append((block.keys[:, None, :] * kv_heads + kv[None, :, None]).flatten())
        shapes.append((*shape, block.keys.shape[1]))
    all_queries, is_padded = torch.cat(queries), torch.cat(padded)
    live = (~is_padded).nonzero().flatten()
    slot = torch.empty(num_tokens * heads, dtype=torch.int64, device=device)
    slot[all_queries[live]] = live
    return _Heads(
        queries=all_queries,
        keys=torch.cat(keys),
        padded=is_padded.nonzero().flatten(),
        slot=slot,
        masks=tuple(block.mask.to(dtype) for block in blocks),
        shapes=tuple(shapes),
    )


# --------------------------------------------------------------------------- forward, backward


def _token_rows(x: Tensor) -> Tensor:
    """[1, H, N, D] as rows [N * H, D]; no copy when the memory is already in this order."""
    return x.transpose(1, 2).reshape(-1, x.shape[-1])


def _split(x: Tensor, plan: _Heads, *, keys: bool) -> list[Tensor]:
    """Slots [S, D] as one [B * Hkv, rows, D] per block."""
    out, start = [], 0
    for batch, kv_heads, group, queries, num_keys in plan.shapes:
        rows = num_keys if keys else group * queries
        count = batch * kv_heads * rows
        out.append(x[start : start + count].view(batch * kv_heads, rows, -1))
        start += count
    return out


class _Attention(torch.autograd.Function):
    """Recomputes the probabilities in backward; saves q, k and v only."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Heads, scale: float) -> Tensor:
        q_rows, k_rows, v_rows = _token_rows(q), _token_rows(k), _token_rows(v)
        ctx.save_for_backward(q_rows, k_rows, v_rows)
        ctx.plan, ctx.scale = plan, scale
        q_slots, k_slots, v_slots = _gather(q_rows, k_rows, v_rows, plan, scale)
        out = torch.empty_like(q_slots)
        for qb, kb, vb, mask, ob in zip(
            _split(q_slots, plan, keys=False),
            _split(k_slots, plan, keys=True),
            _split(v_slots, plan, keys=True),
            plan.masks,
            _split(out, plan, keys=False),
            strict=True,
        ):
            torch.bmm(probabilities(qb, kb, mask), vb, out=ob)
        return out.index_select(0, plan.slot).view(1, q.shape[2], q.shape[1], q.shape[3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Heads = ctx.plan
        q_rows, k_rows, v_rows = ctx.saved_tensors
        tokens, heads, dim = grad.shape[1], grad.shape[2], grad.shape[3]
        q_slots, k_slots, v_slots = _gather(q_rows, k_rows, v_rows, plan, ctx.scale)
        grad_slots = grad.reshape(-1, dim).index_select(0, plan.queries)
        grad_slots.index_fill_(0, plan.padded, 0.0)
        dq, dk, dv = (torch.empty_like(x) for x in (q_slots, k_slots, v_slots))
        for qb, kb, vb, mask, gb, dqb, dkb, dvb in zip(
            _split(q_slots, plan, keys=False),
            _split(k_slots, plan, keys=True),
            _split(v_slots, plan, keys=True),
            plan.masks,
            _split(grad_slots, plan, keys=False),
            _split(dq, plan, keys=False),
            _split(dk, plan, keys=True),
            _split(dv, plan, keys=True),
            strict=True,
        ):
            p = probabilities(qb, kb, mask)
            torch.bmm(p.transpose(1, 2), gb, out=dvb)
            dp = torch.bmm(gb, vb.transpose(1, 2))
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
            torch.bmm(ds, kb, out=dqb)
            torch.bmm(ds.transpose(1, 2), qb, out=dkb)
        kv_heads = k_rows.shape[0] // tokens

        def scatter(slots: Tensor, factor: float) -> Tensor:
            total = torch.zeros(k_rows.shape, dtype=torch.float32, device=slots.device)
            total.index_add_(0, plan.keys, slots.float())
            total = total.mul_(factor).to(slots.dtype)
            return total.view(1, tokens, kv_heads, dim).transpose(1, 2)

        dq_rows = dq.index_select(0, plan.slot).view(1, tokens, heads, dim).transpose(1, 2)
        return dq_rows, scatter(dk, ctx.scale), scatter(dv, 1.0), None, None


def _gather(
    q: Tensor, k: Tensor, v: Tensor, plan: _Heads, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to slots; the keys carry the scale, since there are fewest of them."""
    return (
        q.index_select(0, plan.queries),
        (k * scale).index_select(0, plan.keys),
        v.index_select(0, plan.keys),
    )
