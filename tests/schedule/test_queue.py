"""Bounded queues of finished groups: worked by hand, and driven as a whole."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from treadle.schedule.queue import first_batch, may_start_blocking, num_dropped


def test_a_queue_that_overflows_by_two_loses_two():
    assert [num_dropped(n, capacity=4) for n in (0, 4, 5, 6)] == [0, 0, 1, 2]


def test_nothing_starts_while_a_finished_group_finds_no_place():
    assert may_start_blocking(4, capacity=4)
    assert not may_start_blocking(5, capacity=4)


def test_the_first_to_finish_are_trained_first():
    assert first_batch([7, 2, 9], groups_per_step=2) == (7, 2)
    assert first_batch([7], groups_per_step=2) is None


@given(st.integers(1, 4), st.integers(0, 4), st.lists(st.booleans(), max_size=60))
def test_every_finished_group_is_trained_dropped_or_waiting_and_none_twice(n, more, events):
    """True: a group finishes; False: the trainer asks for a batch."""
    capacity = n + more
    waiting: deque[int] = deque()
    trained: list[int] = []
    dropped: list[int] = []
    finished = 0
    for finishes in events:
        if finishes:
            waiting.append(finished)
            finished += 1
            for _ in range(num_dropped(len(waiting), capacity=capacity)):
                dropped.append(waiting.popleft())
        elif (batch := first_batch(waiting, groups_per_step=n)) is not None:
            assert len(batch) == n
            trained += [waiting.popleft() for _ in batch]
        assert len(waiting) <= capacity
    assert sorted([*trained, *dropped, *waiting]) == list(range(finished))
    assert trained == sorted(trained) and dropped == sorted(dropped)
