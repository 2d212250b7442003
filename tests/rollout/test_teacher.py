"""What a teacher says of sampled tokens, and the advantages that follow."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.render.templates import CHATML, toy_tokenizer
from treadle.advantage import distilled, teacher_metrics
from treadle.errors import HarnessError, SamplerError
from treadle.render import Renderer
from treadle.rollout import teacher as rooms
from treadle.rollout.teacher import Teacher, teacher_logprobs
from treadle.testing import ScriptedSampler
from treadle.types import (
    Group,
    Message,
    Node,
    Party,
    Reward,
    SamplingParams,
    Source,
    Status,
    Task,
    Trajectory,
)

TOKENIZER = toy_tokenizer(CHATML, eos="<|im_end|>")
RENDERER = Renderer(TOKENIZER, [TOKENIZER.eos_token_id])
TASK = Task(id="t", taskset="s", messages=(Message(role="user", content="hi"),))
PROMPT = RENDERER.prompt(TASK.messages)


class Scorer(ScriptedSampler):
    """Scores token t of the ids by -t / 100."""

    def __init__(self, *, wrong: Any = None) -> None:
        super().__init__(script=[])
        self.asked: list[tuple[tuple[int, ...], int, float]] = []
        self.wrong = wrong

    async def score(
        self, ids: Sequence[int], start: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        self.asked.append((tuple(ids), start, temperature))
        if isinstance(self.wrong, float):
            await asyncio.sleep(self.wrong)
        elif self.wrong is not None:
            return self.wrong
        return tuple(-t / 100 for t in range(start, len(ids)))


def node(id: int, parent: int | None, ids: Sequence[int], *, sampled: bool) -> Node:
    n = len(ids)
    return Node(
        id=id,
        parent=parent,
        party=Party.POLICY if sampled else Party.ENVIRONMENT,
        source=Source.SAMPLED if sampled else Source.OBSERVATION,
        ids=tuple(ids),
        trained=(sampled,) * n,
        logprobs=(-0.5,) * n if sampled else (math.nan,) * n,
        versions=(0 if sampled else -1,) * n,
    )


def group(*nodes: Node) -> Group:
    trajectory = Trajectory(
        id="0/0",
        task=TASK,
        sample=0,
        nodes=nodes,
        status=Status.FINISHED,
        sampling=SamplingParams(max_new_tokens=4, temperature=0.7),
        reward=Reward(value=1.0),
    )
    return Group(ordinal=0, task=TASK, trajectories=(trajectory,), version=0)


def chat() -> Group:
    n = len(PROMPT)
    assert n > 3
    return group(
        node(0, None, PROMPT, sampled=False),
        node(1, 0, (7, 8), sampled=True),
        node(2, 1, (9, 9, 9), sampled=False),
        node(3, 2, (7,), sampled=True),
    )


def ask(found: Group, scorer: Scorer, **changes: Any) -> dict[str, dict[int, tuple[float, ...]]]:
    teacher = Teacher(sampler=scorer, name="wise", **changes)
    return asyncio.run(teacher_logprobs([found], teacher, renderer=RENDERER))


def test_each_sampled_token_is_scored_in_its_place_and_no_observation_is() -> None:
    scorer, n = Scorer(), len(PROMPT)
    found = ask(chat(), scorer)
    assert scorer.asked == [((*PROMPT, 7, 8, 9, 9, 9, 7), n, 0.7)], "at its own temperature"
    assert found == {
        "0/0": {1: (-n / 100, -(n + 1) / 100), 3: (-(n + 5) / 100,)},
    }


def test_a_system_message_of_the_teacher_moves_the_sampled_ids_and_changes_none() -> None:
    scorer, n = Scorer(), len(PROMPT)
    found = ask(chat(), scorer, system="You add well.")
    ((ids, start, _),) = scorer.asked
    told = RENDERER.prompt([Message(role="system", content="You add well."), *TASK.messages])
    assert ids == (*told, 7, 8, 9, 9, 9, 7) and start == len(told) > n
    assert found["0/0"][3] == (-(len(told) + 5) / 100,)


def test_a_prompt_that_is_not_the_tasks_has_no_place_for_the_teachers_message() -> None:
    other = group(node(0, None, (1, 2, 3), sampled=False), node(1, 0, (7,), sampled=True))
    assert ask(other, Scorer())["0/0"][1] == (-0.03,)
    with pytest.raises(HarnessError, match="does not begin with the messages of its task"):
        ask(other, Scorer(), system="You add well.")


def test_tasks_of_two_sets_with_one_id_are_each_told_in_their_own_words() -> None:
    """Two sets of one file that differ in their system message, rows with ids of their own."""
    brief = (Message(role="system", content="Be brief."), *TASK.messages)
    other = replace(TASK, taskset="s#2", messages=brief)
    prompt = RENDERER.prompt(brief)
    second = replace(
        group(node(0, None, prompt, sampled=False), node(1, 0, (7,), sampled=True)),
        task=other,
        ordinal=1,
    )
    trajectory = replace(second.trajectories[0], task=other, id="1/0")
    second = replace(second, trajectories=(trajectory,))
    scorer = Scorer()
    teacher = Teacher(sampler=scorer, name="wise", system="You add well.")
    found = asyncio.run(teacher_logprobs([chat(), second], teacher, renderer=RENDERER))
    assert set(found) == {"0/0", "1/0"}
    told = RENDERER.prompt([Message(role="system", content="You add well."), *TASK.messages])
    assert [ids[: len(told)] for ids, _, _ in scorer.asked] == [tuple(told)] * 2


def test_a_node_that_two_branches_share_is_scored_once() -> None:
    found = group(
        node(0, None, PROMPT, sampled=False),
        node(1, 0, (7, 8), sampled=True),
        node(2, 1, (9,), sampled=True),
        node(3, 1, (10,), sampled=True),
    )
    scorer = Scorer()
    n = len(PROMPT)
    got = ask(found, scorer)["0/0"]
    assert sorted(start for _, start, _ in scorer.asked) == [n, n + 2]
    assert got == {1: (-n / 100, -(n + 1) / 100), 2: (-(n + 2) / 100,), 3: (-(n + 2) / 100,)}


@pytest.mark.parametrize("wrong", [(), (-1.0,), (math.nan,) * 6])
def test_a_teacher_that_answers_with_too_little_or_with_nan_is_named(wrong: Any) -> None:
    with pytest.raises(SamplerError, match=r"teacher wise: scores of trajectory 0/0: expected 6"):
        ask(chat(), Scorer(wrong=wrong))


def test_a_teacher_that_does_not_answer_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "SCORE_LIMIT_S", 0.05)
    with pytest.raises(SamplerError, match=r"teacher wise.*no answer for 0\.05 s"):
        ask(chat(), Scorer(wrong=30.0))


# --------------------------------------------------------------------------- advantages


def test_the_advantage_of_a_token_by_hand() -> None:
    """coef 2, log mu -.5: log pi_T -.1, -.9, -.50001 give +.8, -.8 and, within noise, 0."""
    (trajectory,) = chat().trajectories
    said = {1: (-0.1, -0.9), 3: (-0.50001,)}
    got = distilled(trajectory, 0.0, said, coef=2.0, noise_nats=1e-4)
    assert got[1] == pytest.approx((0.8, -0.8)) and got[3] == (0.0,)
    assert all(math.isnan(x) for x in got[0] + got[2])


def test_the_reward_stays_where_the_teacher_adds() -> None:
    (trajectory,) = chat().trajectories
    said = {1: (-0.1, -0.9), 3: (-0.5,)}
    got = distilled(trajectory, 0.25, said, coef=1.0)
    assert got[1] == pytest.approx((0.65, -0.15)) and got[3] == (0.25,)


def test_the_metrics_are_means_over_trained_tokens() -> None:
    (trajectory,) = chat().trajectories
    said = {"0/0": {1: (-0.1, -0.9), 3: (-0.8,)}}
    got = teacher_metrics([trajectory], said)
    assert got["teacher/logprob_nats"] == pytest.approx(-0.6)
    assert got["teacher/kl_nats"] == pytest.approx(0.1)
    assert teacher_metrics([], {}) == {}
