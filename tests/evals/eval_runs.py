"""Whole runs made by a seeded fake: a store as a run leaves it, without a model.

The fake learns: its skill (a lenient answer) and its form (a strict one) rise from step to step.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from treadle.advantage import advantages, group_stats
from treadle.batch import samples as to_samples
from treadle.config import EvalConfig, ModelConfig, RolloutConfig, RunConfig, TasksConfig
from treadle.errors import ErrorRecord
from treadle.rollout import group_metrics
from treadle.store import EvalResult, Span, Store
from treadle.types import (
    Group,
    Message,
    Node,
    Party,
    Provenance,
    Reward,
    SamplingParams,
    Source,
    Status,
    StopReason,
    Task,
    Trajectory,
)

PROVENANCE = {
    "model": Provenance(source="hub:toy/model", license="apache-2.0", sha256="ab" * 32),
    "tasks.0": Provenance(source="made here", license="cc-by-4.0"),
}
FAMILIES = ("toy:sums", "toy:gcd")


def config(**changes) -> RunConfig:
    base = RunConfig(
        name="fake",
        steps=3,
        model=ModelConfig(name="no-such-model"),
        tasks=tuple(TasksConfig(source=name) for name in FAMILIES),
        rollout=RolloutConfig(group_size=4, groups_per_step=2, max_new_tokens=24),
        eval=EvalConfig(questions=6, samples=2),
    )
    return replace(base, **changes)


def task(taskset: str, i: int, split: str = "train", text: str | None = None) -> Task:
    a, b = 3 + i, 2 + (7 * i) % 11
    if split != "train":
        a += 1000
    return Task(
        id=f"{split}-{i}",
        taskset=taskset,
        messages=(
            Message(role="system", content="Reply with the answer only."),
            Message(role="user", content=text or f"{taskset.split(':')[-1]} of {a} and {b}?"),
        ),
        data={"answer": str(a + b)},
        split=split,
    )


def node(
    id: int, text: str, version: int | None, rng: random.Random, role: str = "assistant"
) -> Node:
    """A node whose tokens are the text's bytes; sampled when it has a version."""
    ids = tuple(text.encode("utf-8", "replace"))
    sampled = version is not None
    n = len(ids)
    return Node(
        id=id,
        parent=id - 1 if id else None,
        party=Party.POLICY if sampled else Party.ENVIRONMENT,
        source=Source.SAMPLED if sampled else Source.OBSERVATION,
        ids=ids,
        trained=(sampled,) * n,
        logprobs=tuple(-rng.expovariate(1.5) if sampled else math.nan for _ in ids),
        versions=(version if version is not None else -1,) * n,
        message=Message(role=role, content=text),
        stop_reason=StopReason.EOS if sampled else None,
        entropies=tuple(rng.random() for _ in ids) if sampled else (),
    )


def trajectory(
    ordinal: int,
    sample: int,
    of: Task,
    version: int,
    *,
    skill: float = 0.5,
    form: float = 0.5,
    seed: int = 0,
    answer: str | None = None,
    status: Status = Status.FINISHED,
) -> Trajectory:
    rng = random.Random(f"{seed}/{ordinal}/{sample}/{of.taskset}/{of.id}/{version}")
    gold = str(of.data["answer"])
    lenient = rng.random() < skill
    strict = lenient and rng.random() < form
    said = gold if lenient else str(rng.randint(2, 99))
    text = said if strict else f"The answer is {said}"
    text = text if answer is None else answer
    judged = status in (Status.FINISHED, Status.TRUNCATED)
    parts = {"score": float(strict), "lenient": float(lenient)}
    return Trajectory(
        id=f"{ordinal}/{sample}",
        task=of,
        sample=sample,
        nodes=(
            node(0, of.messages[0].content, None, rng, role="system"),
            node(1, of.messages[-1].content, None, rng, role="user"),
            node(2, text, version, rng),
        ),
        status=status,
        sampling=SamplingParams(max_new_tokens=24),
        reward=Reward(value=strict + 0.3 * (lenient - strict), parts=parts)
        if judged
        else Reward(value=None),
        error=None
        if judged
        else ErrorRecord(kind="SamplerError", where="session 1", message="the engine is gone"),
        duration_s=0.2 + rng.random(),
    )


def add_eval(
    store: Store,
    step: int,
    scores: dict[str, Sequence[tuple[float | None, float | None]]],
    *,
    taskset: str = FAMILIES[0],
    finished: bool = True,
    data_hash: str = "aa",
    temperature: float = 1.0,
    split: str = "val",
    texts: dict[str, str] | None = None,
    ungraded: Sequence[str] = (),
) -> int:
    """An evaluation with exactly these (strict, lenient) answers by question id.

    Of `ungraded` questions the first number is what a reward function paid.
    """
    id = store.begin_eval(
        step=step,
        version=step,
        taskset=taskset,
        split=split,
        temperature=temperature,
        data_hash=data_hash,
        settings={"max_new_tokens": 24},
    )
    for i, (task_id, answers) in enumerate(scores.items()):
        question = replace(task(taskset, i, split, (texts or {}).get(task_id)), id=task_id)
        for sample, (score, lenient) in enumerate(answers):
            parts = {} if score is None or lenient is None else {"lenient": lenient}
            error = ErrorRecord(kind="RewardError", where="grader", message="too slow")
            store.add_eval_result(
                id,
                EvalResult(
                    task_id=task_id,
                    sample=sample,
                    score=score,
                    parts={}
                    if task_id in ungraded
                    else parts | ({} if score is None else {"score": score}),
                    error=error if score is None else None,
                    answer=f"answer {score}",
                    num_sampled=3,
                    trajectory=trajectory(i, sample, question, step),
                ),
            )
    if finished:
        store.finish_eval(id)
    return id


def evaluate_all(
    store: Store, step: int, skill: float, form: float, tasksets: Sequence[str] = FAMILIES
) -> None:
    settings = config().eval
    for name in tasksets:
        id = store.begin_eval(
            step=step,
            version=step,
            taskset=name,
            split="val",
            temperature=1.0,
            data_hash=f"hash of {name}",
            settings={"max_new_tokens": 24},
        )
        for i in range(settings.questions):
            question = task(name, i, "val")
            for sample in range(settings.samples):
                done = trajectory(i, sample, question, step, skill=skill, form=form)
                store.add_eval_result(
                    id,
                    EvalResult(
                        task_id=question.id,
                        sample=sample,
                        score=done.reward.parts["score"],
                        parts=done.reward.parts,
                        answer=done.answer,
                        num_sampled=done.num_sampled_tokens,
                        trajectory=replace(done, id=f"eval-{done.id}"),
                    ),
                )
        store.finish_eval(id)


def train_step(store: Store, step: int, groups: Sequence[Group], **commit) -> None:
    """Publish these started groups and commit a step on them, with the metrics of a real one."""
    for group in groups:
        store.publish_group(group)
    samples = to_samples(groups, advantages(groups, "group_mean"))
    rng = random.Random(step)
    trainer = {
        "policy/entropy_nats": 1.2 * math.exp(-step / 40) + 0.05 * rng.random(),
        "policy/kl_k3_nats": 2e-4 * (1 + rng.random()),
        "grad/norm": 0.5 + rng.random(),
        "lag/mean_versions": 0.0,
        "tokens/trained": float(sum(sum(s.trained) for s in samples)),
        "loss/total": rng.random() - 0.5,
        "generate/tokens_per_s": 900 + 200 * rng.random(),
        "groups/trained": float(len(groups)),
    }
    store.commit_step(
        step,
        version=step,
        ordinals=[g.ordinal for g in groups],
        samples=samples,
        metrics={**group_metrics(groups), **group_stats(groups), **trainer},
        **commit,
    )
    at = 1000.0 + 10 * step
    store.add_spans(
        [
            Span(step=step, stage="generate", started_at=at, duration_s=4.0),
            Span(step=step, stage="train", started_at=at + 4, duration_s=3.0),
            Span(step=step, stage="commit", started_at=at + 7, duration_s=0.5),
        ]
    )


def train(store: Store, steps: int, *, first: int = 1, total: int = 0, drop_every: int = 5) -> None:
    """Steps on fresh prompts, skill and form rising; some groups are dropped on the way."""
    settings = store.config()
    for step in range(first, first + steps):
        share = step / max(total, steps)
        groups: list[Group] = []
        while len(groups) < settings.rollout.groups_per_step:
            ordinal = store.frontier().next_ordinal
            of = task(FAMILIES[ordinal % 2], ordinal)
            store.start_group(ordinal, of)
            group = Group(
                ordinal=ordinal,
                task=of,
                version=step - 1,
                trajectories=tuple(
                    trajectory(
                        ordinal,
                        sample,
                        of,
                        step - 1,
                        skill=0.3 + 0.5 * share,
                        form=0.2 + 0.7 * share,
                        status=Status.FAILED if (ordinal + sample) % 41 == 40 else Status.FINISHED,
                    )
                    for sample in range(settings.rollout.group_size)
                ),
            )
            if ordinal % drop_every == drop_every - 1:
                store.drop_group(ordinal, "all rewards are equal", group)
            else:
                groups.append(group)
        train_step(store, step, groups)


def whole_run(directory: Path, *, steps: int = 3, **changes) -> Path:
    """A finished run with evaluations before and after."""
    with Store.create(directory, config(steps=steps, **changes), provenance=PROVENANCE) as store:
        evaluate_all(store, 0, 0.3, 0.2)
        train(store, steps)
        evaluate_all(store, steps, 0.8, 0.9)
        store.finish("finished")
    return directory
