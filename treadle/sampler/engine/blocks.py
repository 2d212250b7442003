"""Who owns which KV block: a reference-counted pool and one table per sequence.

Guarantees, for any order of calls: a block that two tables hold is never handed out for writing
(the writer gets a copy), a block with no holder is free, held + free = all, and nothing is taken
in part: a table gets every block it asks for or the pool says beforehand that it cannot.

Position p of a sequence lies in block `table.blocks[p // BLOCK]` at offset `p % BLOCK`. This
module moves numbers only; kv.py moves the bytes.

Takes: lengths. Gives: block numbers, and (from, to) pairs to copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

BLOCK = 16
"""Tokens per block: the context is rounded up to it, so attention sees few distinct shapes."""

_NOBODY: Mapping[int, int] = {}


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` positions."""
    return -(-tokens // BLOCK)


class BlockPool:
    """Blocks 0..num_blocks-1 with a count of holders each."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        # A stack with the lowest number on top: few distinct blocks are ever touched when
        # little is held, so memory that was never needed is never paged in.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.num_blocks - len(self._free)

    def holders(self, block: int) -> int:
        return self._holders[block]

    def take(self, count: int) -> list[int]:
        """`count` blocks, held once each. The caller has checked `free`."""
        assert count <= len(self._free), f"took {count} of {len(self._free)} free blocks"
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} is free and cannot be shared"
            self._holders[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} was dropped twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)


class Table:
    """The blocks of one sequence. `length` positions are filled; more may be reserved."""

    __slots__ = ("blocks", "length", "pool")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.blocks: list[int] = []
        self.length = 0

    def fork(self, length: int) -> Table:
        """A table that shares the first `length` positions, a partial last block included."""
        assert length <= len(self.blocks) * BLOCK, f"{length} positions of {len(self.blocks)}"
        child = Table(self.pool)
        child.blocks = self.blocks[: blocks_for(length)]
        child.length = length
        self.pool.share(child.blocks)
        return child

    def shortfall(self, tokens: int, letting_go: Mapping[int, int] = _NOBODY) -> int:
        """Blocks that `reserve(tokens)` would take from the pool.

        `letting_go`: holders per block that will have dropped it by then.
        """
        grow = max(0, blocks_for(tokens) - len(self.blocks))
        return grow + self._shares_tail(tokens, letting_go)

    def _shares_tail(self, tokens: int, letting_go: Mapping[int, int] = _NOBODY) -> bool:
        """Whether position `length` lies in a block that somebody else holds too."""
        if tokens <= self.length or self.length % BLOCK == 0:
            return False
        block = self.blocks[self.length // BLOCK]
        return self.pool.holders(block) - letting_go.get(block, 0) > 1

    def reserve(self, tokens: int) -> list[tuple[int, int]]:
        """Own writable blocks for the positions length..tokens-1.

        Returns the (from, to) blocks whose contents the caller must copy before it writes. The
        caller has checked `shortfall(tokens) <= pool.free`.
        """
        copies: list[tuple[int, int]] = []
        if self._shares_tail(tokens):
            index = self.length // BLOCK
            (fresh,) = self.pool.take(1)
            copies.append((self.blocks[index], fresh))
            self.pool.drop([self.blocks[index]])
            self.blocks[index] = fresh
        self.blocks += self.pool.take(max(0, blocks_for(tokens) - len(self.blocks)))
        return copies

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on and give back the blocks behind them."""
        keep = blocks_for(length)
        self.pool.drop(self.blocks[keep:])
        del self.blocks[keep:]
        self.length = min(self.length, length)

    def clear(self) -> None:
        self.truncate(0)
