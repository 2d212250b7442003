"""Trajectories to rows: token truth, branches, and what never becomes a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from treadle.batch import samples
from treadle.errors import ContractError
from treadle.types import (
    Group,
    Node,
    Party,
    Reward,
    Sample,
    SamplingParams,
    Source,
    Status,
    Task,
    Trajectory,
)

TASK = Task(id="t", taskset="toy", messages=())
NAN = math.nan


def given(id: int, parent: int | None, *ids: int) -> Node:
    """Tokens that were not sampled."""
    n = len(ids)
    return Node(
        id=id,
        parent=parent,
        party=Party.ENVIRONMENT,
        source=Source.OBSERVATION,
        ids=ids,
        trained=(False,) * n,
        logprobs=(NAN,) * n,
        versions=(-1,) * n,
    )


def sampled(id: int, parent: int | None, *ids: int, untrained_tail: int = 0) -> Node:
    """Tokens that the policy sampled: token i with logprob -i at version i."""
    n = len(ids)
    return Node(
        id=id,
        parent=parent,
        party=Party.POLICY,
        source=Source.SAMPLED,
        ids=ids,
        trained=tuple(i < n - untrained_tail for i in range(n)),
        logprobs=tuple(-float(i) for i in ids),
        versions=ids,
    )


def trajectory(
    *nodes: Node, id: str = "0/0", reward: float | None = 1.0, status: Status = Status.FINISHED
) -> Trajectory:
    return Trajectory(
        id=id,
        task=TASK,
        sample=0,
        nodes=nodes,
        status=status,
        sampling=SamplingParams(max_new_tokens=8, temperature=0.7),
        reward=Reward(value=reward),
    )


def group(*trajectories: Trajectory, ordinal: int = 0) -> Group:
    return Group(ordinal=ordinal, task=TASK, trajectories=trajectories, version=0)


def rows(*trajectories: Trajectory) -> list[Sample]:
    return samples([group(*trajectories)], {t.id: 0.5 for t in trajectories})


def masked(row: Sample, values: Sequence[float]) -> list[float]:
    return [v for v, t in zip(values, row.trained, strict=True) if t]


def test_a_two_turn_trajectory_is_one_row_of_the_very_ids_that_were_sampled() -> None:
    (row,) = rows(
        trajectory(given(0, None, 1, 2), sampled(1, 0, 3, 4), given(2, 1, 5), sampled(3, 2, 6))
    )
    assert row.ids == (1, 2, 3, 4, 5, 6)
    assert row.trained == (False, False, True, True, False, True)
    assert masked(row, row.logprobs) == [-3.0, -4.0, -6.0]
    assert masked(row, row.versions) == [3, 4, 6]
    assert (row.trajectory_id, row.ordinal, row.taskset, row.temperature) == ("0/0", 0, "toy", 0.7)
    assert masked(row, row.advantages) == [0.5, 0.5, 0.5]


def test_the_sampled_end_of_turn_is_trained() -> None:
    """A model that is never taught its stop token never learns to stop (pitfall 7)."""
    eos = 9
    (row,) = rows(trajectory(given(0, None, 1), sampled(1, 0, 3, eos)))
    assert row.ids[-1] == eos and row.trained[-1]


def test_untrained_positions_hold_nan_and_version_minus_one() -> None:
    """Also where the node has a logprob but is not to be trained (B018: an appended EOS)."""
    (row,) = rows(trajectory(given(0, None, 1), sampled(1, 0, 3, 9, untrained_tail=1)))
    assert row.trained == (False, True, False)
    assert [math.isnan(x) for x in row.logprobs] == [True, False, True]
    assert [math.isnan(x) for x in row.advantages] == [True, False, True]
    assert row.versions == (-1, 3, -1)


def test_tokens_of_a_turn_that_new_weights_overtook_are_marked() -> None:
    """A later turn is computed anew: it begins under its own version, whatever came before."""
    crossed = replace(sampled(1, 0, 3, 4, 5), versions=(6, 6, 7))
    later = replace(sampled(3, 2, 6, 7), versions=(7, 7))
    (row,) = rows(trajectory(given(0, None, 1, 2), crossed, given(2, 1, 5), later))
    assert row.versions == (-1, -1, 6, 6, 7, -1, 7, 7)
    assert row.overtaken == (False, False, False, False, True, False, False, False)
    (plain,) = rows(trajectory(given(2, None, 1), later))
    assert plain.overtaken == ()


def test_the_begin_of_a_turn_counts_also_where_credit_took_it_out_of_the_mask() -> None:
    crossed = replace(sampled(1, 0, 3, 4, 5), versions=(6, 7, 7))
    whole = trajectory(given(0, None, 1), crossed)
    (row,) = samples([group(whole)], {"0/0": {0: (NAN,), 1: (NAN, 1.0, 1.0)}})
    assert row.versions == (-1, -1, 7, 7)
    assert row.overtaken == (False, False, True, True)


def test_a_node_shared_by_two_branches_is_trained_in_the_first_alone() -> None:
    """B003: a forked context gives several rows, and no span is trained twice."""
    first, second = rows(
        trajectory(
            given(0, None, 1), sampled(1, 0, 2), sampled(2, 1, 3), given(3, 1, 4), sampled(4, 3, 5)
        )
    )
    assert first.ids == (1, 2, 3) and first.trained == (False, True, True)
    assert second.ids == (1, 2, 4, 5) and second.trained == (False, False, False, True)
    assert math.isnan(second.logprobs[1]) and second.versions[1] == -1


def test_every_sampled_token_is_trained_once_over_all_branches() -> None:
    nodes = [given(0, None, 1), sampled(1, 0, 2, 3)]
    nodes += [sampled(2 + i, 1, 10 + i) for i in range(4)] + [sampled(6, 2, 20), given(7, 3, 30)]
    found = rows(trajectory(*nodes))
    trained = [i for row in found for i, t in zip(row.ids, row.trained, strict=True) if t]
    assert sorted(trained) == [2, 3, 10, 11, 12, 13, 20]


def test_a_branch_with_nothing_left_to_train_gives_no_row() -> None:
    found = rows(trajectory(given(0, None, 1), sampled(1, 0, 2), sampled(2, 1, 3), given(3, 1, 4)))
    assert [row.ids for row in found] == [(1, 2, 3)]


def test_a_root_of_its_own_is_a_row_of_its_own() -> None:
    """A sub-agent starts from another context; it is trained with the trajectory's advantage."""
    found = rows(
        trajectory(given(0, None, 1), sampled(1, 0, 2), given(2, None, 7), sampled(3, 2, 8))
    )
    assert [row.ids for row in found] == [(1, 2), (7, 8)]
    assert [masked(row, row.advantages) for row in found] == [[0.5], [0.5]]


@pytest.mark.parametrize(
    "left_out",
    [
        trajectory(given(0, None, 1), id="x"),
        trajectory(id="x", status=Status.FAILED),
        trajectory(given(0, None, 1), sampled(1, 0, 2), id="x", reward=None),
        trajectory(given(0, None, 1), sampled(1, 0, 2), id="x", status=Status.FAILED),
        trajectory(given(0, None, 1), sampled(1, 0, 2), id="x", status=Status.ABORTED),
    ],
    ids=["no sampled token", "failed before its first call", "unscored", "failed", "aborted"],
)
def test_what_does_not_count_gives_no_row(left_out: Trajectory) -> None:
    """B040: no placeholder rows; B033: unscored is not trained."""
    good = trajectory(given(0, None, 1), sampled(1, 0, 2), id="good")
    found = samples([group(left_out, good)], {"good": 1.0, "x": 1.0})
    assert [row.trajectory_id for row in found] == ["good"]


def test_a_token_without_logprob_cannot_even_be_recorded_as_trained() -> None:
    """B142: its message differs from that of an empty step and of equal rewards."""
    with pytest.raises(ContractError, match="trained token 0 of 1 has no behaviour logprob"):
        Node(
            id=1,
            parent=0,
            party=Party.POLICY,
            source=Source.SAMPLED,
            ids=(3,),
            trained=(True,),
            logprobs=(NAN,),
            versions=(0,),
        )


def test_a_missing_advantage_names_its_trajectory() -> None:
    good = trajectory(given(0, None, 1), sampled(1, 0, 2), id="3/1")
    with pytest.raises(ContractError, match=r"trajectory 3/1 of group 0 has no finite advantage"):
        samples([group(good)], {})


def test_credit_by_token_goes_to_the_tokens_of_its_node() -> None:
    """By node id, one number per token; a node that two branches share is credited once."""
    t = trajectory(
        given(0, None, 1), sampled(1, 0, 2, 3), sampled(2, 1, 4), given(3, 1, 5), sampled(4, 3, 6)
    )
    credit = {1: (0.25, -0.5), 2: (1.0,), 4: (2.0,)}
    first, second = samples([group(t)], {t.id: credit})
    assert masked(first, first.advantages) == [0.25, -0.5, 1.0]
    assert masked(second, second.advantages) == [2.0]
    for row in (first, second):
        assert all(
            math.isnan(a) for a, on in zip(row.advantages, row.trained, strict=True) if not on
        )


def test_credit_of_untrained_tokens_is_never_read() -> None:
    t = trajectory(given(0, None, 1), sampled(1, 0, 3, 9, untrained_tail=1))
    (row,) = samples([group(t)], {t.id: {1: (0.5, NAN)}})
    assert masked(row, row.advantages) == [0.5]


def test_a_token_that_credit_took_out_of_the_mask_is_context() -> None:
    """Neither trained nor counted, in every branch; a row with nothing left is no row."""
    t = trajectory(
        given(0, None, 1), sampled(1, 0, 2, 3), sampled(2, 1, 4), given(3, 1, 5), sampled(4, 3, 6)
    )
    (row,) = samples([group(t)], {t.id: {1: (0.25, NAN), 2: (1.0,), 4: (NAN,)}})
    assert row.ids == (1, 2, 3, 4) and row.trained == (False, True, False, True)
    assert math.isnan(row.logprobs[2]) and row.versions[2] == -1 and math.isnan(row.advantages[2])


@pytest.mark.parametrize(
    ("credit", "message"),
    [
        ({}, "has 0 advantages for the 2 tokens of its node 1"),
        ({1: (1.0,)}, "has 1 advantages for the 2 tokens of its node 1"),
        ({1: (math.inf, 1.0)}, r"got inf for token 0 of node 1"),
    ],
)
def test_credit_that_does_not_fit_its_node_is_located(
    credit: dict[int, tuple[float, ...]], message: str
) -> None:
    t = trajectory(given(0, None, 1), sampled(1, 0, 2, 3), id="3/1")
    with pytest.raises(ContractError, match=rf"trajectory 3/1 of group 0 .*{message}"):
        samples([group(t)], {t.id: credit})


def test_a_trained_first_token_is_refused() -> None:
    with pytest.raises(ContractError, match="first token of a branch is marked as trained"):
        rows(trajectory(sampled(0, None, 1, 2)))


def test_greedy_rollouts_are_refused() -> None:
    """B030: temperature 0 is an error with a reason, never a division by zero."""
    greedy = Trajectory(
        id="0/0",
        task=TASK,
        sample=0,
        nodes=(given(0, None, 1), sampled(1, 0, 2)),
        status=Status.FINISHED,
        sampling=SamplingParams(max_new_tokens=8, temperature=0.0),
        reward=Reward(value=1.0),
    )
    with pytest.raises(ContractError, match="sampled at temperature 0"):
        rows(greedy)
