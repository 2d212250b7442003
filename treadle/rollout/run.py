"""One trajectory, from opening its session to its reward.

Guarantees (contract 5 and 7):
- whatever a task, harness, tool, sampler or grader does, the result is a Trajectory whose status
  and error say what happened; only ContractError and cancellation pass through;
- the whole trajectory ends within its time limit, even if the harness swallows cancellation, and
  the error then names what it was doing;
- the session is released on every way out;
- failed and aborted trajectories are not graded; a grader's failure leaves the reward unscored;
- a limit that is reached before a token was sampled (a prompt longer than the context) is a
  failure with its numbers, never an answer that is judged.

Takes: a Task. Gives: a Trajectory. Waits for: the harness, at most `time_limit_s`; the grader,
which has a limit of its own.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeGuard

from treadle.config import RolloutConfig
from treadle.errors import (
    ContractError,
    HarnessError,
    LimitExceeded,
    RewardError,
    SamplerError,
    boundary,
    record,
    said,
)
from treadle.harness import Chat, Harness, Limits
from treadle.render import Renderer
from treadle.rollout.seeds import derive
from treadle.threads import contained
from treadle.tools import Tools
from treadle.types import (
    Reward,
    Sampler,
    SamplingParams,
    Status,
    StopReason,
    Task,
    Trajectory,
)

Grade = Callable[[Trajectory], Awaitable[Reward]]

_NO_ROOM = "raise model.max_context, shorten the prompt, or leave such tasks out"

GRACE_S = 5.0
"""For a cancelled harness to clean up, and for a sampler to release a session."""


async def run_trajectory(
    task: Task,
    ordinal: int,
    sample: int,
    *,
    sampler: Sampler,
    renderer: Renderer,
    harness: Harness,
    tools: Tools,
    config: RolloutConfig,
    max_context: int,
    seed: int,
    grade: Grade,
    attempt: int = 0,
    scope: str = "",
) -> Trajectory:
    """Run and grade one trajectory.

    Args:
        ordinal: of the group, and the key under which its sessions share their prompt.
        sample: index in the group.
        max_context: tokens of a branch, prompt included.
        seed: of the run.
        grade: judges finished and truncated trajectories.
        attempt: how often this place was tried before; part of the session's name alone, so a
            retry draws the same numbers.
        scope: in front of the names of session and group, for callers that use the same
            ordinals at the same time (an evaluation during a run).
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    session = f"{scope}{ordinal}/{sample}" + (f"#{attempt}" if attempt else "")

    def sampling(turn: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            seed=derive(seed, ordinal, sample, turn),
            deadline_s=config.time_limit_s,
        )

    limits = Limits(
        max_turns=config.max_turns,
        max_context=max_context,
        deadline=started + config.time_limit_s,
    )
    chat = Chat(
        sampler,
        renderer,
        session=session,
        sampling=sampling,
        limits=limits,
        tools=tools.schemas,
        seed=derive(seed, ordinal, sample),
    )

    async def drive() -> None:
        chat.state = "opening its session"
        with boundary(SamplerError, f"session {session}: open"):
            await sampler.open(session, group=f"{scope}{ordinal}")
        with boundary(HarnessError, f"trajectory {ordinal}/{sample}: harness"):
            await contained(harness(task, chat, tools, limits))

    try:
        error = await _bounded(drive(), config.time_limit_s, chat)
    finally:
        released = await _release(sampler, session)
    status, error = _outcome(chat, error)
    trajectory = Trajectory(
        id=f"{ordinal}/{sample}",
        task=task,
        sample=sample,
        nodes=tuple(chat.nodes),
        status=status,
        sampling=sampling(0),
        error=None if error is None else record(error, f"{chat.state}, trajectory {session}"),
        duration_s=loop.time() - started,
        tool_calls=chat.tool_calls,
        tool_errors=chat.tool_errors,
        info=_info(chat, released),
    )
    if status in (Status.ABORTED, Status.FAILED):
        return trajectory
    return replace(trajectory, reward=await _graded(grade, trajectory))


async def _bounded(work: Coroutine[Any, Any, None], limit_s: float, chat: Chat) -> Exception | None:
    """Run to the end or to the limit; the error that ended it, if any.

    Not `asyncio.timeout`: a harness that swallows its cancellation would make that wait for ever.
    """
    task = asyncio.ensure_future(work)
    late = False
    try:
        await asyncio.wait({task}, timeout=limit_s)
        if not task.done():
            late = True
            chat.ended = Status.ABORTED
            chat.end_reason = f"time limit of {limit_s:g} s reached while {chat.state}"
            await _stop(task)
    except asyncio.CancelledError:
        await _stop(task)
        raise
    error: BaseException | None = None
    if task.done():
        error = HarnessError("the harness was cancelled from inside")
        if not task.cancelled():
            error = task.exception()
        if _is_users(error):
            raised = f"the harness raised {type(error).__name__}: {said(error)}"
            error = HarnessError(raised).with_traceback(error.__traceback__)
    if isinstance(error, ContractError) or not isinstance(error, Exception | None):
        raise error
    return LimitExceeded(chat.end_reason) if late else error


def _is_users(error: BaseException | None) -> TypeGuard[BaseException]:
    """Not an Exception, and none of ours: GeneratorExit, a test framework's own, and so on."""
    ours = Exception | KeyboardInterrupt | SystemExit | BaseExceptionGroup
    return error is not None and not isinstance(error, ours)


async def _stop(task: asyncio.Future[None]) -> None:
    """Cancel and wait a little; what stays behind after that is left alone."""
    task.cancel()
    task.add_done_callback(lambda t: t.cancelled() or t.exception())  # its error is not news
    await asyncio.wait({task}, timeout=GRACE_S)


async def _release(sampler: Sampler, session: str) -> bool:
    """End the session, even while being cancelled; False = the sampler could not."""
    release = asyncio.ensure_future(sampler.release(session))
    try:
        await asyncio.wait_for(asyncio.shield(release), GRACE_S)
    except Exception:  # a leak is counted; the trajectory is not spoilt by it
        return False
    return True


def _outcome(chat: Chat, error: Exception | None) -> tuple[Status, Exception | None]:
    """Status from the chat's limits and stop reasons and the error's type, never from text."""
    if chat.ended is Status.ABORTED:
        return Status.ABORTED, error or LimitExceeded(chat.end_reason)
    if error is not None and not isinstance(error, LimitExceeded):
        return Status.FAILED, error
    if error is not None or chat.ended is not None:
        chat.end_reason = chat.end_reason or str(error)  # a limit of the harness's own
        if chat.turns == 0:
            # Nothing was said, so there is nothing to judge: unscored, which is not 0.
            limit = LimitExceeded(chat.end_reason, hint=_NO_ROOM)
            return Status.FAILED, error if chat.ended is None else limit
        return Status.TRUNCATED, None
    if chat.turns == 0:
        return Status.FAILED, HarnessError("the harness returned without asking the policy")
    truncated = chat.stop_reason is StopReason.LENGTH
    return (Status.TRUNCATED if truncated else Status.FINISHED), None


def _info(chat: Chat, released: bool) -> dict[str, object]:
    """The harness's own entries and the counts that metrics read."""
    counts: dict[str, object] = {
        "turns": chat.turns,
        "forks": chat.forks,
        "unread_tool_marks": chat.unread_tool_marks,
        "leaked_sessions": int(not released),
    }
    if chat.end_reason:
        counts["limit"] = chat.end_reason
    return {**chat.info, **counts}


async def _graded(grade: Grade, trajectory: Trajectory) -> Reward:
    where = f"reward of trajectory {trajectory.id}"
    try:
        with boundary(RewardError, where):
            reward = await grade(trajectory)
            if not isinstance(reward, Reward):
                raise TypeError(f"expected a Reward, got {type(reward).__name__}")
            if reward.value is not None and not math.isfinite(reward.value):
                raise ValueError(f"the reward is {reward.value}, expected a finite number")
            return reward
    except ContractError:
        raise
    except Exception as error:
        return Reward(value=None, error=record(error, where))
