"""Values come back exactly; damage is noticed; size is linear."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.run_builders import f32, make_failed, make_task, make_trajectory, said, seen
from treadle.errors import StoreError
from treadle.store import encode

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(values)
def test_any_data_comes_back_equal_with_its_types(value):
    copy = encode.loads(encode.dumps(value))
    assert copy == value
    assert repr(copy) == repr(value)


@pytest.mark.parametrize("key", ["$tuple", "$pairs", "$float", "$other"])
def test_a_dict_that_looks_like_our_own_marks_comes_back_as_a_dict(key):
    value = {key: [1, 2], "deep": {key: "nan"}}
    assert encode.loads(encode.dumps(value)) == value


def test_nan_and_numpy_scalars_are_data():
    copy = encode.loads(encode.dumps({"a": math.nan, "b": np.int64(3), "c": np.float32(0.5)}))
    assert copy["a"] is math.nan
    assert (copy["b"], copy["c"]) == (3, 0.5)


def test_something_that_is_not_data_is_named_by_its_path():
    with pytest.raises(StoreError, match=r"task add-1\.data\.oracle\.1 is a builtins\.object"):
        encode.dump_task(replace(make_task(1), data={"oracle": (1, object())}))


def test_tasks_with_tuples_and_integer_keys_come_back_equal():
    assert encode.load_task(encode.dump_task(make_task(4))) == make_task(4)


@pytest.mark.parametrize("make", [make_trajectory, make_failed])
def test_a_trajectory_comes_back_equal_nan_included(make):
    whole = make(3, 1)
    assert encode.unpack_trajectory(encode.pack_trajectory(whole), whole.task, "t") == whole


def test_float32_values_come_back_bit_for_bit_and_others_as_float64():
    rng = random.Random(0)
    narrow = [f32(-rng.expovariate(1.0)) for _ in range(1000)]
    narrow += [f32(1e-45), 0.0, -0.0, f32(3.4e38)]
    wide = [*narrow, 1 / 3, -1e300, math.inf, -math.inf]
    for logprobs in (narrow, wide):
        out = encode.unpack_tokens(encode.pack_tokens({"logprobs": logprobs}), "x")["logprobs"]
        assert [v.hex() for v in out] == [v.hex() for v in logprobs]
    assert len(encode.pack_tokens({"logprobs": narrow})) < 4 * len(narrow) + 100


def test_an_id_beyond_32_bits_is_refused():
    with pytest.raises(StoreError, match="32 bits"):
        encode.pack_tokens({"ids": (2**31,)})


def test_every_flipped_byte_is_noticed():
    whole = make_trajectory(0, 0)
    blob = encode.pack_trajectory(whole)
    for at in range(len(blob)):
        bad = blob[:at] + bytes([blob[at] ^ 0x10]) + blob[at + 1 :]
        try:
            # A flip in an unused bit of the frame header may be harmless; a wrong value is not.
            assert encode.unpack_trajectory(bad, whole.task, "trajectory 0/0") == whole
        except StoreError as error:
            assert "trajectory 0/0: stored tokens are damaged" in str(error)


def test_size_grows_with_tokens_not_with_turns_times_context():
    """B191: 100 turns x 500 tokens; a node holds only what it added."""
    rng = random.Random(1)

    def run(turns: int):
        nodes = [seen(0, None, tuple(rng.randrange(50_000) for _ in range(500)))]
        for t in range(turns):
            ids = tuple(rng.randrange(50_000) for _ in range(250))
            nodes.append(said(2 * t + 1, 2 * t, ids))
            ids = tuple(rng.randrange(50_000) for _ in range(250))
            nodes.append(seen(2 * t + 2, 2 * t + 1, ids, "ok"))
        return replace(make_trajectory(0, 0), nodes=tuple(nodes))

    ten, hundred = run(10), run(100)
    sizes = [len(encode.pack_trajectory(t)) for t in (ten, hundred)]
    assert sizes[1] < 10.5 * sizes[0]
    again = encode.unpack_trajectory(encode.pack_trajectory(hundred), hundred.task, "t")
    (branch,) = again.branches()
    assert sum(len(n.ids) for n in branch) == 500 + 100 * 500
    assert again == hundred
