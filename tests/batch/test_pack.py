"""Packing: nothing lost, nothing twice, budget kept, neighbours apart."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.batch import MicroBatch, pack
from treadle.errors import ContractError
from treadle.types import Layout, Sample


def sample(
    ordinal: int,
    ids: Sequence[int],
    trained: Sequence[bool | int],
    *,
    advantage: float = 1.0,
    temperature: float = 1.0,
    name: str = "t",
) -> Sample:
    """Token at position t has logprob -t and version t where it is trained."""
    return Sample(
        trajectory_id=name,
        ordinal=ordinal,
        ids=tuple(ids),
        trained=tuple(bool(t) for t in trained),
        logprobs=tuple(-float(i) if t else math.nan for i, t in enumerate(trained)),
        versions=tuple(i if t else -1 for i, t in enumerate(trained)),
        advantages=tuple(advantage if t else math.nan for t in trained),
        temperature=temperature,
    )


def context(micro: MicroBatch, place: int) -> list[int]:
    """Ids that the token at a packed place attends to, itself included, in order."""
    segments = micro.layout.segments
    own = next(i for i, s in enumerate(segments) if s.start <= place < s.start + s.length)
    ids: list[int] = []
    for i in micro.layout.ancestors(own):
        assert segments[i].position == len(ids)
        ids += micro.ids[segments[i].start : segments[i].start + segments[i].length].tolist()
    assert segments[own].position == len(ids)
    return ids + micro.ids[segments[own].start : place + 1].tolist()


# --------------------------------------------------------------------------- by hand


def test_two_rows_that_share_a_prompt_are_three_segments() -> None:
    (micro,) = pack(
        [sample(0, [7, 8, 9, 1, 2], [0, 0, 0, 1, 1]), sample(0, [7, 8, 9, 3], [0, 0, 0, 1])],
        micro_tokens=64,
    )
    assert micro.ids.tolist() == [7, 8, 9, 1, 2, 3]
    assert [(s.start, s.length, s.parent, s.position) for s in micro.layout.segments] == [
        (0, 3, None, 0),
        (3, 2, 0, 3),
        (5, 1, 0, 3),
    ]
    assert micro.targets.tolist() == [1, 2, 3]
    assert micro.index.tolist() == [2, 3, 2]
    assert micro.row.tolist() == [0, 0, 1]
    assert micro.position.tolist() == [3, 4, 3]


def test_exactly_the_predictions_of_trained_tokens_count() -> None:
    """B015: the mask belongs to the predicted token, so the first response token is in."""
    (micro,) = pack([sample(0, [1, 2, 3, 11, 12], [0, 0, 0, 1, 1])], micro_tokens=64)
    assert micro.targets.tolist() == [11, 12]
    assert micro.index.tolist() == [2, 3]
    assert micro.behaviour.tolist() == [-3.0, -4.0]


def test_the_first_token_of_a_packed_row_is_never_predicted_by_its_neighbour() -> None:
    """B056: three samples packed; each target is predicted from its own row."""
    rows = [sample(i, [10 * i, 10 * i + 1, 10 * i + 2], [0, 1, 1]) for i in range(3)]
    (micro,) = pack(rows, micro_tokens=64)
    assert len(micro.targets) == len(micro.behaviour) == len(micro.index) == 6
    for index, row, position in zip(micro.index, micro.row, micro.position, strict=True):
        assert context(micro, int(index)) == list(rows[row].ids[:position])


def test_tokens_of_a_tool_between_two_turns_are_context_and_not_targets() -> None:
    (micro,) = pack([sample(0, [1, 2, 50, 51, 3], [0, 1, 0, 0, 1])], micro_tokens=64)
    assert micro.targets.tolist() == [2, 3]
    assert context(micro, int(micro.index[1])) == [1, 2, 50, 51]


def test_prompts_that_agree_in_part_share_that_part() -> None:
    """Sub-agents of one group: a common system prompt, then questions of their own."""
    rows = [
        sample(0, [1, 2, 3, 90], [0, 0, 0, 1]),
        sample(0, [1, 2, 4, 91], [0, 0, 0, 1]),
        sample(0, [1, 2, 3, 92], [0, 0, 0, 1]),
        sample(0, [1, 2, 93], [0, 0, 1]),
        sample(0, [5, 94], [0, 1]),
    ]
    (micro,) = pack(rows, micro_tokens=64)
    assert micro.num_tokens == len([1, 2, 3, 4, 5]) + 5
    for index, row, position in zip(micro.index, micro.row, micro.position, strict=True):
        assert context(micro, int(index)) == list(rows[row].ids[:position])


def test_equal_completions_stay_rows_of_their_own() -> None:
    """Only prompts are shared: two samples of one answer are two rows with two behaviours."""
    (micro,) = pack([sample(0, [1, 2, 3], [0, 1, 1])] * 2, micro_tokens=64)
    assert micro.num_tokens == 5 and micro.num_trained == 4


def test_groups_share_nothing_even_with_equal_prompts() -> None:
    """B054: no token of one group is in the context of another."""
    (micro,) = pack([sample(0, [1, 2], [0, 1]), sample(1, [1, 3], [0, 1])], micro_tokens=64)
    assert micro.num_tokens == 4
    assert [s.parent for s in micro.layout.segments] == [None, None]


def test_all_of_ten_samples_are_packed() -> None:
    """B047: left-overs are not dropped."""
    rows = [sample(i, [1, 2, 3, 4], [0, 1, 1, 1]) for i in range(10)]
    micros = pack(rows, micro_tokens=16)
    assert [len(set(m.row.tolist())) for m in micros] == [4, 4, 2]


def test_first_fit_fills_earlier_micro_batches() -> None:
    lengths = [10, 10, 6, 6]
    micros = pack(
        [sample(i, range(n), [0] + [1] * (n - 1)) for i, n in enumerate(lengths)], micro_tokens=16
    )
    assert [sorted(set(m.row.tolist())) for m in micros] == [[0, 2], [1, 3]]


def test_a_group_larger_than_the_budget_repeats_its_prompt() -> None:
    rows = [sample(0, [1, 2, 3, 4, 5, 6, 10 + i], [0] * 6 + [1]) for i in range(6)]
    micros = pack(rows, micro_tokens=8)
    assert [m.ids.tolist() for m in micros] == [
        [1, 2, 3, 4, 5, 6, 10 + i, 11 + i] for i in (0, 2, 4)
    ]


def test_a_row_longer_than_the_budget_stands_alone_uncut_and_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B024: nothing is cut in silence, and the limit is only passed where a row must."""
    rows = [sample(i, range(4), [0, 1, 1, 1]) for i in range(2)]
    rows.insert(1, sample(5, range(40), [0] + [1] * 39, name="5/2"))
    with caplog.at_level(logging.WARNING):
        micros = pack(rows, micro_tokens=16)
    assert [m.num_tokens for m in micros] == [8, 40]
    assert sum(m.num_trained for m in micros) == 45
    assert "a row of 40 tokens (trajectory 5/2)" in caplog.text


# --------------------------------------------------------------------------- properties


@st.composite
def some_samples(draw: st.DrawFn) -> list[Sample]:
    """Rows of a few groups over a tiny vocabulary, so that prompts agree often and in part."""
    rows: list[Sample] = []
    for ordinal in draw(st.lists(st.integers(0, 3), min_size=1, max_size=10)):
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
        tail = draw(st.lists(st.integers(0, 1), min_size=0, max_size=5))
        mask = (
            [False] * len(prompt)
            + [True]
            + draw(st.lists(st.booleans(), min_size=len(tail), max_size=len(tail)))
        )
        rows.append(
            sample(
                ordinal,
                [*prompt, 1, *tail],
                mask,
                advantage=float(len(rows)),
                temperature=0.5 + len(rows),
            )
        )
    return rows


@settings(max_examples=80, deadline=None)
@given(some_samples(), st.integers(1, 40))
def test_every_trained_token_is_packed_once_with_its_own_behaviour_and_context(
    rows: list[Sample], micro_tokens: int
) -> None:
    micros = pack(rows, micro_tokens=micro_tokens)
    wanted = {(r, t) for r, s in enumerate(rows) for t, on in enumerate(s.trained) if on}
    found: list[tuple[int, int]] = []
    for micro in micros:
        assert micro.num_tokens == micro.layout.num_tokens
        alone = len(set(micro.row.tolist())) == 1
        assert micro.num_tokens <= micro_tokens or alone
        for k in range(micro.num_trained):
            r, t = int(micro.row[k]), int(micro.position[k])
            found.append((r, t))
            assert context(micro, int(micro.index[k])) == list(rows[r].ids[:t])
            assert micro.targets[k] == rows[r].ids[t]
            assert micro.behaviour[k] == rows[r].logprobs[t]
            assert micro.version[k] == rows[r].versions[t]
            assert micro.advantage[k] == rows[r].advantages[t]
            assert micro.temperature[k] == np.float32(rows[r].temperature)
    assert len(found) == len(wanted) and set(found) == wanted
    owners = [r for micro in micros for r in sorted(set(micro.row.tolist()))]
    assert sorted(owners) == list(range(len(rows)))


@settings(max_examples=40, deadline=None)
@given(some_samples(), st.integers(1, 40))
def test_packing_is_deterministic_and_parents_precede_children(
    rows: list[Sample], micro_tokens: int
) -> None:
    once, twice = pack(rows, micro_tokens=micro_tokens), pack(rows, micro_tokens=micro_tokens)
    for a, b in zip(once, twice, strict=True):
        assert a.layout == b.layout and a.ids.tolist() == b.ids.tolist()
        assert a.index.tolist() == b.index.tolist() and a.row.tolist() == b.row.tolist()
        check_forest(a.layout)


def check_forest(layout: Layout) -> None:
    start = 0
    for i, segment in enumerate(layout.segments):
        assert segment.start == start and segment.length > 0
        assert segment.parent is None or segment.parent < i
        start += segment.length


@settings(max_examples=40, deadline=None)
@given(some_samples())
def test_sharing_stores_each_prompt_of_a_group_once(rows: list[Sample]) -> None:
    """The packed size of one micro-batch is the number of distinct prompt starts plus the rest."""
    (micro,) = pack(rows, micro_tokens=10_000)
    starts = {(s.ordinal, s.ids[:k]) for s in rows for k in range(1, s.trained.index(True) + 1)}
    rest = sum(len(s.ids) - s.trained.index(True) for s in rows)
    assert micro.num_tokens == len(starts) + rest


# --------------------------------------------------------------------------- hazards


def test_nan_at_untrained_positions_is_not_packed() -> None:
    (micro,) = pack([sample(0, [1, 2, 3, 4], [0, 1, 0, 1])], micro_tokens=64)
    assert np.isfinite(micro.behaviour).all() and (micro.version >= 0).all()


def test_nested_prompts_share_every_stretch() -> None:
    """Branches whose contexts extend one another: each adds one token and its completion."""
    rows = [sample(0, [1] * n + [2], [0] * n + [1]) for n in range(1, 300)]
    (micro,) = pack(rows, micro_tokens=10**6)
    assert micro.num_tokens == 299 + 299
    check_forest(micro.layout)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (sample(0, [1, 2], [1, 1]), "first token is marked as trained"),
        (sample(0, [1, 2], [0, 0]), "has no trained token"),
        (
            Sample(
                trajectory_id="t",
                ordinal=0,
                ids=(1, 2),
                trained=(False, True),
                logprobs=(-1.0,),
                versions=(0, 0),
                advantages=(math.nan, 1.0),
                temperature=1.0,
            ),
            r"have lengths \[2, 2, 1, 2, 2\]",
        ),
        # Beyond float32 it would become infinite on the way to the trainer.
        (sample(0, [1, 2], [0, 1], advantage=1e39), "trained token 1 of 2 has advantage 1e.39"),
    ],
)
def test_malformed_samples_are_refused(bad: Sample, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        pack([bad], micro_tokens=64)


def test_packing_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, treadle.batch, treadle.advantage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
