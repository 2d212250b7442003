"""Trajectories and groups: what becomes of every way to end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.render.templates import THINKING, TOOLS, toy_tokenizer
from treadle.config import RolloutConfig
from treadle.errors import ContractError, DataError, HarnessError, SamplerError, TaskError
from treadle.harness import Chat, Harness, Limits, harness_named, single_turn
from treadle.render import Renderer
from treadle.rollout import alarms, derive, group_metrics, run, run_group
from treadle.testing import Hang, Reply, ScriptedSampler
from treadle.tools import Tools, tool
from treadle.types import (
    Completion,
    Group,
    Message,
    Reward,
    Source,
    Status,
    StopReason,
    Task,
    Trajectory,
)

TASK = Task(id="t", taskset="set", messages=(Message(role="user", content="2+3?"),))
TOKENIZER = toy_tokenizer(TOOLS)
RENDERER = Renderer(TOKENIZER, [TOKENIZER.eos_token_id])


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def scripted(script: Sequence[Reply] | Callable[[str, int], Reply]) -> ScriptedSampler:
    return ScriptedSampler(script=script, encode=encode, stop_ids=RENDERER.stop_ids, version=4)


async def exact(trajectory: Trajectory) -> Reward:
    score = float(trajectory.answer.strip() == "5")
    return Reward(value=score, parts={"score": score})


def group_of(
    source: ScriptedSampler,
    size: int = 1,
    *,
    harness: Harness = single_turn,
    grade: Callable[[Trajectory], Awaitable[Any]] = exact,
    renderer: Renderer = RENDERER,
    max_context: int = 4096,
    seed: int = 7,
    ordinal: int = 12,
    task: Task = TASK,
    **config: Any,
) -> Group:
    return asyncio.run(
        run_group(
            task,
            ordinal,
            size,
            sampler=source,
            renderer=renderer,
            harness=harness,
            tools=Tools(),
            config=RolloutConfig(**config),
            max_context=max_context,
            seed=seed,
            grade=grade,
        )
    )


def only(group: Group) -> Trajectory:
    (trajectory,) = group.trajectories
    return trajectory


def is_released(source: ScriptedSampler) -> bool:
    return not source.open_sessions and sorted(source.released) == sorted(source.groups)


# ----------------------------------------------------------------------- ways to end


def test_a_finished_trajectory_is_graded_and_keeps_what_shaped_it() -> None:
    source = scripted(["5"])
    t = only(group_of(source, max_new_tokens=9, temperature=0.8))
    assert (t.id, t.status, t.reward.value, t.error) == ("12/0", Status.FINISHED, 1.0, None)
    assert (t.sampling.max_new_tokens, t.sampling.temperature) == (9, 0.8)
    assert t.sampling.seed == source.calls[0][2].seed == derive(7, 12, 0, 0)
    assert t.answer == "5" and t.num_trained_tokens == 2
    assert t.info == {
        "turns": 1,
        "forks": 0,
        "unread_tool_marks": 0,
        "leaked_sessions": 0,
        "retries": 0,
    }
    assert is_released(source)


def test_a_reply_cut_by_its_length_is_truncated_and_graded_as_it_stands() -> None:
    """B020"""
    t = only(group_of(scripted(["5 is the answer"]), max_new_tokens=1))
    assert (t.status, t.reward.value, t.error) == (Status.TRUNCATED, 1.0, None)


def test_a_declared_stop_id_that_is_not_the_tokenizers_finishes() -> None:
    """B019"""
    other = TOKENIZER.convert_tokens_to_ids("<|endoftext|>")
    renderer = Renderer(TOKENIZER, [TOKENIZER.eos_token_id, other])
    source = scripted([(*encode("5"), other)])
    source.stop_ids = renderer.stop_ids
    t = only(group_of(source, renderer=renderer))
    assert (t.status, t.answer, t.num_trained_tokens) == (Status.FINISHED, "5", 2)


def test_a_full_context_after_the_answer_takes_nothing_away() -> None:
    """B020: done episodes keep their reward."""
    prompt = RENDERER.prompt(TASK.messages)
    t = only(group_of(scripted(["5"]), max_context=len(prompt) + 2))
    assert (t.status, t.reward.value) == (Status.FINISHED, 1.0)


def test_a_prompt_longer_than_the_context_has_failed_and_is_not_judged() -> None:
    """No token was sampled: that is no answer, so it is unscored and not 0."""
    group = group_of(scripted(["5"]), max_context=10)
    t = only(group)
    assert (t.status, t.nodes, group.scored) == (Status.FAILED, (), ())
    assert t.reward.value is None
    assert t.error is not None and t.error.kind == "LimitExceeded"
    tokens = len(RENDERER.prompt(TASK.messages))
    assert f"prompt of {tokens} tokens, max_context 10" in t.error.message
    assert "max_context" in t.error.hint
    assert t.info["limit"] in t.error.message


def test_a_turn_limit_is_a_truncation() -> None:
    async def talks_on(task: Task, chat: Chat, tools: object, limits: Limits) -> None:
        while True:
            await chat.turn(task.messages)

    t = only(group_of(scripted(["5"] * 9), harness=talks_on, max_turns=2))
    assert (t.status, t.reward.value, t.info["turns"]) == (Status.TRUNCATED, 1.0, 2)
    assert t.info["limit"] == "turn limit: 2 turns used"


def test_a_limit_that_the_harness_swallows_still_decides() -> None:
    async def deaf(task: Task, chat: Chat, tools: object, limits: Limits) -> None:
        try:
            for _ in range(3):
                await chat.turn(task.messages)
        except Exception:
            return

    assert only(group_of(scripted(["5"] * 9), harness=deaf, max_turns=2)).status == "truncated"


def test_a_turn_that_the_engine_cancelled_is_aborted_and_not_graded() -> None:
    cut = Completion(
        ids=encode("5"), logprobs=(-1.0,), versions=(4,), stop_reason=StopReason.ABORTED
    )
    group = group_of(scripted([cut]))
    t = only(group)
    assert (t.status, t.reward.value, group.scored) == (Status.ABORTED, None, ())
    assert t.error is not None and t.error.kind == "LimitExceeded"


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (RuntimeError("boom"), "HarnessError"),
        (TimeoutError("boom"), "HarnessError"),
        (TaskError("boom"), "TaskError"),
        (DataError("boom"), "DataError"),
        (SamplerError("boom"), "SamplerError"),
    ],
)
def test_an_error_before_the_first_turn_is_a_failed_trajectory_without_rows(
    raised: Exception, kind: str
) -> None:
    """B040: counted, ungraded, no placeholder row, no part in the group's statistics."""

    async def fails(task: Task, chat: Chat, tools: object, limits: Limits) -> None:
        raise raised

    source = scripted(["5"])
    group = group_of(source, harness=fails)
    t = only(group)
    assert (t.status, t.nodes, t.num_trained_tokens) == (Status.FAILED, (), 0)
    assert (t.reward.value, group.scored, group.version) == (None, (), 4)
    assert t.error is not None and t.error.kind == kind and "boom" in t.error.message
    assert "before its first turn" in t.error.where or "opening" in t.error.where
    assert group_metrics([group])["rollout/failed_frac"] == 1.0
    assert is_released(source)


def test_a_harness_that_never_asks_the_policy_has_failed() -> None:
    async def idle(task: Task, chat: Chat, tools: object, limits: Limits) -> None:
        return

    t = only(group_of(scripted([]), harness=idle))
    assert t.status is Status.FAILED and t.error is not None
    assert "without asking the policy" in t.error.message


def test_a_broken_contract_stops_the_run_and_its_siblings() -> None:
    entered, stopped = [], []

    async def breaks(task: Task, chat: Chat, tools: object, limits: Limits) -> None:
        await chat.turn(task.messages)
        entered.append(chat)
        if len(entered) == 3:
            raise ContractError("ids were changed")
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(chat)

    source = scripted(["5"])
    with pytest.raises(ContractError, match="ids were changed"):
        group_of(source, 3, harness=breaks)
    assert len(stopped) == 2 and is_released(source)


# ----------------------------------------------------------------------- time


def test_one_of_eight_that_never_returns_is_named_with_its_last_state() -> None:
    """B090: the group completes; the lost one says what it was waiting for."""
    source = scripted(lambda session, turn: Hang() if session == "12/3" else "5")
    group = group_of(source, 8, time_limit_s=0.3)
    statuses = [t.status for t in group.trajectories]
    assert statuses.count(Status.FINISHED) == 7 and statuses[3] is Status.ABORTED
    error = group.trajectories[3].error
    assert error is not None
    assert "time limit of 0.3 s" in error.message
    assert "waiting for the sampler in turn 1" in error.message
    assert len(group.scored) == 7 and is_released(source)


def test_a_harness_that_swallows_its_cancellation_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B090"""
    monkeypatch.setattr(run, "GRACE_S", 0.05)
    free = []

    async def stubborn(task: Task, chat: Chat, tools: object, limits: Limits) -> None:
        await chat.turn(task.messages)
        while not free:
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def main() -> Trajectory:
        try:
            return await run.run_trajectory(
                TASK,
                0,
                0,
                sampler=source,
                renderer=RENDERER,
                harness=stubborn,
                tools=Tools(),
                config=RolloutConfig(time_limit_s=0.1),
                max_context=999,
                seed=0,
                grade=exact,
            )
        finally:
            free.append(True)

    source = scripted(["5"])
    t = asyncio.run(main())
    assert t.status is Status.ABORTED and t.num_trained_tokens == 2 and t.reward.value is None
    assert t.error is not None and "after turn 1, in the harness" in t.error.message


def test_cancelling_a_group_releases_every_session() -> None:
    source = scripted([Hang()])

    async def main() -> None:
        group = asyncio.ensure_future(
            run_group(
                TASK,
                0,
                4,
                sampler=source,
                renderer=RENDERER,
                harness=single_turn,
                tools=Tools(),
                config=RolloutConfig(),
                max_context=999,
                seed=0,
                grade=exact,
            )
        )
        while len(source.calls) < 4:
            await asyncio.sleep(0)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group

    asyncio.run(main())
    assert len(source.groups) == 4 and is_released(source)


def test_a_session_that_cannot_be_released_is_counted_and_spoils_nothing() -> None:
    class Clings(ScriptedSampler):
        async def release(self, session: str) -> None:
            raise SamplerError("no such session")

    source = Clings(script=["5"], encode=encode, stop_ids=RENDERER.stop_ids)
    group = group_of(source, 2)
    assert [t.reward.value for t in group.trajectories] == [1.0, 1.0]
    assert group_metrics([group])["rollout/leaked_sessions_sum"] == 2.0


# ----------------------------------------------------------------------- retries


def test_failures_of_the_sampler_are_retried_a_bounded_number_of_times() -> None:
    """B092: an example that always fails is given up after k tries, and counted."""
    source = scripted([SamplerError("engine lost")])
    group = group_of(source)
    t = only(group)
    assert t.status is Status.FAILED and t.info["retries"] == 2
    assert [s for s, _, _ in source.calls] == ["12/0", "12/0#1", "12/0#2"]
    assert group_metrics([group])["rollout/retries_sum"] == 2.0
    assert is_released(source)


def test_a_retry_that_succeeds_draws_the_same_numbers() -> None:
    source = scripted(lambda session, turn: "5" if "#" in session else SamplerError("lost"))
    t = only(group_of(source))
    assert (t.status, t.info["retries"], t.reward.value) == (Status.FINISHED, 1, 1.0)
    assert len({params.seed for _, _, params in source.calls}) == 1


def test_a_reply_without_a_logprob_is_rejected_with_the_reason() -> None:
    """Requirement 3"""
    bad = Completion(ids=(5, 6), logprobs=(-1.0,), versions=(4, 4), stop_reason=StopReason.EOS)
    t = only(group_of(scripted([bad])))
    assert t.status is Status.FAILED and t.num_trained_tokens == 0 and t.error is not None
    assert "2 ids but 1 logprobs" in t.error.message


def test_errors_of_the_harness_are_not_retried() -> None:
    """B092"""
    tries = []

    async def fails(task: Task, chat: Chat, tools: object, limits: Limits) -> None:
        tries.append(1)
        raise HarnessError("boom")

    assert only(group_of(scripted([]), harness=fails)).info["retries"] == 0
    assert len(tries) == 1


# ----------------------------------------------------------------------- grading


@pytest.mark.parametrize("answer", [None, 1.0, "yes", Reward(value=math.nan)])
def test_what_is_no_reward_leaves_the_trajectory_unscored(answer: object) -> None:
    """B033: unscored is not 0."""

    async def grade(trajectory: Trajectory) -> Any:
        return answer

    group = group_of(scripted(["5"]), grade=grade)
    t = only(group)
    assert (t.status, t.reward.value, group.scored) == (Status.FINISHED, None, ())
    assert t.reward.error is not None and t.reward.error.kind == "RewardError"
    assert group_metrics([group])["reward/unscored_frac"] == 1.0


def test_a_grader_that_raises_is_data_but_a_broken_contract_is_not() -> None:
    async def grade(trajectory: Trajectory) -> Reward:
        raise error

    error: Exception = ValueError("junk")
    reward = only(group_of(scripted(["5"]), grade=grade)).reward
    assert reward.value is None and reward.error is not None and "junk" in reward.error.message
    error = ContractError("mixed up")
    with pytest.raises(ContractError, match="mixed up"):
        group_of(scripted(["5"]), grade=grade)


def test_unscored_trajectories_take_no_part_in_the_group() -> None:
    """B033: rewards [1, None, 0, 1]."""

    async def grade(trajectory: Trajectory) -> Reward:
        if trajectory.sample == 1:
            raise ConnectionError("judge is down")
        return await exact(trajectory)

    source = scripted(lambda session, turn: "4" if session == "12/2" else "5")
    group = group_of(source, 4, grade=grade)
    assert [t.reward.value for t in group.trajectories] == [1.0, None, 0.0, 1.0]
    assert [t.sample for t in group.scored] == [0, 2, 3]
    assert group_metrics([group])["reward/mean"] == pytest.approx(2 / 3)


# ----------------------------------------------------------------------- groups


def test_a_group_shares_its_key_and_draws_different_numbers() -> None:
    source = scripted(["5"])
    group = group_of(source, 8)
    assert set(source.groups.values()) == {"12"} and len(source.groups) == 8
    assert len({p.seed for _, _, p in source.calls}) == 8
    assert len({prompt for _, prompt, _ in source.calls}) == 1
    assert [t.id for t in group.trajectories] == [f"12/{i}" for i in range(8)]


def test_a_scope_keeps_the_sessions_of_two_callers_apart() -> None:
    source = scripted(["5"])

    async def main() -> Trajectory:
        return await run.run_trajectory(
            TASK,
            12,
            0,
            sampler=source,
            renderer=RENDERER,
            harness=single_turn,
            tools=Tools(),
            config=RolloutConfig(),
            max_context=999,
            seed=7,
            grade=exact,
            scope="eval-1/",
        )

    t = asyncio.run(main())
    assert source.groups == {"eval-1/12/0": "eval-1/12"} and is_released(source)
    assert (t.id, t.sampling.seed) == ("12/0", derive(7, 12, 0, 0))


def test_a_seed_is_a_pure_function_of_its_place() -> None:
    """Contract 11; the values are fixed, so that a stored run can be drawn again."""
    places = [(7, 12, 0, 0), (7, 12, 0, 1), (7, 12, 1, 0), (7, 13, 0, 0), (8, 12, 0, 0), (71, 2, 0)]
    seeds = [derive(*p) for p in places]
    assert len(set(seeds)) == len(seeds) and all(0 <= s < 2**63 for s in seeds)
    assert derive(7, 12, 0, 0) == derive(7, 12, 0, 0)
    assert derive(7, 12, 0, 0) == 4035348789470072520


def test_the_version_of_a_group_is_its_oldest_sampled_token() -> None:
    old = Completion(ids=(5, 6), logprobs=(-1.0, -1.0), versions=(2, 3), stop_reason=StopReason.EOS)
    source = scripted(lambda session, turn: old if session == "12/1" else "5")
    assert group_of(source, 3).version == 2


def test_forked_conversations_keep_every_turn_and_are_counted() -> None:
    """B003"""
    tokenizer = toy_tokenizer(THINKING)
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])

    async def twice(task: Task, chat: Chat, tools: object, limits: Limits) -> None:
        await chat.turn(task.messages)
        await chat.turn([Message(role="user", content="sure?")])

    source = scripted(["<think>\nhm\n</think>\n\n4", "<think>\nno\n</think>\n\n5"])
    group = group_of(source, harness=twice, renderer=renderer)
    t = only(group)
    assert (t.status, t.reward.value, t.info["forks"]) == (Status.FINISHED, 1.0, 1)
    rows = [sum((n.ids for n in b), ()) for b in t.branches()]
    assert len(rows) == 2
    assert t.num_trained_tokens == sum(len(n.ids) for n in t.nodes if n.source is Source.SAMPLED)
    assert group_metrics([group])["rollout/forks_sum"] == 1.0


def test_a_model_that_speaks_another_call_syntax_raises_the_alarm_on_the_first_batch() -> None:
    """B014: right in text, never a call executed."""

    def add(a: int) -> int:
        """Add."""
        raise AssertionError("never called")

    source = scripted(['<function_call>{"add"}</function_call>', "5"])

    async def main() -> Group:
        return await run_group(
            TASK,
            0,
            4,
            sampler=source,
            renderer=RENDERER,
            harness=harness_named("tool_loop"),
            tools=Tools([tool(add)]),
            config=RolloutConfig(harness="tool_loop"),
            max_context=4096,
            seed=0,
            grade=exact,
        )

    group = asyncio.run(main())
    (alarm,) = alarms([group])
    assert "0 tool calls" in alarm and "4 marks" in alarm
    assert group_metrics([group])["tools/unread_frac"] == 1.0
    assert replace(group, trajectories=()).trajectories == () and alarms([]) == []
