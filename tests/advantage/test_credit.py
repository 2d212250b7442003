"""Credit among agents, turns, peers, spans and parties: reference values, by hand, hazards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tests.advantage.conftest import said, seen
from treadle.advantage import advantages, baseline_metrics, teaches
from treadle.advantage.credit_agents import agent_part, depth_weights, recursive, root_only
from treadle.advantage.credit_peers import Verdict, peer_credit, share_out, without_hacks
from treadle.advantage.credit_spans import TokenSpan, span_credit
from treadle.advantage.credit_turns import turn_credit
from treadle.errors import ConfigError, ContractError
from treadle.store import encode
from treadle.types import Group, Node, Party, Status, Trajectory

Groups = Callable[..., Group]
Trajectories = Callable[..., Trajectory]

nan = math.nan


def same(a: object, b: object) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-9)


# --------------------------------------------------------------------------- agents


def with_children(
    make: Trajectories, sample: int, own: float, *children: float | None
) -> Trajectory:
    """A root turn, one turn of each sub-agent in a context of its own, and a second root turn."""
    nodes: list[Node] = [seen(0, None, 1), said(1, 0, 2)]
    parts: dict[str, float] = {"score": own}
    for i, success in enumerate(children):
        nodes += [
            seen(len(nodes), None, 9, agent=(i,)),
            said(len(nodes) + 1, len(nodes), 1, agent=(i,)),
        ]
        if success is not None:
            parts[agent_part((i,))] = success
    nodes += [seen(len(nodes), 1, 8), said(len(nodes) + 1, len(nodes), 1)]
    return make(0, sample, own, nodes=nodes, parts=parts)


def test_recursive_credit_gives_the_reference_values(
    group: Groups, trajectory: Trajectories
) -> None:
    """RAO: root 0.8 + 0.4 * mean(1, 0.5) = 1.1; the other roots have 0.4, 0.7, 1.0."""
    first = with_children(trajectory, 0, 0.8, 1.0, 0.5)
    others = [trajectory(0, i + 1, r) for i, r in enumerate([0.4, 0.7, 1.0])]
    out = recursive([group(0, [first, *others])], weigh_depth=False)
    same(out["0/0"][1], [0.4, 0.4])
    same(out["0/0"][3], [0.3])
    same(out["0/0"][5], [-0.2])
    same(out["0/0"][7], [0.4])
    same(out["0/0"][0], [nan])
    same(out["0/1"][1], [0.4 - (1.1 + 0.7 + 1.0) / 3] * 2)


def test_depth_weights_give_the_reference_values(group: Groups, trajectory: Trajectories) -> None:
    assert depth_weights({0: 4, 1: 8}) == {0: 1.5, 1: 0.75}
    assert depth_weights({0: 4}) == {0: 1.0}
    members = [with_children(trajectory, i, 0.25 * i, 1.0, 0.0) for i in range(4)]
    batch = [group(0, members)]
    plain, weighed = recursive(batch, weigh_depth=False), recursive(batch)
    for t in members:
        same(weighed[t.id][1], 1.5 * np.asarray(plain[t.id][1]))
        same(weighed[t.id][3], 0.75 * np.asarray(plain[t.id][3]))


def test_depth_weights_count_agents_not_turns_or_branches(
    group: Groups, trajectory: Trajectories
) -> None:
    """Roots have two turns each, and a compaction is a branch of the same agent."""
    members = [with_children(trajectory, i, 0.25 * i, 1.0, 0.0) for i in range(4)]
    nodes = [*members[0].nodes, seen(8, None, 4, 4), said(9, 8, 1)]
    compacted = [replace(members[0], nodes=tuple(nodes)), *members[1:]]
    before = recursive([group(0, members)])
    after = recursive([group(0, compacted)])
    same(after["0/0"][9], before["0/0"][7])
    for id in ("0/0", "0/1"):
        assert all(after[id][n] == before[id][n] for n in (1, 3, 5, 7))


def test_a_lone_rollout_gets_zero_recursively(group: Groups, trajectory: Trajectories) -> None:
    out = recursive([group(0, [with_children(trajectory, 0, 0.8, 1.0, 0.5)])])
    assert [out["0/0"][n] for n in (1, 3, 5, 7)] == [(0, 0), (0,), (0,), (0,)]


def test_only_immediate_children_are_shared_in(group: Groups, trajectory: Trajectories) -> None:
    nodes = [
        *(seen(0, None, 1), said(1, 0, 1)),
        *(seen(2, None, 2, agent=(0,)), said(3, 2, 1, agent=(0,))),
        *(seen(4, None, 3, agent=(0, 0)), said(5, 4, 1, agent=(0, 0))),
    ]
    deep = trajectory(0, 0, 0.0, nodes=nodes, parts={"agent/0": 0.5, "agent/0.0": 1.0})
    out = recursive([group(0, [deep, 0.0])], weigh_depth=False)
    same([out["0/0"][1], out["0/0"][3], out["0/0"][5]], [[0.2], [0.9], [1.0]])
    same(out["0/1"][1], [-0.2] * 2)


def test_an_agent_that_was_not_judged_is_neither_trained_nor_averaged_over(
    group: Groups, trajectory: Trajectories
) -> None:
    members = [with_children(trajectory, 0, 0.5, 1.0, None), trajectory(0, 1, 0.5)]
    out = recursive([group(0, members)], weigh_depth=False)
    same(out["0/0"][1], [0.9 - 0.5] * 2)
    same(out["0/0"][5], [nan])
    weighed = recursive([group(0, members)])
    same(weighed["0/0"][3], [(1.0 - 0.5) * 1.5 / 1])


def test_a_success_of_an_agent_that_is_not_finite_is_refused(
    group: Groups, trajectory: Trajectories
) -> None:
    with pytest.raises(ContractError, match="0/0 of group 0 has reward `agent/0` nan"):
        recursive([group(0, [with_children(trajectory, 0, 0.5, nan), 0.5])])


def test_root_only_takes_sub_agents_out_of_the_mask_and_leaves_compaction_in(
    group: Groups, trajectory: Trajectories
) -> None:
    first = with_children(trajectory, 0, 1.0, 1.0)
    first = replace(first, nodes=(*first.nodes, seen(6, None, 4), said(7, 6, 1)))
    batch = [group(0, [first, 0.0])]
    out = root_only(batch, advantages(batch, "group_mean"))
    assert out["0/0"][1] == (0.5, 0.5)
    same(out["0/0"][3], [nan])
    assert out["0/0"][5] == out["0/0"][7] == (0.5,)
    assert out["0/1"][1] == (-0.5, -0.5)


def test_the_agent_of_a_node_survives_the_store(trajectory: Trajectories) -> None:
    t = with_children(trajectory, 0, 1.0, 1.0, 0.5)
    back = encode.unpack_trajectory(encode.pack_trajectory(t), t.task, "t")
    assert [n.agent for n in back.nodes] == [n.agent for n in t.nodes]
    assert back.nodes[5].agent == (1,)


# --------------------------------------------------------------------------- turns


def walk(make: Trajectories, sample: int, reward: float, *states: int) -> Trajectory:
    """One turn of two tokens in each state."""
    nodes: list[Node] = []
    for state in states:
        parent = len(nodes) - 1 if nodes else None
        nodes += [seen(len(nodes), parent, 50 + state), said(len(nodes) + 1, len(nodes), 2)]
    return make(0, sample, reward, nodes=nodes)


def test_turns_that_answer_the_same_observation_are_compared(
    group: Groups, trajectory: Trajectories
) -> None:
    """States 1 2 3 to reward 1 and 1 3 to reward 0, gamma 0.5: returns 0.25 0.5 1 and 0 0. State 1
    is met twice (mean 0.125), state 3 twice (mean 0.5), state 2 once."""
    batch = [group(0, [walk(trajectory, 0, 1.0, 1, 2, 3), walk(trajectory, 1, 0.0, 1, 3)])]
    out = turn_credit(batch, advantages(batch, "group_mean"), gamma=0.5)
    same([out["0/0"][n][0] for n in (1, 3, 5)], [0.5 + 0.125, 0.5, 0.5 + 0.5])
    same([out["0/1"][n][1] for n in (1, 3)], [-0.5 - 0.125, -0.5 - 0.5])
    same(out["0/0"][0], [nan])
    twice = turn_credit(batch, advantages(batch, "group_mean"), gamma=0.5, weight=2.0)
    same(twice["0/0"][1], [0.5 + 0.25] * 2)


def test_a_state_met_by_one_turn_alone_adds_exactly_nothing(
    group: Groups, trajectory: Trajectories
) -> None:
    batch = [group(0, [walk(trajectory, 0, 1.0, 1, 2), walk(trajectory, 1, 0.0, 3, 4)])]
    out = turn_credit(batch, advantages(batch, "group_mean"))
    assert [out["0/0"][1], out["0/0"][3]] == [(0.5, 0.5)] * 2


def test_states_are_not_shared_between_groups(group: Groups, trajectory: Trajectories) -> None:
    one = [group(0, [walk(trajectory, 0, 1.0, 1), walk(trajectory, 1, 0.0, 2)])]
    two = group(
        1, [replace(walk(trajectory, i, r, 1), id=f"1/{i}") for i, r in [(0, 1.0), (1, 0.0)]]
    )
    plain = advantages([*one, two], "group_mean")
    alone = turn_credit(one, plain)["0/0"]
    assert turn_credit([*one, two], plain)["0/0"] == turn_credit([two, *one], plain)["0/0"] == alone


def test_rewards_of_an_environment_replace_the_outcome(
    group: Groups, trajectory: Trajectories
) -> None:
    """Returns with gamma 1: 3, 2 and 1; the second rollout has its outcome 0 on its one turn."""
    batch = [group(0, [walk(trajectory, 0, 3.0, 1, 2), walk(trajectory, 1, 0.0, 1)])]
    values = {"0/0": 0.0, "0/1": 0.0}
    out = turn_credit(batch, values, rewards={"0/0": [1.0, 2.0]}, gamma=1.0)
    same(out["0/0"][1], [1.5, 1.5])
    same(out["0/1"][1], [-1.5, -1.5])
    with pytest.raises(ContractError, match="0/0 has 2 trained turns, but 1 rewards"):
        turn_credit(batch, values, rewards={"0/0": [1.0]})
    with pytest.raises(ContractError, match="0/0 of group 0 has reward `of a turn` nan"):
        turn_credit(batch, values, rewards={"0/0": [1.0, nan]})


def test_a_turn_that_follows_another_without_an_observation_is_compared_with_nothing(
    group: Groups, trajectory: Trajectories
) -> None:
    def blind(sample: int, reward: float) -> Trajectory:
        return trajectory(0, sample, reward, nodes=[seen(0, None, 1), said(1, 0, 1), said(2, 1, 1)])

    batch = [group(0, [blind(0, 1.0), blind(1, 0.0)])]
    out = turn_credit(batch, {"0/0": 0.0, "0/1": 0.0}, gamma=1.0)
    assert out["0/0"][1] == (0.5,)
    assert out["0/0"][2] == (0.0,)


def test_an_observation_is_the_same_however_its_messages_were_recorded(
    group: Groups, trajectory: Trajectories
) -> None:
    """Two messages: the recorder keeps the tokens of both in the second; another may not."""
    whole = trajectory(0, 0, 1.0, nodes=[seen(0, None), seen(1, 0, 5, 6), said(2, 1, 1)])
    split = trajectory(0, 1, 0.0, nodes=[seen(0, None, 5), seen(1, 0, 6), said(2, 1, 1)])
    other = trajectory(0, 2, 0.0, nodes=[seen(0, None, 6), seen(1, 0, 5), said(2, 1, 1)])
    out = turn_credit([group(0, [whole, split, other])], dict.fromkeys(["0/0", "0/1", "0/2"], 0.0))
    assert [out[f"0/{i}"][2] for i in range(3)] == [(0.5,), (-0.5,), (0.0,)]


# --------------------------------------------------------------------------- peers


def test_peer_credit_gives_the_reference_values(group: Groups) -> None:
    assert share_out([1, 1, -1, -1], [1, 0.25, None, None]) == pytest.approx([1.6, 0.4, -1, -1])
    batch = [group(0, [1, 1, 0, 0])]
    values = {f"0/{i}": v for i, v in enumerate([1.0, 1.0, -1.0, -1.0])}
    out = peer_credit(batch, values, {0: Verdict(quality={"0/0": 1.0, "0/1": 0.25})})
    assert list(out.values()) == pytest.approx([1.6, 0.4, -1, -1])


def test_the_cap_binds_and_the_group_is_centred_again() -> None:
    """Quality 0.25 of both would need 4; 2 leaves 0.5 each, and the mean -0.25 goes."""
    out = share_out([1, 1, -1, -1], [0.25, 0.25, None, None])
    assert out == pytest.approx([0.75, 0.75, -0.75, -0.75])


def test_equal_quality_changes_nothing_and_the_order_of_quality_is_kept() -> None:
    assert share_out([1, 1, -2], [0.6, 0.6, None]) == pytest.approx([1, 1, -2])
    best, worse, failed = share_out([1, 1, -2], [0.9, 0.8, None])
    assert best > 1 > worse > 0 > failed


def test_a_passing_rollout_below_the_mean_is_not_praised_for_being_worse() -> None:
    values = [0.5, -0.1, -0.4]
    assert share_out(values, [1.0, 0.1, None]) == pytest.approx(values)
    assert share_out([0.0, 0.0], [1.0, 0.5]) == [0.0, 0.0]


def test_a_confirmed_hack_counts_as_zero_from_the_start(group: Groups) -> None:
    """Of three passes one cheated: [1, 0, 1, 0] gives +-0.5, then quality shares 1 out."""
    batch = [group(0, [1, 1, 1, 0])]
    verdicts = {0: Verdict(quality={"0/0": 1.0, "0/2": 0.25}, hacks=frozenset({"0/1"}))}
    clean = without_hacks(batch, verdicts)
    assert [t.reward.value for t in clean[0].trajectories] == [1, 0, 1, 0]
    assert clean[0].trajectories[1].reward.parts == {"score": 0.0}
    out = peer_credit(clean, advantages(clean, "group_mean"), verdicts)
    assert list(out.values()) == pytest.approx([0.8, -0.5, 0.2, -0.5])
    assert batch[0].trajectories[1].reward.value == 1


def test_the_quality_of_a_hack_is_ignored(group: Groups) -> None:
    verdicts = {0: Verdict(quality={"0/0": 0.5, "0/1": 1.0}, hacks=frozenset({"0/1"}))}
    batch = [group(0, [1, 1, 0])]
    clean = without_hacks(batch, verdicts)
    out = peer_credit(clean, {"0/0": 1.0, "0/1": 1.0, "0/2": -2.0}, verdicts)
    assert out == pytest.approx({"0/0": 1.0, "0/1": 1.0, "0/2": -2.0})


def test_a_group_without_a_verdict_keeps_its_advantages(group: Groups) -> None:
    batch = [group(0, [1, 1, 0]), group(1, [1, 0])]
    plain = advantages(batch, "group_mean")
    assert without_hacks(batch, {}) == batch
    assert peer_credit(batch, plain, {}) == plain
    one = peer_credit(batch, plain, {1: Verdict(quality={"1/0": 0.5})})
    assert [one[f"0/{i}"] for i in range(3)] == [plain[f"0/{i}"] for i in range(3)]


def test_verdicts_that_make_no_sense_are_refused(group: Groups) -> None:
    for bad in (0.0, 1.1, nan):
        with pytest.raises(ContractError, match=r"expected a number in \(0, 1\]"):
            Verdict(quality={"0/0": bad})
    batch = [group(0, [1, 0])]
    plain = advantages(batch, "group_mean")
    with pytest.raises(ContractError, match="group 0 names 3/0"):
        peer_credit(batch, plain, {0: Verdict(quality={"3/0": 1.0})})
    per_token = root_only(batch, plain)
    with pytest.raises(ContractError, match="per token already"):
        peer_credit(batch, per_token, {0: Verdict(quality={"0/0": 1.0})})


# --------------------------------------------------------------------------- spans


def test_flagged_tokens_are_masked_on_good_runs_and_amplified_on_bad_ones(
    group: Groups, trajectory: Trajectories
) -> None:
    batch = [group(0, [trajectory(0, 0, 1.0, trained=4), trajectory(0, 1, 0.0, trained=4)])]
    spans = {"0/0": [TokenSpan(1, 1, 3)], "0/1": [TokenSpan(1, 1, 3), TokenSpan(1, 2, 4)]}
    out = span_credit(batch, advantages(batch, "group_mean"), spans, amplify=3.0)
    same(out["0/0"][1], [0.5, nan, nan, 0.5])  # type: ignore[index]
    same(out["0/1"][1], [-0.5, -1.5, -1.5, -1.5])  # type: ignore[index]


def test_spans_touch_no_other_trajectory_and_no_observation(
    group: Groups, trajectory: Trajectories
) -> None:
    batch = [group(0, [1.0, 0.0, 0.0])]
    plain = advantages(batch, "group_mean")
    out = span_credit(batch, plain, {"0/1": [TokenSpan(0, 0, 1)]})
    assert out["0/0"] == plain["0/0"] and out["0/2"] == plain["0/2"]
    same(out["0/1"][0], [nan])  # type: ignore[index]
    assert out["0/1"][1] == (-1 / 3, -1 / 3)  # type: ignore[index]
    assert span_credit(batch, plain, {}) == plain


def test_a_flag_at_advantage_zero_changes_nothing(group: Groups) -> None:
    batch = [group(0, [1.0, 1.0])]
    out = span_credit(batch, advantages(batch, "group_mean"), {"0/0": [TokenSpan(1, 0, 2)]})
    assert out["0/0"][1] == (0.0, 0.0)  # type: ignore[index]


@pytest.mark.parametrize(
    "span", [TokenSpan(1, 1, 3), TokenSpan(1, -1, 1), TokenSpan(1, 1, 1), TokenSpan(5, 0, 1)]
)
def test_a_span_outside_of_its_node_is_refused(group: Groups, span: TokenSpan) -> None:
    batch = [group(0, [1.0, 0.0])]
    with pytest.raises(ContractError, match=f"{span.start}..{span.end} lies outside of node"):
        span_credit(batch, advantages(batch, "group_mean"), {"0/0": [span]})
    with pytest.raises(ContractError, match="7/0, which does not count"):
        span_credit(batch, advantages(batch, "group_mean"), {"7/0": []})


# --------------------------------------------------------------------------- parties


def duel(make: Trajectories, sample: int, reward: float, other: float | None) -> Trajectory:
    """The policy, then another agent that is trained too."""
    parts = {"score": reward} if other is None else {"score": reward, "agent": other}
    nodes = [seen(0, None, 1), said(1, 0, 2), said(2, 1, 3, party=Party.AGENT)]
    return make(0, sample, reward, nodes=nodes, parts=parts)


def test_each_party_is_compared_by_its_own_reward(group: Groups, trajectory: Trajectories) -> None:
    """A winner's reward never teaches the loser."""
    batch = [group(0, [duel(trajectory, 0, 1.0, -3.0), duel(trajectory, 1, 0.0, 3.0)])]
    out = advantages(batch, "group_mean")
    same(out["0/0"][0], [nan])  # type: ignore[index]
    assert out["0/0"][1] == (0.5, 0.5) and out["0/0"][2] == (-3.0,) * 3  # type: ignore[index]
    assert out["0/1"][1] == (-0.5, -0.5) and out["0/1"][2] == (3.0,) * 3  # type: ignore[index]


def test_each_party_has_a_running_baseline_of_its_own(
    group: Groups, trajectory: Trajectories
) -> None:
    batch = [group(0, [duel(trajectory, 0, 1.0, -1.0), duel(trajectory, 1, 0.0, 1.0)])]
    first = baseline_metrics(batch, {})
    assert first == {"advantage/policy_baseline": 0.5, "advantage/agent_baseline": 0.0}
    known = {Party.POLICY: 0.25, Party.AGENT: -0.5}
    out = advantages(batch, "reinforce_running", baseline=known)
    assert out["0/0"][1] == (0.75, 0.75) and out["0/0"][2] == (-0.5,) * 3  # type: ignore[index]


def test_lengths_are_a_partys_own(group: Groups, trajectory: Trajectories) -> None:
    """OPO of the policy sees two tokens each, whatever the other agent says."""
    talk = [seen(0, None, 1), said(1, 0, 2), said(2, 1, 30, party=Party.AGENT)]
    long = trajectory(0, 0, 1.0, nodes=talk, parts={"agent": 0.0})
    batch = [group(0, [long, duel(trajectory, 1, 0.0, 1.0)])]
    out = advantages(batch, "opo")
    assert out["0/0"][1] == (0.5, 0.5)  # type: ignore[index]
    assert out["0/0"][2][0] == pytest.approx(-3 / 33)  # type: ignore[index]


def test_a_party_without_a_reward_is_not_trained(group: Groups, trajectory: Trajectories) -> None:
    batch = [group(0, [duel(trajectory, 0, 1.0, None), duel(trajectory, 1, 0.0, 1.0), 0.5])]
    out = advantages(batch, "group_mean")
    same(out["0/0"][2], [nan] * 3)  # type: ignore[index]
    assert out["0/0"][1] == (0.5, 0.5)  # type: ignore[index]
    assert out["0/1"][2] == (0.0,) * 3  # type: ignore[index]
    assert out["0/2"] == 0.0


def test_a_group_teaches_when_any_party_can_learn(group: Groups, trajectory: Trajectories) -> None:
    batch = group(0, [duel(trajectory, 0, 1.0, -1.0), duel(trajectory, 1, 1.0, 1.0)])
    assert teaches(batch, "grpo")
    assert not teaches(group(0, [duel(trajectory, i, 1.0, 2.0) for i in range(2)]), "grpo")


def test_trained_tokens_of_a_frozen_model_are_a_broken_contract(
    group: Groups, trajectory: Trajectories
) -> None:
    nodes = [seen(0, None, 1), said(1, 0, 2), said(2, 1, 3, party=Party.FROZEN)]
    batch = [group(0, [trajectory(0, 0, 1.0, nodes=nodes), 0.0])]
    with pytest.raises(ContractError, match="0/0 has trained tokens of the party `frozen`"):
        advantages(batch, "group_mean")


def test_gdpo_is_not_defined_for_several_parties(group: Groups, trajectory: Trajectories) -> None:
    batch = [group(0, [duel(trajectory, 0, 1.0, -1.0), duel(trajectory, 1, 0.0, 1.0)])]
    with pytest.raises(ConfigError, match="2 parties are trained: agent, policy"):
        advantages(batch, "gdpo", weights={"score": 1.0})


def test_a_failed_rollout_has_no_credit_of_any_kind(
    group: Groups, trajectory: Trajectories
) -> None:
    batch = [group(0, [trajectory(0, 0, 1.0, status=Status.FAILED), 1.0, 0.0])]
    plain = advantages(batch, "group_mean")
    for out in (recursive(batch), root_only(batch, plain), turn_credit(batch, plain)):
        assert set(out) == {"0/1", "0/2"}


# --------------------------------------------------------------------------- together


def test_credit_composes_and_a_token_out_of_the_mask_stays_out(
    group: Groups, trajectory: Trajectories
) -> None:
    """Hack out, estimate, peers, turns, root only, spans: in the order of the docs."""
    members = [with_children(trajectory, 0, 1.0, 1.0), trajectory(0, 1, 1.0), trajectory(0, 2, 1.0)]
    batch = [group(0, [*members, 0.0])]
    verdicts = {0: Verdict(quality={"0/0": 1.0, "0/1": 0.25}, hacks=frozenset({"0/2"}))}
    clean = without_hacks(batch, verdicts)
    out = peer_credit(clean, advantages(clean, "group_mean"), verdicts)
    turns = root_only(clean, turn_credit(clean, out, gamma=1.0))
    spans = {"0/0": [TokenSpan(3, 0, 1), TokenSpan(1, 0, 1)]}
    last = span_credit(clean, turns, spans)
    # All four first turns answer the same prompt, with returns 1, 1, 0 and 0.
    same(last["0/0"][1], [nan, 0.8 + 0.5])  # type: ignore[index]
    same(last["0/0"][3], [nan])  # type: ignore[index]
    same(last["0/0"][5], [0.8])  # type: ignore[index]
    same(last["0/1"][1], [0.2 + 0.5] * 2)  # type: ignore[index]
    same(last["0/2"][1], [-0.5 - 0.5] * 2)  # type: ignore[index]
