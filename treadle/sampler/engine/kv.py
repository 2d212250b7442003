"""The bytes behind the blocks: keys and values of all layers.

Guarantees: a position that was never written reads as 0, so a masked position adds exactly
nothing; memory is paged in as blocks are first used, not when the budget is set, and can be given
back while nothing is held.

Takes: block numbers. Gives: tensors [layers, num_blocks, kv_heads, BLOCK, head_dim].
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from treadle.sampler.engine.blocks import BLOCK, blocks_for
from treadle.types import ModelShape


class KvStore:
    """Keys and values in the compute dtype, contiguous; see blocks.py for who owns what."""

    def __init__(
        self,
        shape: ModelShape,
        num_blocks: int,
        dtype: torch.dtype,
        device: str,
        experts: tuple[int, int] = (0, 0),
    ) -> None:
        """`experts`: layers that have some, and how many they choose for a token."""
        self.shape = shape
        size = (shape.layers, num_blocks, shape.kv_heads, BLOCK, shape.head_dim)
        self._pages: list[mmap.mmap] = []
        self.keys = self._zeros(size, dtype, device)
        self.values = self._zeros(size, dtype, device)
        self.experts: Tensor | None = None
        """Which experts computed each position, int16 [num_blocks, BLOCK, layers, k]."""
        if all(experts):
            self.experts = self._zeros((num_blocks, BLOCK, *experts), torch.int16, device)

    def _zeros(self, size: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
        if torch.device(device).type != "cpu":
            return torch.zeros(size, dtype=dtype, device=device)
        # Anonymous memory is zero and paged in lazily; torch.zeros writes every page.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=flags)
        self._pages.append(pages)
        return torch.frombuffer(pages, dtype=dtype).view(size)

    def release_memory(self) -> None:
        """Give the memory back; everything reads as 0 then. See `can_release_memory`."""
        for pages in self._pages:
            pages.madvise(mmap.MADV_DONTNEED)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, all layers; pairs are (from, to) and every `to` is distinct."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.keys.device).T
        for tensor in (self.keys, self.values):
            tensor[:, target] = tensor[:, source]
        if self.experts is not None:
            self.experts[target] = self.experts[source]

    def write_experts(self, rows: Tensor, choices: Tensor) -> None:
        """Record [tokens, layers, k] at `block * BLOCK + offset` of each token."""
        assert self.experts is not None, "a dense model has no experts"
        self.experts.flatten(0, 1)[rows] = choices.to(torch.int16)

    def experts_of(self, blocks: Sequence[int], first: int, last: int) -> Tensor:
        """Choices of positions first..last-1 of a sequence, [positions, layers, k] on the CPU."""
        assert self.experts is not None, "a dense model has no experts"
        index = torch.tensor(list(blocks[: blocks_for(last)]), device=self.experts.device)
        return self.experts[index].flatten(0, 1)[first:last].cpu()

    def wipe(self, blocks: Iterable[int]) -> None:
        """Zero blocks that hold non-finite values: 0 x NaN would reach their next owner."""
        index = torch.tensor(list(blocks), dtype=torch.long, device=self.keys.device)
        self.keys[:, index] = 0
        self.values[:, index] = 0


def can_release_memory(device: str) -> bool:
    """Whether `KvStore.release_memory` frees and zeroes on this device."""
    return torch.device(device).type == "cpu" and sys.platform == "linux"


def token_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Bytes of keys and values per position, all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype.itemsize


def budget_blocks(shape: ModelShape, dtype: torch.dtype, device: str, tokens: int) -> int:
    """Blocks for `tokens` positions, but never more than a quarter of the device's memory."""
    if torch.device(device).type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    room = memory // 4 // (token_bytes(shape, dtype) * BLOCK)
    return max(1, min(blocks_for(tokens), room))
