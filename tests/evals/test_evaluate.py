"""Evaluating: which questions, what is stored when, and what an interruption costs."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from tests.render.templates import TOOLS, toy_tokenizer
from treadle.config import EvalConfig, RolloutConfig, RunConfig
from treadle.errors import ConfigError, ContractError, SamplerError
from treadle.evals.evaluate import data_hash, evaluate, questions
from treadle.harness import single_turn
from treadle.render import Renderer
from treadle.rollout import derive
from treadle.store import Store
from treadle.testing import ScriptedSampler
from treadle.tools import Tools
from treadle.types import Message, Provenance, Reward, Task

TOKENIZER = toy_tokenizer(TOOLS)
RENDERER = Renderer(TOKENIZER, [TOKENIZER.eos_token_id])
ROLLOUT = RolloutConfig(max_new_tokens=8)


@dataclass
class Sums:
    """A task set whose texts come again after `distinct`."""

    length: int | None = 40
    distinct: int = 40
    name: str = "sums"
    provenance: Provenance = field(default=Provenance(source="here", license="CC0-1.0"))

    def size(self, split: str) -> int | None:
        return self.length

    def task(self, index: int, split: str = "train") -> Task:
        text = f"1 + {index % self.distinct} ="
        message = Message(role="user", content=text)
        return Task(id=f"{split}-{index}", taskset=self.name, messages=(message,), split=split)

    def grade(self, task: Task, answer: str) -> Mapping[str, float]:
        return {"score": float(answer == "yes")}

    def gold(self, task: Task) -> str | None:
        return None


def reply(session, turn):
    """A function of the session alone, as a seeded engine's is of the seed."""
    ordinal, sample = session.split("/")[-2:]
    return "yes" if random.Random(f"{ordinal}/{sample}").random() < 0.5 else "no"


async def grade(trajectory):
    score = float(trajectory.answer == "yes")
    return Reward(value=score, parts={"score": score})


def ask(store, tasks, *, script=reply, samples=4, grade=grade, concurrency=8, progress=None):
    def encode(text):
        return tuple(TOKENIZER.encode(text, add_special_tokens=False))

    sampler = ScriptedSampler(script=script, encode=encode, stop_ids=RENDERER.stop_ids)
    eval_id = asyncio.run(
        evaluate(
            Sums(),
            tasks,
            store=store,
            step=0,
            version=0,
            config=EvalConfig(questions=len(tasks), samples=samples),
            rollout=ROLLOUT,
            sampler=sampler,
            renderer=RENDERER,
            harness=single_turn,
            tools=Tools(),
            grade=grade,
            max_context=256,
            seed=7,
            concurrency=concurrency,
            progress=progress,
        )
    )
    return eval_id, sampler


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "run", RunConfig(), provenance={}) as store:
        yield store


TASKS = questions(Sums(), EvalConfig(questions=32))


def results(store):
    (row,) = store.evals()
    return {(r.task_id, r.sample): r.score for r in row.results}


# --------------------------------------------------------------------------- which questions


def test_questions_are_the_first_distinct_ones_by_text():
    found = questions(Sums(length=100, distinct=7), EvalConfig(questions=5))
    assert [t.id for t in found] == [f"val-{i}" for i in range(5)]
    assert len(questions(Sums(length=100, distinct=7), EvalConfig(questions=50))) == 7
    assert len(questions(Sums(length=3), EvalConfig(questions=50))) == 3
    endless = Sums(length=None, distinct=7)
    assert len(questions(endless, EvalConfig(questions=6))) == 6
    assert len(questions(endless, EvalConfig(questions=50))) == 7


def test_texts_that_come_again_are_passed_over_to_reach_the_number_asked_for():
    @dataclass
    class Twice(Sums):
        def task(self, index, split="train"):
            return replace(super().task(index // 2, split), id=f"{split}-{index}")

    found = questions(Twice(), EvalConfig(questions=6))
    assert [t.id for t in found] == ["val-0", "val-2", "val-4", "val-6", "val-8", "val-10"]


def test_an_empty_split_is_an_error_with_the_next_step():
    with pytest.raises(ConfigError, match="no tasks in its split `val`") as caught:
        questions(Sums(length=0), EvalConfig(questions=5))
    assert "eval.split" in caught.value.hint


def test_the_data_hash_is_of_the_texts_in_order():
    assert data_hash(TASKS) == data_hash([replace(t, id="other") for t in TASKS])
    assert data_hash(TASKS) != data_hash(TASKS[::-1])
    assert data_hash(TASKS) != data_hash(TASKS[:-1])


# --------------------------------------------------------------------------- what is stored


@pytest.mark.parametrize("attempt", range(5))
def test_an_evaluation_of_128_rollouts_at_concurrency_8_has_128_answers(store, attempt):
    """B121, with jitter."""
    rng = random.Random(attempt)
    told = []

    async def slowly(trajectory):
        for _ in range(rng.randrange(6)):
            await asyncio.sleep(0)
        return await grade(trajectory)

    ask(store, TASKS, grade=slowly, progress=lambda done, total: told.append((done, total)))
    (row,) = store.evals(finished=True)
    assert len(row.results) == 128
    assert (row.n, row.k, row.error_share) == (32, 4, 0.0)
    assert told[-1] == (128, 128)


def test_after_a_kill_only_the_missing_answers_are_made_and_the_totals_are_the_same(
    store, tmp_path
):
    """B148: killed at half, then resumed, then asked for more samples."""

    class Killed(BaseException):
        """Like a signal: nothing handles it."""

    def stop(done, total):
        if done == 64:
            raise Killed

    with pytest.raises(Killed):
        ask(store, TASKS, progress=stop)
    (row,) = store.evals()
    assert not row.finished
    kept = len(row.results)
    assert 64 <= kept < 80
    _, second = ask(store, TASKS)
    assert len(second.calls) == 128 - kept
    with Store.create(tmp_path / "quiet", RunConfig(), provenance={}) as quiet:
        ask(quiet, TASKS)
        assert results(store) == results(quiet)
        _, third = ask(store, TASKS, samples=6)
        ask(quiet, TASKS, samples=6)
        assert len(third.calls) == 64
        assert results(store) == results(quiet)
    (row,) = store.evals(finished=True)
    assert (row.n, row.k) == (32, 6)


def test_an_answer_that_failed_is_unscored_and_asked_again_by_the_next_attempt(store):
    def broken(session, turn):
        return SamplerError("the engine is gone") if "/3/" in session else reply(session, turn)

    ask(store, TASKS[:8], script=broken)
    (row,) = store.evals()
    failed = [r for r in row.results if r.score is None]
    assert {r.task_id for r in failed} == {"val-3"}
    assert all(r.error is not None and r.error.kind == "SamplerError" for r in failed)
    _, second = ask(store, TASKS[:8])
    assert len(second.calls) == len(failed) == 4
    assert store.evals()[0].error_share == 0.0


def test_the_numbers_are_drawn_apart_from_training_and_alike_before_and_after(store):
    _, sampler = ask(store, TASKS[:2], samples=1)
    seeds = [params.seed for _, _, params in sampler.calls]
    assert seeds != [derive(7, ordinal, 0, 0) for ordinal in range(2)]
    assert all(session.startswith("eval-") for session, _, _ in sampler.calls)
    assert sampler.open_sessions == set()


def test_a_broken_contract_comes_out_as_itself(store):
    async def broken(trajectory):
        raise ContractError("the grader lost its mind")

    with pytest.raises(ContractError, match="lost its mind"):
        ask(store, TASKS[:4], grade=broken)
    assert not store.evals()[0].finished


def test_settings_stand_beside_the_answers(store):
    """B155."""
    ask(store, TASKS[:4])
    (row,) = store.evals()
    assert row.data_hash == data_hash(TASKS[:4])
    assert row.settings == {
        "harness": "single_turn",
        "max_new_tokens": 8,
        "max_turns": 8,
        "seed": 7,
        "template": RENDERER.template.hash,
        "top_p": 1.0,
    }
    assert store.eval_trajectory(row.id, "val-0", 0).id == "eval-0/0"
