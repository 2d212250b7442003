"""Who owns which KV block: a reference-counted pool and one table per sequence.

Guarantees, for any order of calls: a block that two tables hold, or a position whose content may
be found again, is never handed out for writing (the writer gets a copy); a block with no holder
is free at once, held + free = all; and nothing is taken in part: a table gets every block it
asks for or the pool says beforehand that it cannot.

A free block whose content may be found again (`seal`) is handed out last, the longest unused
first; `forget` is told before.

Position p of a sequence lies in block `table.blocks[p // BLOCK]` at offset `p % BLOCK`. This
module moves numbers only; kv.py moves the bytes.

Takes: lengths. Gives: block numbers, and (from, to) pairs to copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

BLOCK = 16
"""Tokens per block: the context is rounded up to it, so attention sees few distinct shapes."""


def blocks_for(tokens: int) -> int:
    """Blocks that hold `tokens` positions."""
    return -(-tokens // BLOCK)


class BlockPool:
    """Blocks 0..num_blocks-1 with a count of holders each."""

    def __init__(self, num_blocks: int, forget: Callable[[int], None] | None = None) -> None:
        """`forget(block)`: the content of a free block is about to be overwritten."""
        self.num_blocks = num_blocks
        self.evicted_tokens = 0
        """Findable positions of free blocks that were overwritten."""
        self._forget = forget
        self._holders = [0] * num_blocks
        self._sealed = [0] * num_blocks
        # A stack with the lowest number on top: few distinct blocks are ever touched when
        # little is held, so memory that was never needed is never paged in.
        self._empty = list(range(num_blocks - 1, -1, -1))
        # Free blocks with content, the longest unused first.
        self._findable: dict[int, None] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._empty) + len(self._findable)

    @property
    def used(self) -> int:
        return self.num_blocks - self.free

    def holders(self, block: int) -> int:
        return self._holders[block]

    def sealed(self, block: int) -> int:
        """Leading positions of a block that must stay as they are."""
        return self._sealed[block]

    def take(self, count: int) -> list[int]:
        """`count` blocks, held once each. The caller has checked `free`."""
        assert count <= self.free, f"took {count} of {self.free} free blocks"
        taken: list[int] = []
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            else:
                block = next(iter(self._findable))
                del self._findable[block]
                self.evicted_tokens += self._sealed[block]
                self._sealed[block] = 0
                if self._forget is not None:
                    self._forget(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more; free ones only while their content can be found."""
        for block in blocks:
            if self._holders[block] == 0:
                assert block in self._findable, f"block {block} is empty and cannot be shared"
                del self._findable[block]
            self._holders[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Hold blocks once less. Of those that get free, the first are overwritten first."""
        for block in blocks:
            assert self._holders[block] > 0, f"block {block} was dropped twice"
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if self._sealed[block]:
                    self._findable[block] = None
                else:
                    self._empty.append(block)

    def seal(self, block: int, positions: int) -> None:
        """The first `positions` of a held block can be found from now on."""
        assert self._holders[block] > 0, f"block {block} is free and cannot be sealed"
        self._sealed[block] = positions

    def unseal(self, block: int) -> None:
        """Nobody looks for this block's content any more."""
        self._sealed[block] = 0
        if block in self._findable:
            del self._findable[block]
            self._empty.append(block)


class Table:
    """The blocks of one sequence. `length` positions are filled; more may be reserved."""

    __slots__ = ("blocks", "length", "pool")

    def __init__(self, pool: BlockPool, blocks: Iterable[int] = (), length: int = 0) -> None:
        """`blocks` are shared, not taken over."""
        self.pool = pool
        self.blocks: list[int] = list(blocks)
        self.length = length
        assert length <= self.room, f"{length} positions of {len(self.blocks)}"
        pool.share(self.blocks)

    @property
    def room(self) -> int:
        """Positions that its blocks hold."""
        return len(self.blocks) * BLOCK

    def fork(self, length: int) -> Table:
        """A table that shares the first `length` positions, a partial last block included."""
        return Table(self.pool, self.blocks[: blocks_for(length)], length)

    def shortfall(self, tokens: int) -> int:
        """Blocks that `reserve(tokens)` would take from the pool."""
        return max(0, blocks_for(tokens) - len(self.blocks)) + self._needs_copy(tokens)

    def _needs_copy(self, tokens: int) -> bool:
        """Whether position `length` lies in a block that others hold or look for."""
        offset = self.length % BLOCK
        if tokens <= self.length or offset == 0:
            return False
        block = self.blocks[self.length // BLOCK]
        return self.pool.holders(block) > 1 or self.pool.sealed(block) > offset

    def reserve(self, tokens: int) -> list[tuple[int, int]]:
        """Own writable blocks for the positions length..tokens-1.

        Returns the (from, to) blocks whose contents the caller must copy before it writes. The
        caller has checked `shortfall(tokens) <= pool.free`.
        """
        copies: list[tuple[int, int]] = []
        if self._needs_copy(tokens):
            index = self.length // BLOCK
            (fresh,) = self.pool.take(1)
            copies.append((self.blocks[index], fresh))
            self.pool.drop([self.blocks[index]])
            self.blocks[index] = fresh
        self.blocks += self.pool.take(max(0, blocks_for(tokens) - len(self.blocks)))
        return copies

    def replace(self, index: int, block: int) -> None:
        """Hold another block of the same content instead."""
        self.pool.share([block])
        self.pool.drop([self.blocks[index]])
        self.blocks[index] = block

    def truncate(self, length: int) -> None:
        """Forget positions from `length` on and give back the blocks behind them."""
        keep = blocks_for(length)
        # The end of a sequence is of use to fewer than its beginning: it goes first.
        self.pool.drop(reversed(self.blocks[keep:]))
        del self.blocks[keep:]
        self.length = min(self.length, length)

    def clear(self) -> None:
        self.truncate(0)
