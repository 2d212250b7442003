"""Which KV can be found again: a radix tree of token ids over blocks.

    root of (version, adapter) -- 16 ids --> block -- 16 ids --> block -- 5 ids --> block

A node is one block and the ids that its positions were computed from, after those of its
ancestors. Only leaves are shorter than a block. A match may end inside of a node: the block is
then copied before it is written to (blocks.py), for what a node says stays true as long as it
is there.

Guarantees: a match holds exactly the KV of the ids it was asked for, under the key it was asked
with; every held block of a path is held together with those before it, so free nodes lose
their leaves first.

Takes: ids and tables. Gives: tables.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from treadle.sampler.engine.blocks import BLOCK, BlockPool, Table


class _Node:
    __slots__ = ("block", "children", "ids", "parent")

    def __init__(self, ids: tuple[int, ...], block: int, parent: _Node | None) -> None:
        self.ids = ids
        self.block = block
        self.parent = parent
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixTree:
    """The findable blocks of one pool, which it makes itself."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, self._forget)
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[int, _Node] = {}

    def match(self, key: Hashable, ids: Sequence[int], limit: int) -> Table:
        """A table with the longest known prefix of ids[:limit]."""
        blocks, length = self._find(key, ids, limit)
        return Table(self.pool, blocks, length)

    def length(self, key: Hashable, ids: Sequence[int], limit: int) -> int:
        """Positions that `match` would find."""
        return self._find(key, ids, limit)[1]

    def _find(self, key: Hashable, ids: Sequence[int], limit: int) -> tuple[list[int], int]:
        blocks: list[int] = []
        length = 0
        node = self._roots.get(key)
        while node is not None and length < limit:
            rest = tuple(ids[length : min(length + BLOCK, limit)])
            child = node.children.get(rest)
            common = len(rest)
            if child is None:
                child, common = _longest(node, rest)
            if child is None:
                break
            blocks.append(child.block)
            length += common
            node = child if common == BLOCK else None
        return blocks, length

    def insert(self, key: Hashable, table: Table, ids: Sequence[int], *, ended: bool) -> None:
        """Let the filled positions of a table be found; `ids` cover them.

        Where a block of the same content is known, the table holds that one from now on. Its
        last block stays its own unless the sequence has `ended`: it will be written to.
        """
        node = self._roots.setdefault(key, _Node((), -1, None))
        for index, start in enumerate(range(0, table.length, BLOCK)):
            piece = tuple(ids[start : min(start + BLOCK, table.length)])
            block = table.blocks[index]
            child = node.children.get(piece)
            if child is None:
                child = self._add(node, piece, block)
            elif child.block != block and (ended or len(piece) == BLOCK):
                table.replace(index, child.block)
            node = child

    def _add(self, parent: _Node, ids: tuple[int, ...], block: int) -> _Node:
        node = self._nodes.get(block)
        if node is None:
            node = self._nodes[block] = _Node(ids, block, parent)
        else:
            # The block was known up to some position, and more was written behind.
            assert node.parent is parent and ids[: len(node.ids)] == node.ids and not node.children
            del parent.children[node.ids]
            node.ids = ids
        parent.children[ids] = node
        self.pool.seal(block, len(ids))
        return node

    def drop(self, key: Hashable) -> None:
        """Nothing under this key is found any more."""
        root = self._roots.pop(key, None)
        stack = [] if root is None else list(root.children.values())
        while stack:
            node = stack.pop()
            stack += node.children.values()
            del self._nodes[node.block]
            self.pool.unseal(node.block)

    def clear(self) -> None:
        for key in list(self._roots):
            self.drop(key)

    def _forget(self, block: int) -> None:
        node = self._nodes.pop(block)
        assert not node.children and node.parent is not None, "overwrote a block before its leaves"
        del node.parent.children[node.ids]


def _longest(node: _Node, ids: tuple[int, ...]) -> tuple[_Node | None, int]:
    """The child that shares the most leading ids, and how many; (None, 0) when none does."""
    best, most = None, 0
    for child in node.children.values():
        if child.ids[: most + 1] != ids[: most + 1]:
            continue
        common = next(
            (i for i, (a, b) in enumerate(zip(child.ids, ids, strict=False)) if a != b),
            min(len(child.ids), len(ids)),
        )
        if common > most:
            best, most = child, common
    return best, most
