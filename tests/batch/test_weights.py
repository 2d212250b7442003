"""Aggregation: what a token weighs, against the reference table and by its invariances."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.batch import AGGREGATIONS, pack, token_weights
from treadle.errors import ConfigError, ContractError
from treadle.types import Sample

NORM = 4
EVERY = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def row(trained: int, *, rollout: str, prompt: int = 0, taskset: str = "") -> Sample:
    """A prompt of one token and `trained` tokens to learn."""
    n = 1 + trained
    return Sample(
        trajectory_id=rollout,
        ordinal=prompt,
        ids=tuple(range(n)),
        trained=(False,) + (True,) * trained,
        logprobs=(math.nan,) + (-1.0,) * trained,
        versions=(-1,) + (0,) * trained,
        advantages=(math.nan,) + (1.0,) * trained,
        temperature=1.0,
        taskset=taskset,
    )


LOSSES = [[1.0, 2.0, 3.0, 4.0], [10.0], []]
"""Per-token losses of three rows; the third has nothing to train."""
ROWS = [row(4, rollout="0/0"), row(1, rollout="0/1"), row(0, rollout="1/0", prompt=1)]


def aggregate(rows: Sequence[Sample], losses: Sequence[Sequence[float]], mode: str) -> float:
    weights = token_weights(rows, mode, norm_tokens=NORM)
    return sum(w * sum(values) for w, values in zip(weights, losses, strict=True))


# --------------------------------------------------------------------------- reference


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("token_mean", 4.0),
        ("token_sum", 20.0),
        ("seq_mean_token_sum", 10.0),
        ("seq_mean_token_sum_norm", 2.5),
        ("seq_mean_token_mean", 6.25),
        ("prompt_mean", 4.0),
    ],
)
def test_reference_values(mode: str, wanted: float) -> None:
    """l = [[1,2,3,4],[10],[]]: a row without trained tokens is in no count."""
    assert aggregate(ROWS, LOSSES, mode) == pytest.approx(wanted)


def test_the_weight_of_one_token_by_the_table() -> None:
    """N = 5 tokens, S = 2 rollouts, P = 1 prompt."""
    wanted = {
        "token_mean": [1 / 5, 1 / 5],
        "seq_mean_token_mean": [1 / 8, 1 / 2],
        "seq_mean_token_sum": [1 / 2, 1 / 2],
        "seq_mean_token_sum_norm": [1 / 8, 1 / 8],
        "prompt_mean": [1 / 5, 1 / 5],
        "token_sum": [1.0, 1.0],
    }
    for mode in AGGREGATIONS:
        assert token_weights(ROWS, mode, norm_tokens=NORM) == [*wanted[mode], 0.0], mode


def test_two_prompts_of_unequal_length_weigh_the_same_in_prompt_mean() -> None:
    rows = [row(6, rollout="0/0"), row(2, rollout="0/1"), row(2, rollout="1/0", prompt=1)]
    weights = token_weights(rows, "prompt_mean")
    assert [w * sum(r.trained) for w, r in zip(weights, rows, strict=True)] == pytest.approx(
        [6 / 16, 2 / 16, 1 / 2]
    )


def test_equal_blame_per_token_where_the_mode_says_so() -> None:
    """B045: rows of 10 and 100 tokens. A mean per row blames the tokens of the long one less."""
    rows = [row(10, rollout="0/0"), row(100, rollout="0/1")]
    for mode in set(AGGREGATIONS) - {"seq_mean_token_mean"}:
        short, long = token_weights(rows, mode, norm_tokens=NORM)
        assert short == long, mode
    short, long = token_weights(rows, "seq_mean_token_mean")
    assert short == pytest.approx(10 * long)


# --------------------------------------------------------------------------- several rows


@EVERY
def test_a_rollout_of_several_rows_weighs_as_much_as_one_of_a_single_row(aggregation: str) -> None:
    """B038: 2 + 3 + 1 tokens in three branches, or 6 in one: the same weights everywhere."""
    other = row(3, rollout="0/1")
    whole = token_weights([row(6, rollout="0/0"), other], aggregation, norm_tokens=NORM)
    parts = token_weights(
        [row(2, rollout="0/0"), other, row(3, rollout="0/0"), row(1, rollout="0/0")],
        aggregation,
        norm_tokens=NORM,
    )
    assert parts == [whole[0], whole[1], whole[0], whole[0]]


def test_rows_of_different_modes_weigh_what_they_would_if_all_used_theirs() -> None:
    rows = [row(4, rollout="0/0"), row(1, rollout="0/1"), row(2, rollout="1/0", prompt=1)]
    modes = ["token_mean", "seq_mean_token_mean", "prompt_mean"]
    mixed = token_weights(rows, modes)
    assert mixed == [token_weights(rows, mode)[i] for i, mode in enumerate(modes)]


# --------------------------------------------------------------------------- invariances

ROW = st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 2))


@given(st.lists(ROW, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_order_does_not_matter_and_every_unit_weighs_the_same(specs, random) -> None:
    rows = [row(n, rollout=f"{p}/{u}", prompt=p) for n, u, p in specs]
    order = list(range(len(rows)))
    random.shuffle(order)
    for mode in AGGREGATIONS:
        weights = token_weights(rows, mode, norm_tokens=NORM)
        again = token_weights([rows[i] for i in order], mode, norm_tokens=NORM)
        assert again == [weights[i] for i in order]
        of_rollout, of_prompt = Counter[str](), Counter[int]()
        for r, w in zip(rows, weights, strict=True):
            of_rollout[r.trajectory_id] += w * sum(r.trained)
            of_prompt[r.ordinal] += w * sum(r.trained)
        total = sum(of_rollout.values())
        if mode in ("token_mean", "seq_mean_token_mean", "prompt_mean"):
            assert total == pytest.approx(1.0) or total == 0
        units = {"seq_mean_token_mean": of_rollout, "prompt_mean": of_prompt}.get(mode, {})
        assert len({round(v, 12) for v in units.values() if v}) <= 1


@EVERY
def test_packing_carries_each_rows_weight_to_its_tokens(aggregation: str) -> None:
    rows = [row(1 + i, rollout=f"{i % 2}/{i}", prompt=i % 2) for i in range(5)]
    weights = token_weights(rows, aggregation, norm_tokens=NORM)
    for micro_tokens in (64, 6):
        seen = 0
        for micro in pack(rows, micro_tokens=micro_tokens, weights=weights):
            seen += micro.num_trained
            assert micro.weight.tolist() == pytest.approx([weights[r] for r in micro.row])
            assert sorted(set(micro.sequence.tolist())) == list(range(len(set(micro.row))))
            pairs = set(zip(micro.row.tolist(), micro.sequence.tolist(), strict=True))
            assert len(pairs) == len(set(micro.row))
        assert seen == 15


def test_without_weights_every_token_of_the_samples_weighs_the_same() -> None:
    micros = pack([row(3, rollout="0/0"), row(1, rollout="0/1")], micro_tokens=4)
    assert len(micros) == 2
    assert [w for m in micros for w in m.weight.tolist()] == [0.25] * 4


# --------------------------------------------------------------------------- hazards


def test_an_unknown_mode_is_a_mistake_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="unknown aggregation `token_men`") as caught:
        token_weights(ROWS, "token_men")
    assert "`token_mean`" in caught.value.hint


def test_a_fixed_length_that_is_missing_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="divides by a fixed number of tokens, got 0"):
        token_weights(ROWS, "seq_mean_token_sum_norm")


def test_no_samples_have_no_weights() -> None:
    assert token_weights([], "token_mean") == []
    assert token_weights([ROWS[2]], "token_mean") == [0.0]


def test_weights_of_other_samples_are_refused() -> None:
    with pytest.raises(ContractError, match="2 samples came with 1 weights"):
        pack(ROWS[:2], micro_tokens=64, weights=[1.0])
