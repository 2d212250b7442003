"""What the cache's tests share: a turn, and a device that remembers what each position holds."""

from treadle.sampler.engine.blocks import BLOCK


def turn(cache, session, prompt, new=8):
    """Claim, compute, decode `new` tokens and leave the KV idle; returns the cached length."""
    claim = cache.claim(session, prompt, len(prompt) + new)
    assert claim is not None
    cached = claim.table.length
    claim.table.length = len(prompt)
    cache.remember(session, claim.table, prompt, claim.epoch)
    ids = [*prompt, *range(900, 900 + new)]
    claim.table.length = len(ids) - 1
    cache.keep(session, claim.table, ids, claim.epoch)
    return cached


class Device:
    """Each position holds what it was computed from: the weights and the ids up to it."""

    def __init__(self, cache):
        self.cache = cache
        self.content = {}

    def copy(self, pairs):
        targets = [target for _, target in pairs]
        assert len(set(targets)) == len(targets)
        held = {(t, o): self.content.get((s, o)) for s, t in pairs for o in range(BLOCK)}
        self.content |= held

    def compute(self, table, ids, count, weights):
        """Positions table.length .. + count - 1, each after reading all before it."""
        self.expect(table, ids, weights)
        for p in range(table.length, table.length + count):
            block, offset = table.blocks[p // BLOCK], p % BLOCK
            assert self.cache.pool.holders(block) >= 1, "wrote into a free block"
            assert self.cache.pool.sealed(block) <= offset, "overwrote what others look for"
            self.content[block, offset] = (weights, tuple(ids[: p + 1]))
        table.length += count

    def expect(self, table, ids, weights=None):
        for p in range(table.length):
            made, seen = self.content[table.blocks[p // BLOCK], p % BLOCK]
            assert seen == tuple(ids[: p + 1])
            assert weights is None or made == weights

    def check_tree(self):
        """Whatever can be found holds what its path says, under the weights of its key."""
        tree = self.cache._tree
        for key, root in tree._roots.items():
            stack = [((), child) for child in root.children.values()]
            while stack:
                path, node = stack.pop()
                for offset in range(len(node.ids)):
                    made, seen = self.content[node.block, offset]
                    assert (made, seen) == (key, (*path, *node.ids[: offset + 1]))
                assert tree.pool.sealed(node.block) == len(node.ids)
                if node.children:
                    assert len(node.ids) == BLOCK
                stack += [((*path, *node.ids), child) for child in node.children.values()]

    def check_pool(self, tables):
        """Holders are counted, blocks conserved; a held block is held from its root on."""
        pool = self.cache.pool
        counts = dict.fromkeys(range(pool.num_blocks), 0)
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks)
            for block in table.blocks:
                counts[block] += 1
        assert all(pool.holders(b) == n for b, n in counts.items())
        assert pool.free == sum(n == 0 for n in counts.values())
        sealed = {b for b in counts if pool.sealed(b)}
        assert sealed == set(self.cache._tree._nodes)
        for block, node in self.cache._tree._nodes.items():
            if counts[block] and node.parent.block >= 0:
                assert counts[node.parent.block] >= 1, "a leaf outlives its root"
