"""A loop over a stateful environment: it speaks first, judges each reply, and says when to stop.

Guarantees: the environment lives exactly as long as the trajectory (closed even on cancellation);
its calls run off the event loop, so a slow one stalls no other trajectory.

Takes: a way to make an Environment. Gives: a harness.
"""

from __future__ import annotations

from collections.abc import Callable

from treadle.errors import TaskError, boundary
from treadle.harness.chat import Chat, Limits
from treadle.harness.types import Harness
from treadle.threads import in_thread
from treadle.tools import Tools
from treadle.types import Environment, Task


def environment_loop(make: Callable[[Task], Environment]) -> Harness:
    """A harness that plays the environment `make(task)`.

    The first prompt is the task's messages followed by those of `reset`. The rewards of the
    steps, in the environment's own units, are kept in `info["environment_rewards"]` and their sum
    in `info["environment_reward"]`: a grader reads them there.
    """

    async def run(task: Task, chat: Chat, tools: Tools, limits: Limits) -> None:
        rewards: list[float] = []
        chat.info["environment_rewards"] = rewards
        chat.info["environment_reward"] = 0.0
        with boundary(TaskError, f"environment of task {task.id}: make"):
            environment = await in_thread(make, task)
        try:
            chat.state = "resetting the environment"
            with boundary(TaskError, f"environment of task {task.id}: reset"):
                seen = await in_thread(environment.reset, task, chat.seed)
            new = (*task.messages, *seen.messages)
            while not seen.done:
                message = await chat.turn(new)
                if chat.truncated:
                    return
                chat.state = f"stepping the environment after turn {chat.turns}"
                with boundary(TaskError, f"environment of task {task.id}: step {chat.turns}"):
                    seen = await in_thread(environment.step, message)
                if seen.reward is not None:
                    rewards.append(seen.reward)
                    chat.info["environment_reward"] = sum(rewards)
                new = seen.messages
        finally:
            with boundary(TaskError, f"environment of task {task.id}: close"):
                await in_thread(environment.close)

    return run
