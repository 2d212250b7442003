"""Admission, sharing, pieces, preemption, refusal; random histories. No tensors."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.sampler.kv_model import Device
from treadle.errors import ConfigError, SamplerError
from treadle.sampler.engine.cache import KvCache
from treadle.sampler.engine.scheduler import Scheduler, Turn
from treadle.types import SamplingParams, StopReason


def make(blocks=64, max_rows=4, max_context=1024, prefill_tokens=1024):
    return Scheduler(
        KvCache(blocks),
        max_rows=max_rows,
        max_context=max_context,
        vocab=1000,
        prefill_tokens=prefill_tokens,
    )


def submit(scheduler, session, prompt, new=8):
    if session not in scheduler.cache:
        scheduler.cache.open(session)
    params = SamplingParams(max_new_tokens=new)
    scheduler.check(prompt, params)
    turn = Turn(session, tuple(prompt), params, deadline=0.0)
    scheduler.submit(turn)
    return turn


def admit(scheduler):
    before = set(scheduler.rows)
    scheduler.admit()
    return [row.session for row in scheduler.rows if row not in before]


def token(turn):
    """What a model and a seed would draw: a function of what came before alone."""
    return sum(turn.ids) * 31 % 7


def compute(scheduler, device=None):
    """A step; every row whose ids are all computed draws."""
    scheduler.grow()
    copies = scheduler.admit()
    if device:
        device.copy(copies)
    pieces = scheduler.pieces()
    done = []
    for row, count in pieces:
        if device:
            epoch = (row.adapter, row.epoch)
            crossed = row.epoch != scheduler.cache.epoch(row.adapter)
            device.compute(row.table, row.ids, count, None if crossed else epoch)
        else:
            row.table.length += count
        if count > 1 or row.pending:
            scheduler.cache.remember(row.session, row.table, row.ids, row.epoch)
        if not row.pending:
            done.append(row)
    pairs, copies = scheduler.join(done)
    if device:
        device.copy(copies)
    for row in [*done, *(row for row, _ in pairs)]:
        row.ids.append(token(row))
        if len(row.drawn) >= row.params.max_new_tokens:
            scheduler.finish(row, keep=True)
    return pieces


def test_a_row_with_kv_of_older_weights_leads_nobody():
    scheduler = make()
    prompt = list(range(20))
    leader = submit(scheduler, "a", prompt)
    admit(scheduler)
    follower = submit(scheduler, "b", prompt)
    assert admit(scheduler) == [], "it waits for what the first computes"
    leader.table.length += 20
    scheduler.cache.invalidate()
    assert scheduler.join([leader]) == ([], [])
    assert admit(scheduler) == ["b"] and follower.length == 0


def test_turns_enter_in_order_and_a_freed_row_is_refilled():
    scheduler = make(max_rows=2)
    _a, b, *_ = (submit(scheduler, name, [i, 2, 3]) for i, name in enumerate("abcd"))
    assert admit(scheduler) == ["a", "b"] and admit(scheduler) == []
    scheduler.finish(b, keep=True)
    assert admit(scheduler) == ["c"]
    assert [row.session for row in scheduler.rows] == ["a", "c"]


def test_a_turn_enters_with_blocks_for_its_prompt_and_one_for_each_that_runs():
    scheduler = make(blocks=5)
    submit(scheduler, "a", [1] * 40, new=20)
    submit(scheduler, "b", [2] * 20, new=20)
    submit(scheduler, "c", [3], new=1)
    assert admit(scheduler) == ["a"], "b has two blocks, but a would have none to grow"
    assert scheduler.waiting_for_kv == 2
    scheduler.finish(scheduler.rows[0], keep=False)
    assert admit(scheduler) == ["b", "c"] and scheduler.waiting_for_kv == 0


def test_siblings_wait_for_the_first_and_draw_from_its_logits():
    scheduler = make(max_rows=8)
    turns = [submit(scheduler, name, [1] * 20) for name in "abc"]
    other = submit(scheduler, "d", [2] * 20)
    pieces = compute(scheduler)
    assert [(row.session, count) for row, count in pieces] == [("a", 20), ("d", 20)]
    assert [len(t.drawn) for t in (*turns, other)] == [1, 1, 1, 1]
    assert [t.cached for t in turns] == [0, 20, 20]
    assert turns[0].blocks[0] == turns[1].blocks[0] == turns[2].blocks[0] != other.blocks[0]
    assert len({t.blocks[1] for t in (*turns, other)}) == 4


def test_a_longer_prompt_waits_for_the_blocks_that_another_computes():
    scheduler = make()
    submit(scheduler, "a", [1] * 40)
    longer = submit(scheduler, "b", [*[1] * 33, 5, 6])
    assert [row.session for row, _ in compute(scheduler)] == ["a"]
    compute(scheduler)
    assert longer.cached == 33


def test_siblings_do_not_pass_those_who_came_before_them():
    scheduler = make(max_rows=2)
    for name in "abc":
        submit(scheduler, name, [1] * 20)
    submit(scheduler, "d", [2] * 20)
    assert admit(scheduler) == ["a"], "b has the second place, and waits for a"


def test_a_long_prompt_is_computed_in_pieces_while_others_draw():
    scheduler = make(prefill_tokens=32)
    short = submit(scheduler, "a", [1] * 8, new=6)
    compute(scheduler)
    long = submit(scheduler, "b", [2] * 100)
    sizes = []
    for _ in range(4):
        sizes.append([count for _, count in compute(scheduler)])
    assert sizes == [[1, 32], [1, 32], [1, 32], [1, 4]]
    assert len(short.drawn) == 5 and len(long.drawn) == 1


def test_pieces_of_several_prompts_share_the_budget_in_order():
    scheduler = make(prefill_tokens=32)
    for i, name in enumerate("abc"):
        submit(scheduler, name, [i] * 20)
    assert [(r.session, n) for r, n in compute(scheduler)] == [("a", 20), ("b", 12)]
    assert [(r.session, n) for r, n in compute(scheduler)] == [("a", 1), ("b", 8), ("c", 20)]


def test_the_latest_is_preempted_loses_nothing_and_goes_on():
    scheduler = make(blocks=5)
    a = submit(scheduler, "a", [1] * 20, new=44)
    b = submit(scheduler, "b", [2] * 8, new=40)
    drawn = {}
    for _ in range(100):
        if not (scheduler.rows or scheduler.waiting):
            break
        before = list(b.drawn)
        compute(scheduler)
        assert b.drawn[: len(before)] == before
        drawn |= {t.session: list(t.drawn) for t in (a, b)}
    assert scheduler.preemptions == 1
    assert [len(drawn[s]) for s in "ab"] == [44, 40]
    alone = make()
    for name, prompt, new in (("a", [1] * 20, 44), ("b", [2] * 8, 40)):
        turn = submit(alone, name, prompt, new=new)
        while alone.rows or alone.waiting:
            compute(alone)
        assert turn.drawn == drawn[name]


def test_what_was_preempted_is_found_again_where_nobody_overwrote_it():
    scheduler = make(blocks=8)
    turn = submit(scheduler, "a", [1] * 40)
    compute(scheduler)
    scheduler.preempt(turn)
    assert scheduler.cache.pool.used == 0
    assert [count for _, count in compute(scheduler)] == [1]
    assert turn.cached == 0, "of its first admission"


def test_an_idle_session_is_asked_only_when_nobody_runs():
    scheduler = make(blocks=4)
    first = submit(scheduler, "idle", [1] * 30, new=1)
    compute(scheduler)
    assert first.table is None and scheduler.cache.pool.used == 2
    a = submit(scheduler, "a", [2] * 10, new=1)
    b = submit(scheduler, "b", [3] * 40, new=1)
    compute(scheduler)
    assert len(a.drawn) == 1 and not b.drawn and scheduler.cache.dropped_tokens == 0
    compute(scheduler)
    assert len(b.drawn) == 1 and scheduler.cache.dropped_tokens == 30


def test_what_can_never_fit_is_refused_with_numbers():
    """B113: a request longer than the KV budget but under the maximum length."""
    scheduler = make(blocks=62, max_context=2000)
    with pytest.raises(SamplerError, match=r"1500 \+ max_new_tokens 8 = 1508 .* KV budget of 992"):
        submit(scheduler, "a", [1] * 1500)
    with pytest.raises(SamplerError, match=r"1990 \+ max_new_tokens 11 = 2001 .* context of 2000"):
        submit(scheduler, "b", [1] * 1990, new=11)
    submit(scheduler, "c", [1] * 5)
    assert admit(scheduler) == ["c"]


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
    turn = submit(scheduler, "a", [1])
    with pytest.raises(SamplerError, match="middle of a turn"):
        submit(scheduler, "a", [1])
    with pytest.raises(SamplerError, match="unknown session `z`"):
        scheduler.submit(Turn("z", (1,), SamplingParams(max_new_tokens=1), 0.0))
    admit(scheduler)
    assert scheduler.find("a") is turn
    scheduler.finish(turn, keep=True)
    assert scheduler.find("a") is None
    submit(scheduler, "a", [1])


def test_a_turn_that_ends_while_it_waits_leaves_nothing_behind():
    scheduler = make(blocks=4, max_rows=1)
    running = submit(scheduler, "a", [1] * 30)
    waiting = submit(scheduler, "b", [1] * 30)
    admit(scheduler)
    scheduler.finish(waiting, keep=True)
    scheduler.finish(running, keep=False)
    assert scheduler.cache.pool.used == 0 and not scheduler.waiting
    submit(scheduler, "b", [1])


def test_the_parts_of_a_completion_have_one_length():
    scheduler = make()
    turn = submit(scheduler, "a", [1, 2])
    turn.ids.append(7)
    turn.logprobs.append(-1.0)
    turn.versions.append(3)
    turn.entropies.append(0.5)
    done = turn.completion(StopReason.LENGTH)
    assert (done.ids, done.logprobs, done.versions, done.entropies) == ((7,), (-1.0,), (3,), (0.5,))
    assert done.prompt_tokens == 2


class Histories(RuleBasedStateMachine):
    """Opens, turns, steps, cancels, releases and publications in any order, on few blocks.

    A device remembers what every position was computed from; a row must find exactly its own
    ids there, under the weights of its key. Every turn must draw what it would draw alone.
    """

    BLOCKS = 10

    def __init__(self):
        super().__init__()
        self.scheduler = make(blocks=self.BLOCKS, max_rows=3, max_context=200, prefill_tokens=24)
        self.cache = self.scheduler.cache
        self.device = Device(self.cache)
        self.opened = 0
        self.turns = []
        self.history = {}

    def idle(self):
        return sorted(s for s in self.cache._sessions if self.scheduler.find(s) is None)

    @rule(adapter=st.sampled_from(["", "", "x"]))
    def open(self, adapter):
        name = f"s{self.opened}"
        self.cache.open(name, adapter)
        self.history[name] = []
        self.opened += 1

    @precondition(lambda self: self.idle())
    @rule(
        data=st.data(),
        kind=st.integers(0, 2),
        length=st.integers(1, 60),
        new=st.integers(1, 40),
        cut=st.integers(0, 100),
    )
    def sample(self, data, kind, length, new, cut):
        session = data.draw(st.sampled_from(self.idle()))
        prompt = [kind] * length
        if kind == 0:
            prompt = [*self.history[session], *prompt]
        elif kind == 1:
            prompt = [*self.history[session][:cut], 8, *prompt]
        if len(prompt) + new > self.BLOCKS * 16:
            return
        self.turns.append(submit(self.scheduler, session, prompt, new=new))

    @precondition(lambda self: self.scheduler.rows or self.scheduler.waiting)
    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            compute(self.scheduler, self.device)
            self.collect()

    def collect(self):
        for turn in [t for t in self.turns if self.scheduler.find(t.session) is not t]:
            self.turns.remove(turn)
            self.history[turn.session] = list(turn.ids)

    @precondition(lambda self: self.turns)
    @rule(data=st.data())
    def cancel(self, data):
        turn = data.draw(st.sampled_from(self.turns))
        self.scheduler.finish(turn, keep=True)
        self.collect()

    @precondition(lambda self: self.cache._sessions)
    @rule(data=st.data())
    def release(self, data):
        session = data.draw(st.sampled_from(sorted(self.cache._sessions)))
        turn = self.scheduler.find(session)
        if turn is not None:
            self.scheduler.finish(turn, keep=True)
            self.collect()
        self.cache.close(session)

    @rule(adapter=st.sampled_from([None, "", "x"]), recompute=st.booleans())
    def publish(self, adapter, recompute):
        self.cache.invalidate(adapter)
        for row in reversed(self.scheduler.rows):
            begun = row.drawn and row.pending == 1
            if adapter in (None, row.adapter) and (recompute or not begun):
                self.scheduler.preempt(row)

    @rule()
    def offload(self):
        for row in reversed(self.scheduler.rows):
            self.scheduler.preempt(row)
        self.cache.clear()
        self.device.content.clear()

    @invariant()
    def every_position_holds_what_it_should(self):
        for row in self.scheduler.rows:
            self.device.expect(row.table, row.ids)
        self.device.check_tree()

    @invariant()
    def no_block_is_lost_or_counted_twice(self):
        idle = [s.table for s in self.cache._sessions.values() if s.table is not None]
        self.device.check_pool([*(row.table for row in self.scheduler.rows), *idle])

    @invariant()
    def every_token_is_accounted_for(self):
        for turn in self.turns:
            alone = Turn(turn.session, turn.prompt, turn.params, 0.0)
            while len(alone.ids) < len(turn.ids):
                alone.ids.append(token(alone))
            assert turn.ids == alone.ids

    def teardown(self):
        for _ in range(2000):
            if not self.turns:
                break
            compute(self.scheduler, self.device)
            self.collect()
        assert not self.turns, "a turn never ended"
        self.cache.close_all()
        assert self.cache.pool.free == self.BLOCKS
        assert self.cache.num_sessions == 0 and not self.scheduler._busy


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
