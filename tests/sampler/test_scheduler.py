"""Admission order, worst-case reservation, refusal. No tensors."""

import pytest

from treadle.errors import ConfigError, SamplerError
from treadle.sampler.engine.cache import KvCache
from treadle.sampler.engine.scheduler import PREFILL_TOKENS, Request, Scheduler
from treadle.types import SamplingParams, StopReason


def make(blocks=64, max_rows=4, max_context=1024):
    return Scheduler(KvCache(blocks), max_rows=max_rows, max_context=max_context, vocab=1000)


def submit(scheduler, session, prompt, new=8, group=""):
    if session not in scheduler.cache:
        scheduler.cache.open(session, group)
    params = SamplingParams(max_new_tokens=new)
    scheduler.check(prompt, params)
    request = Request(session, tuple(prompt), params, deadline=0.0)
    scheduler.submit(request)
    return request


def names(rows):
    return [row.request.session for row in rows]


def test_requests_enter_in_order_and_a_freed_row_is_refilled():
    scheduler = make(max_rows=2)
    for name in "abcd":
        submit(scheduler, name, [1, 2, 3])
    first = scheduler.admit()
    assert names(first) == ["a", "b"] and scheduler.admit() == []
    scheduler.finish(first[1], keep=True)
    assert names(scheduler.admit()) == ["c"]
    assert names(scheduler.rows) == ["a", "c"]


def test_a_row_is_admitted_only_with_blocks_for_its_worst_case():
    scheduler = make(blocks=4)
    submit(scheduler, "a", [1] * 20, new=12)  # 2 blocks
    submit(scheduler, "b", [1] * 20, new=13)  # 3 blocks
    submit(scheduler, "c", [1], new=1)  # 1 block, but it came later
    first = scheduler.admit()
    assert names(first) == ["a"]
    scheduler.finish(first[0], keep=False)
    assert names(scheduler.admit()) == ["b", "c"]


def test_siblings_of_one_step_follow_the_first():
    scheduler = make()
    for name in "abc":
        submit(scheduler, name, [1] * 20, group="g")
    submit(scheduler, "d", [2] * 20, group="g")
    a, b, c, d = scheduler.admit()
    assert (a.leader, b.leader, c.leader, d.leader) == (None, a, a, None)
    assert (a.cached, b.cached, c.cached, d.cached) == (0, 20, 20, 0)
    assert a.table.blocks[0] == b.table.blocks[0] == c.table.blocks[0] != d.table.blocks[0]
    assert len({row.table.blocks[1] for row in (a, b, c, d)}) == 4
    assert b.copies == ((a.table.blocks[1], b.table.blocks[1]),)


def test_a_step_stops_admitting_after_its_prefill_tokens():
    scheduler = make(blocks=1000, max_rows=64, max_context=4096)
    half = PREFILL_TOKENS // 2 + 1
    for name in "abc":
        submit(scheduler, name, [1] * half)
    assert names(scheduler.admit()) == ["a", "b"]
    assert names(scheduler.admit()) == ["c"]


def test_what_can_never_fit_is_refused_with_numbers():
    """B113: a request longer than the KV budget but under the maximum length."""
    scheduler = make(blocks=62, max_context=2000)
    with pytest.raises(SamplerError, match=r"1500 \+ max_new_tokens 8 = 1508 .* KV budget of 992"):
        submit(scheduler, "a", [1] * 1500)
    with pytest.raises(SamplerError, match=r"1990 \+ max_new_tokens 11 = 2001 .* context of 2000"):
        submit(scheduler, "b", [1] * 1990, new=11)
    submit(scheduler, "c", [1] * 5)
    assert names(scheduler.admit()) == ["c"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", None),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", True),
        ("max_new_tokens", 0),
        ("max_new_tokens", 1.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("seed", "x"),
        ("deadline_s", 0),
        ("stop", "word"),
        ("stop", ("",)),
    ],
)
def test_a_bad_sampling_parameter_is_named_with_its_value(field, value):
    params = SamplingParams(**{"max_new_tokens": 4, field: value})
    with pytest.raises(ConfigError, match=rf"`{field}` must be .* got") as error:
        make().check([1], params)
    assert error.value.message.endswith(repr(value))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "empty"),
        ([5, -1], "id -1 at position 1"),
        ([5, 6, 1000], "id 1000 at position 2 of 3"),
    ],
)
def test_ids_that_the_model_does_not_know_are_refused(ids, message):
    with pytest.raises(SamplerError, match=message):
        make().check(ids, SamplingParams(max_new_tokens=1))


def test_a_session_has_one_turn_at_a_time_and_must_be_open():
    scheduler = make()
    submit(scheduler, "a", [1])
    with pytest.raises(SamplerError, match="middle of a turn"):
        submit(scheduler, "a", [1])
    with pytest.raises(SamplerError, match="unknown session `z`"):
        scheduler.submit(Request("z", (1,), SamplingParams(max_new_tokens=1), 0.0))
    (row,) = scheduler.admit()
    scheduler.finish(row, keep=True)
    submit(scheduler, "a", [1])


def test_a_withdrawn_request_leaves_nothing_behind():
    scheduler = make(blocks=4, max_rows=1)
    submit(scheduler, "a", [1] * 30)
    waiting = submit(scheduler, "b", [1] * 30)
    (row,) = scheduler.admit()
    scheduler.withdraw(waiting)
    scheduler.finish(row, keep=False)
    assert scheduler.cache.pool.used == 0 and not scheduler.waiting
    submit(scheduler, "b", [1])


def test_the_parts_of_a_completion_have_one_length():
    scheduler = make()
    submit(scheduler, "a", [1, 2])
    (row,) = scheduler.admit()
    row.ids.append(7)
    row.logprobs.append(-1.0)
    row.versions.append(3)
    row.entropies.append(0.5)
    done = row.completion(StopReason.LENGTH)
    assert (done.ids, done.logprobs, done.versions, done.entropies) == ((7,), (-1.0,), (3,), (0.5,))
    assert done.prompt_tokens == 2
