"""Which prefixes are found again, who owns them, and what is given up first."""

from tests.sampler.kv_model import turn
from treadle.sampler.engine.blocks import BLOCK
from treadle.sampler.engine.cache import KvCache


def make(blocks, *sessions):
    cache = KvCache(blocks)
    for name in sessions:
        cache.open(name)
    return cache


def test_a_later_turn_reuses_the_sessions_own_ids():
    cache = make(64, "a")
    prompt = list(range(20))
    assert turn(cache, "a", prompt) == 0
    longer = [*prompt, *range(900, 908), 5, 6]
    assert turn(cache, "a", longer) == 27, "20 + 8 drawn, the last of which was never computed"


def test_a_rewritten_history_reuses_the_common_part():
    cache = make(64, "a")
    turn(cache, "a", list(range(40)))
    assert turn(cache, "a", [*range(18), 7, 7, 7]) == 18
    assert turn(cache, "a", [*range(40), 1]) == 40, "what was rewritten can still be found"


def test_an_equal_prompt_still_computes_its_last_token():
    cache = make(64, "a", "b")
    prompt = list(range(33))
    assert turn(cache, "a", prompt) == 0
    assert turn(cache, "b", prompt) == 32


def test_prompts_that_begin_alike_share_to_the_token_whoever_computed_them():
    cache = make(64, *"abcd")
    turn(cache, "a", list(range(40)))
    assert turn(cache, "b", [*range(21), 500, 501]) == 21
    cache.close("a")
    assert turn(cache, "c", [*range(38), 500]) == 38
    assert turn(cache, "d", [1, *range(30)]) == 0


def test_versions_and_adapters_never_share():
    cache = make(64, "a", "b")
    for name in ("x", "y"):
        cache.open(name, "one" if name == "x" else "two")
    prompt = list(range(33))
    assert [turn(cache, s, prompt) for s in ("a", "x", "y")] == [0, 0, 0]
    cache.invalidate("one")
    assert [turn(cache, s, prompt) for s in ("b", "x", "y")] == [32, 0, 32]
    cache.invalidate()
    assert [turn(cache, s, prompt) for s in ("a", "x", "y")] == [0, 0, 0]


def test_closing_a_session_frees_what_it_alone_held_and_it_is_found_until_overwritten():
    cache = make(6, *"abc")
    prompt = list(range(32))
    turn(cache, "a", prompt)
    turn(cache, "b", [*prompt, 7])
    assert cache.pool.used == 4, "two shared blocks and one each of what came after"
    cache.close("a")
    assert cache.pool.used == 3, "the shared prompt is still held by b"
    cache.close("b")
    assert cache.pool.used == 0 and cache.pool.free == 6
    assert turn(cache, "c", prompt) == 31


def test_kv_of_closed_sessions_is_overwritten_before_any_open_session_is_asked():
    cache = make(8, *"abc")
    turn(cache, "a", [1] * 24)
    turn(cache, "b", [2] * 24)
    cache.close("a")
    assert cache.claim("c", [3] * 80, 90) is not None, "four empty blocks and two of a"
    assert cache.dropped_tokens == 0 and cache.pool.evicted_tokens == 31
    assert cache._sessions["b"].table is not None


def test_an_open_session_keeps_its_kv_unless_the_caller_insists():
    cache = make(6, *"abc")
    turn(cache, "a", [1] * 24)
    turn(cache, "b", [2] * 24)
    assert cache.claim("c", [3] * 40, 48) is None
    assert cache.dropped_tokens == 0
    assert cache.claim("c", [3] * 40, 48, insist=True) is not None
    assert cache.dropped_tokens == 31, "a, the longest idle: 24 + 8 drawn, the last never computed"
    assert cache._sessions["b"].table is not None


def test_the_least_recently_used_is_overwritten_first_and_leaves_before_roots():
    cache = make(4, *"abcd")
    turn(cache, "a", [1] * 31, new=1)
    turn(cache, "b", [2] * 31, new=1)
    cache.close("a")
    cache.close("b")
    turn(cache, "c", [3] * 10, new=1)
    cache.close("c")
    assert cache._tree.length(cache._key(""), [1] * 31, 30) == 16, "the end of a was overwritten"
    assert cache._tree.length(cache._key(""), [2] * 31, 30) == 30


def test_new_weights_drop_idle_kv_at_once_and_running_kv_at_its_end():
    cache = make(64, "idle", "running")
    prompt = list(range(20))
    turn(cache, "idle", prompt)
    claim = cache.claim("running", prompt, 40)
    claim.table.length = 30
    cache.invalidate()
    assert cache.pool.used == len(claim.table.blocks)
    cache.keep("running", claim.table, [*prompt, *range(20)], claim.epoch)
    assert cache.pool.used == 0
    assert turn(cache, "idle", prompt) == 0


def test_room_that_must_be_left_is_left():
    cache = make(6, "a")
    assert cache.claim("a", [1] * 40, 48, spare=4) is None
    assert cache.claim("a", [1] * 40, 48, spare=3) is not None


def test_a_prompt_that_fills_the_whole_budget_gets_it_from_what_it_shares():
    """The shared partial block would need a copy, for which there is no block."""
    cache = make(4, "a", "b")
    prompt = [1] * 20
    turn(cache, "a", prompt, new=2)
    claim = cache.claim("b", prompt, 4 * BLOCK, insist=True)
    assert claim is not None and len(claim.table.blocks) == 4


def test_two_sequences_that_computed_the_same_end_up_with_one_copy():
    cache = make(16, "a", "b")
    prompt = list(range(32))
    claims = [cache.claim(s, prompt, 33) for s in "ab"]
    for session, claim in zip("ab", claims, strict=True):
        claim.table.length = 32
        cache.remember(session, claim.table, prompt, claim.epoch)
    assert claims[0].table.blocks[:2] == claims[1].table.blocks[:2]
    assert cache.pool.used == 4
