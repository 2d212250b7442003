"""The block pool and its tables, by hand and under random histories."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treadle.sampler.engine.blocks import BLOCK, BlockPool, Table, blocks_for
from treadle.sampler.engine.cache import KvCache


def test_blocks_are_rounded_up():
    assert [blocks_for(n) for n in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]


def test_a_fork_shares_full_blocks_and_copies_the_partial_one_on_write():
    pool = BlockPool(8)
    parent = Table(pool)
    parent.reserve(40)
    parent.length = 40
    child = parent.fork(40)
    assert child.blocks == parent.blocks and pool.used == 3

    assert child.shortfall(41) == 1
    assert child.reserve(41) == [(parent.blocks[2], child.blocks[2])]
    assert child.blocks[:2] == parent.blocks[:2] and child.blocks[2] != parent.blocks[2]
    assert pool.used == 4
    assert parent.shortfall(41) == 0 and parent.reserve(41) == []


def test_a_fork_at_a_block_boundary_copies_nothing():
    pool = BlockPool(8)
    parent = Table(pool)
    parent.reserve(48)
    parent.length = 32
    child = parent.fork(32)
    assert child.reserve(33) == []
    assert child.blocks[2] != parent.blocks[2]


def test_releasing_a_parent_leaves_what_its_child_holds():
    pool = BlockPool(4)
    parent = Table(pool)
    parent.reserve(20)
    parent.length = 20
    child = parent.fork(20)
    parent.clear()
    assert pool.used == 2
    assert child.shortfall(21) == 0, "the last holder writes in place"
    child.clear()
    assert pool.free == 4


def test_truncation_gives_back_whole_blocks_only():
    pool = BlockPool(4)
    table = Table(pool)
    table.reserve(64)
    table.length = 50
    table.truncate(33)
    assert (len(table.blocks), table.length, pool.free) == (3, 33, 1)


class Histories(RuleBasedStateMachine):
    """Random turns of random sessions against a model of what each position must hold.

    `content[block, offset]` is what a device would hold: the ids up to and including that
    position. A table that claims a prefix must find exactly that prefix in its blocks.
    """

    def __init__(self):
        super().__init__()
        self.cache = KvCache(12)
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        self.running: dict[str, tuple[Table, list[int], int]] = {}
        self.opened = 0

    def names(self):
        return sorted(self.cache._sessions)

    @rule(group=st.sampled_from(["", "g", "h"]))
    def open(self, group):
        self.cache.open(f"s{self.opened}", group)
        self.opened += 1

    @precondition(lambda self: set(self.names()) - set(self.running))
    @rule(data=st.data(), length=st.integers(1, 40), new=st.integers(1, 40), kind=st.integers(0, 2))
    def begin(self, data, length, new, kind):
        session = data.draw(st.sampled_from(sorted(set(self.names()) - set(self.running))))
        prompt = [kind] * length
        kept = self.cache._sessions[session].kept
        if kept is not None and kind == 0:
            prompt = list(kept.ids) + prompt
        claim = self.cache.claim(session, prompt, len(prompt) + new)
        if claim is None:
            assert blocks_for(len(prompt) + new) > 12 or self.running
            return
        table = claim.table
        assert table.length < len(prompt)
        self.copy(claim.copies)
        self.expect(table, prompt)
        for position in range(table.length, len(prompt)):
            self.write(table, position, prompt)
        table.length = len(prompt)
        self.copy(self.cache.remember(session, table, prompt))
        self.running[session] = (table, prompt, claim.epoch)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(3, 5))
    def decode(self, data, token):
        session = data.draw(st.sampled_from(sorted(self.running)))
        table, ids, _ = self.running[session]
        if table.length == len(table.blocks) * BLOCK:
            return
        ids.append(token)
        self.write(table, len(ids) - 1, ids)
        table.length += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data, keep):
        session = data.draw(st.sampled_from(sorted(self.running)))
        table, ids, epoch = self.running.pop(session)
        if keep:
            self.cache.keep(session, table, ids, epoch)
        else:
            table.clear()

    @precondition(lambda self: set(self.names()) - set(self.running))
    @rule(data=st.data())
    def close(self, data):
        idle = sorted(set(self.names()) - set(self.running))
        self.cache.close(data.draw(st.sampled_from(idle)))

    @rule()
    def publish(self):
        self.cache.invalidate()

    def copy(self, pairs):
        for source, target in pairs:
            for offset in range(BLOCK):
                self.content[target, offset] = self.content.get((source, offset), ())

    def write(self, table, position, ids):
        block = table.blocks[position // BLOCK]
        assert self.cache.pool.holders(block) == 1, "wrote into a shared block"
        self.content[block, position % BLOCK] = tuple(ids[: position + 1])

    def expect(self, table, ids):
        for p in range(table.length):
            assert self.content[table.blocks[p // BLOCK], p % BLOCK] == tuple(ids[: p + 1])

    @invariant()
    def tables_hold_what_they_claim(self):
        for table, ids, _ in self.running.values():
            self.expect(table, ids)
        for kept in self.idle():
            self.expect(kept.table, kept.ids)
            assert kept.table.length == len(kept.ids)

    @invariant()
    def holders_are_counted_and_blocks_conserved(self):
        counts = dict.fromkeys(range(12), 0)
        tables = [t for t, _, _ in self.running.values()] + [k.table for k in self.idle()]
        for table in tables:
            assert len(set(table.blocks)) == len(table.blocks)
            for block in table.blocks:
                counts[block] += 1
        pool = self.cache.pool
        assert all(pool.holders(b) == n for b, n in counts.items())
        assert pool.free + pool.used == 12
        assert pool.free == sum(n == 0 for n in counts.values())

    def idle(self):
        holders = [*self.cache._sessions.values(), *self.cache._groups.values()]
        return [h.kept for h in holders if h.kept is not None]

    def teardown(self):
        for table, _, _ in self.running.values():
            table.clear()
        self.cache.close_all()
        assert self.cache.pool.free == 12
        assert self.cache.num_sessions == self.cache.num_groups == 0


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
