"""The block pool and its tables, by hand."""

import pytest

from treadle.sampler.engine.blocks import BlockPool, Table, blocks_for


def filled(pool, tokens):
    table = Table(pool)
    table.reserve(tokens)
    table.length = tokens
    return table


def test_blocks_are_rounded_up():
    assert [blocks_for(n) for n in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]


def test_a_fork_shares_full_blocks_and_copies_the_partial_one_on_write():
    pool = BlockPool(8)
    parent = filled(pool, 40)
    child = parent.fork(40)
    assert child.blocks == parent.blocks and pool.used == 3

    assert child.shortfall(41) == 1
    assert child.reserve(41) == [(parent.blocks[2], child.blocks[2])]
    assert child.blocks[:2] == parent.blocks[:2] and child.blocks[2] != parent.blocks[2]
    assert pool.used == 4
    assert parent.shortfall(41) == 0 and parent.reserve(41) == []


def test_a_fork_at_a_block_boundary_copies_nothing():
    pool = BlockPool(8)
    parent = filled(pool, 32)
    child = parent.fork(32)
    assert child.reserve(33) == []
    assert len(child.blocks) == 3


def test_releasing_a_parent_leaves_what_its_child_holds():
    pool = BlockPool(4)
    parent = filled(pool, 20)
    child = parent.fork(20)
    parent.clear()
    assert pool.used == 2
    assert child.shortfall(21) == 0, "the last holder writes in place"
    child.clear()
    assert pool.free == 4


def test_truncation_gives_back_whole_blocks_only():
    pool = BlockPool(4)
    table = filled(pool, 50)
    table.reserve(64)
    table.truncate(33)
    assert (len(table.blocks), table.length, pool.free) == (3, 33, 1)


def test_what_can_be_found_is_copied_before_it_is_changed_and_appended_to_in_place():
    pool = BlockPool(4)
    table = filled(pool, 5)
    pool.seal(table.blocks[0], 5)
    assert table.reserve(6) == [], "behind the fifth position nobody looks"
    table.truncate(3)
    (first,) = table.blocks
    assert table.shortfall(4) == 1
    assert table.reserve(4) == [(first, table.blocks[0])]
    assert pool.holders(first) == 0 and pool.sealed(first) == 5


def test_a_free_block_that_can_be_found_is_shared_again_or_overwritten_last():
    told = []
    pool = BlockPool(3, told.append)
    table = filled(pool, 32)
    first, second = table.blocks
    for block in table.blocks:
        pool.seal(block, 16)
    table.clear()
    assert pool.free == 3 and told == []
    again = Table(pool, [first], 16)
    assert pool.used == 1
    assert pool.take(1) != [second], "an empty one first"
    assert pool.take(1) == [second] and told == [second]
    assert pool.evicted_tokens == 16
    again.clear()
    pool.unseal(first)
    with pytest.raises(AssertionError, match="empty"):
        pool.share([first])


def test_double_drops_and_overdrafts_are_bugs():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.drop([block])
    with pytest.raises(AssertionError, match="dropped twice"):
        pool.drop([block])
    with pytest.raises(AssertionError, match="took 3 of 2"):
        pool.take(3)
