"""What a teacher thinks of what the policy sampled: log pi_T of every trained token.

Guarantees:
- the teacher scores the ids that were sampled, at the temperature they were sampled at; where it is
  shown a system message of its own, that alone differs, and the sampled ids follow it unchanged;
- a token that several branches share is scored in the first of them, where it is trained;
- every call is bounded and ends with the teacher's name in its error.

Takes: Groups and a Teacher. Gives: log-probabilities by trajectory and node. Waits for: the
teacher's sampler, at most SCORE_LIMIT_S a row.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from treadle.errors import HarnessError, SamplerError, boundary, first_of
from treadle.render import Renderer, ToolSpec
from treadle.types import Group, Message, Node, Sampler, Trajectory

SCORE_LIMIT_S = 300.0
"""Longest wait for the scores of one row."""

IN_FLIGHT = 8
"""Rows that the teacher is asked for at once."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A model that scores; it is never sampled from and never trained."""

    sampler: Sampler
    name: str
    """For people."""
    system: str = ""
    """Shown to the teacher alone, in place of the task's own system message."""
    coef: float = 1.0
    """Advantage per nat."""
    noise_nats: float = 0.0
    """Differences up to this are the rounding of two computations of one number: no signal."""


@dataclass(frozen=True, slots=True)
class _Row:
    trajectory: Trajectory
    nodes: tuple[Node, ...]
    """Of a branch, root first."""
    fresh: frozenset[int]
    """Trained nodes that no earlier branch holds."""


async def teacher_logprobs(
    groups: Sequence[Group],
    teacher: Teacher,
    *,
    renderer: Renderer,
    tools: Sequence[ToolSpec] = (),
) -> dict[str, dict[int, tuple[float, ...]]]:
    """log pi_T in nats of each token of each trained node, by trajectory id and node id; NaN where
    the token is not trained.

    Raises:
        SamplerError: the teacher did not answer in time, or not with a finite number per token.
        HarnessError: the teacher has a system message, and a trajectory's prompt is not the
            task's own messages, in which it could take its place.
    """
    room = asyncio.Semaphore(IN_FLIGHT)
    out: dict[str, dict[int, tuple[float, ...]]] = {}
    prompts: dict[tuple[Message, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    """By what the policy was shown: an id is unique in its task set alone."""

    async def ask(row: _Row, ids: tuple[int, ...], start: int, offset: int) -> None:
        where = f"teacher {teacher.name}: scores of trajectory {row.trajectory.id}"
        async with room:
            try:
                async with asyncio.timeout(SCORE_LIMIT_S):
                    with boundary(SamplerError, where):
                        scores = await teacher.sampler.score(
                            ids, start + offset, temperature=row.trajectory.sampling.temperature
                        )
            except TimeoutError:
                raise SamplerError(
                    f"{where}: no answer for {SCORE_LIMIT_S:g} s",
                    hint="the teacher's engine is stuck: look at its log",
                ) from None
        if len(scores) != len(ids) - start - offset or not all(map(math.isfinite, scores)):
            raise SamplerError(
                f"{where}: expected {len(ids) - start - offset} finite numbers, got {len(scores)}"
                + ("" if all(map(math.isfinite, scores)) else ", not all of them finite")
            )
        place, found = 0, out.setdefault(row.trajectory.id, {})
        for node in row.nodes:
            if node.id in row.fresh:
                values = scores[place - start : place - start + len(node.ids)]
                found[node.id] = tuple(
                    x if t else math.nan for x, t in zip(values, node.trained, strict=True)
                )
            place += len(node.ids)

    failed: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            for group in groups:
                for trajectory in group.scored:
                    for row in _rows(trajectory):
                        ids, start = _ids(row)
                        shown, offset = ids, 0
                        if teacher.system:
                            key = trajectory.task.messages
                            if key not in prompts:
                                prompts[key] = _prompts(trajectory, teacher, renderer, tools)
                            shown, offset = _instead(row, ids, start, *prompts[key])
                        tasks.create_task(ask(row, shown, start, offset))
    except BaseExceptionGroup as errors:
        failed = first_of(errors)
    if failed is not None:
        raise failed  # outside of `except`: its cause chain stays its own
    return out


def _rows(trajectory: Trajectory) -> Iterator[_Row]:
    seen: set[int] = set()
    for branch in trajectory.branches():
        fresh = frozenset(n.id for n in branch if any(n.trained) and n.id not in seen)
        seen |= fresh
        if fresh:
            yield _Row(trajectory, branch, fresh)


def _ids(row: _Row) -> tuple[tuple[int, ...], int]:
    """All ids of the branch, and the place of the first that is asked for."""
    start, ids = -1, []
    for node in row.nodes:
        if start < 0 and node.id in row.fresh:
            start = len(ids)
        ids += node.ids
    return tuple(ids), start


def _prompts(
    trajectory: Trajectory, teacher: Teacher, renderer: Renderer, tools: Sequence[ToolSpec]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The prompt that the policy saw, and the teacher's."""
    messages = trajectory.task.messages
    told = [Message(role="system", content=teacher.system)]
    told += [m for m in messages if m.role != "system"]
    return renderer.prompt(messages, tools), renderer.prompt(told, tools)


def _instead(
    row: _Row, ids: tuple[int, ...], start: int, prompt: Sequence[int], told: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """`ids` with the teacher's prompt, and by how much what follows has moved."""
    if start < len(prompt) or ids[: len(prompt)] != tuple(prompt):
        raise HarnessError(
            f"trajectory {row.trajectory.id}: its prompt of {start} tokens does not begin with the "
            f"messages of its task ({len(prompt)} tokens), so the teacher's system message has no "
            "place in it",
            hint="leave learn.teacher.system out, or use a harness that shows the task as it is",
        )
    return (*told, *ids[len(prompt) :]), len(told) - len(prompt)


def noise_of(dtype: str) -> float:
    """Nats by which two computations of one logprob differ by rounding alone, single tokens."""
    return {"float32": 1e-4}.get(dtype, 2e-2)
