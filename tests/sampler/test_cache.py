"""Which prefixes are reused, and what is given up first."""

from treadle.sampler.engine.blocks import BLOCK
from treadle.sampler.engine.cache import KvCache


def turn(cache, session, prompt, new=8):
    """Claim, compute, decode `new` tokens and leave the KV idle; returns the cached length."""
    claim = cache.claim(session, prompt, len(prompt) + new)
    assert claim is not None
    cached = claim.table.length
    claim.table.length = len(prompt)
    cache.remember(session, claim.table, prompt)
    ids = [*prompt, *range(900, 900 + new)]
    claim.table.length = len(ids) - 1
    cache.keep(session, claim.table, ids, claim.epoch)
    return cached


def test_a_later_turn_reuses_the_sessions_own_ids():
    cache = KvCache(64)
    cache.open("a", "")
    prompt = list(range(20))
    assert turn(cache, "a", prompt) == 0
    longer = [*prompt, *range(900, 908), 5, 6]
    assert turn(cache, "a", longer) == 27, "20 + 8 drawn, the last of which was never computed"


def test_a_rewritten_history_reuses_the_common_part():
    cache = KvCache(64)
    cache.open("a", "")
    turn(cache, "a", list(range(40)))
    assert turn(cache, "a", [*range(18), 7, 7, 7]) == 18


def test_an_equal_prompt_still_computes_its_last_token():
    cache = KvCache(64)
    for name in ("a", "b"):
        cache.open(name, "g")
    prompt = list(range(33))
    assert turn(cache, "a", prompt) == 0
    assert turn(cache, "b", prompt) == 32


def test_groups_do_not_share_with_each_other_nor_without_a_group():
    cache = KvCache(64)
    for name, group in (("a", "g"), ("b", "h"), ("c", ""), ("d", "")):
        cache.open(name, group)
        assert turn(cache, name, list(range(33))) == 0


def test_a_prompt_outlives_its_first_session_but_not_its_group():
    cache = KvCache(64)
    for name in ("a", "b"):
        cache.open(name, "g")
    turn(cache, "a", list(range(33)))
    cache.close("a")
    assert turn(cache, "b", list(range(33))) == 32
    cache.close("b")
    assert cache.pool.used == 0 and cache.num_groups == 0


def test_new_weights_drop_idle_kv_at_once_and_running_kv_at_its_end():
    cache = KvCache(64)
    for name in ("idle", "running"):
        cache.open(name, "g")
    prompt = list(range(20))
    turn(cache, "idle", prompt)
    claim = cache.claim("running", prompt, 40)
    claim.table.length = 30
    cache.invalidate()
    assert cache.pool.used == len(claim.table.blocks)
    cache.keep("running", claim.table, [*prompt, *range(20)], claim.epoch)
    assert cache.pool.used == 0
    assert turn(cache, "idle", prompt) == 0


def test_the_longest_idle_session_is_given_up_first_and_counted():
    cache = KvCache(6)
    for name in "abc":
        cache.open(name, "")
    turn(cache, "a", [1] * 24)
    turn(cache, "b", [2] * 24)
    assert cache.claim("c", [3] * 40, 48) is not None
    assert cache.dropped_tokens == 31, "a: 24 + 8 drawn, the last never computed"
    assert turn(cache, "b", [2] * 24 + [900]) > 0


def test_nothing_is_given_up_when_that_would_not_be_enough():
    cache = KvCache(6)
    for name in "abc":
        cache.open(name, "")
    running = cache.claim("a", [1] * 40, 48)
    turn(cache, "b", [2] * 10, new=2)
    assert cache.claim("c", [3] * 60, 64) is None
    assert cache.dropped_tokens == 0
    running.table.clear()
    assert cache.claim("c", [3] * 60, 64) is not None


def test_a_prompt_that_fills_the_whole_budget_gets_it_from_its_own_group():
    """The shared partial block would need a copy, for which there is no block."""
    cache = KvCache(4)
    for name in ("a", "b"):
        cache.open(name, "g")
    prompt = [1] * 20
    turn(cache, "a", prompt, new=2)
    cache.drop("a")
    claim = cache.claim("b", prompt, 4 * BLOCK)
    assert claim is not None and claim.table.length == 19
