"""A run whose rollouts are driven from outside: your program opens sessions, we train on them.

    async with td.open_run(model="smollm2-135m", steps=20) as run:
        session = await run.sessions.open("What is 2+3?")
        ...                                   # point any agent at session.base_url
        session.reward(1.0)
        session.release()

It is the controller's own loop: the harness waits for your program instead of running one, and
the task stream is what you open. Sessions of one task are its group: the first `open` of a task
starts `rollout.group_size` of them, later ones take the next, and one more starts another group.

Guarantees:
- `open` waits while the run may not start more (it is training, or far ahead), and raises the
  error of a run that failed, or that is over;
- a session that is not released within `rollout.time_limit_s` of its start is aborted, an unopened
  one of a started group too: that one place is lost, not the group;
- leaving the block normally first trains every full batch that has been released; every committed
  step has a checkpoint then.

Takes: a model and sessions with rewards. Gives: a run directory like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle import machine
from treadle.api import _check_place, _directory, _parts, _resolved, _store
from treadle.config import EvalConfig, RunConfig, StoreConfig, override
from treadle.errors import DataError, HarnessError, StoreError, first_of
from treadle.evals import STARTED_BY
from treadle.gateway.recorder import Limits
from treadle.harness.chat import Chat
from treadle.harness.external import SharedGateway
from treadle.reward.values import MAX_ABS_REWARD
from treadle.tools import Tools
from treadle.types import Message, Reward, Task, Trajectory

if TYPE_CHECKING:
    from treadle.loop import Controller, Observer

IDLE_LIMIT_S = 24 * 3600.0
"""A run that is asked for nothing new for so long ends."""
OPEN_LIMIT_S = 3600.0
"""For `open`: a training step, a checkpoint and a publication may lie before it."""
SETTLE_LIMIT_S = 3600.0
"""For the released batches to be trained when the block is left."""
TASKSET = "opened"

_REWARD = "given_reward"
_OWN_PARTS = ("reward", "score")


@contextlib.asynccontextmanager
async def open_run(
    *,
    model: str | None = None,
    steps: int | None = None,
    run_dir: str | Path | None = None,
    config: RunConfig | None = None,
    settings: Sequence[str] = (),
    observer: Observer | None = None,
) -> AsyncIterator[OpenRun]:
    """Train on sessions that the block opens.

    Args:
        model, steps, run_dir, settings, observer: as in `train`.
        config: everything not named here; its `tasks` and `rollout.harness` are not used. None =
            the defaults, with a checkpoint at every step.

    Raises the error of the stage that failed; the store keeps everything until then.
    """
    tuning = machine.tune()
    from treadle.loop import Controller

    base = config or RunConfig(store=StoreConfig(checkpoint_every=1))
    base = replace(
        base,
        steps=base.steps if steps is None else steps,
        model=base.model if model is None else replace(base.model, name=model),
        eval=EvalConfig(questions=0),
    )
    base = override(base, settings)
    directory = _directory(run_dir, base)
    base = _resolved(base, directory, False)
    _check_place(base, directory, False)
    sessions = OpenSessions(base.rollout.group_size)
    async with _parts(base, None, mix=sessions.stream, harness=sessions, grade=sessions.grade) as (
        parts,
        provenance,
    ):
        parts = replace(parts, task_limit_s=IDLE_LIMIT_S)
        facts = asdict(machine.facts()) | {
            "tuning": asdict(tuning),
            "probe": asdict(machine.probe()),
            STARTED_BY: "td.open_run",
        }
        with _store(base, directory, False, provenance, facts) as store:
            run = OpenRun(directory, sessions, observer)
            controller = Controller(base, parts, store, run._observe)
            run._begin(controller)
            status, cause = "interrupted", ""
            try:
                yield run
                await run._settle()
                await run._end()
                await controller.save()
                status = "finished"
            except BaseException as error:
                if isinstance(error, Exception):
                    status, cause = "failed", str(first_of(error))
                raise
            finally:
                await run._end()
                with contextlib.suppress(StoreError):
                    store.finish(status, cause)


class OpenRun:
    """What the block of `open_run` has."""

    def __init__(
        self, path: Path, sessions: OpenSessions, observer: Observer | None = None
    ) -> None:
        self.path = path
        self.sessions = sessions
        self.step = 0
        """Steps that are trained and served."""
        self._observer = observer
        self._changed = asyncio.Event()

    def _begin(self, controller: Controller) -> None:
        self._controller = controller
        self._work = asyncio.ensure_future(controller.run())
        self._work.add_done_callback(lambda work: work.cancelled() or work.exception())
        self._work.add_done_callback(lambda _: self._changed.set())
        self.sessions._run = self._work

    def _observe(self, kind: str, data: Mapping[str, Any]) -> None:
        if kind == "step":
            self.step = data["step"]
        self._changed.set()
        if self._observer is not None:
            self._observer(kind, data)

    async def _settle(self) -> None:
        """Wait until what was released is trained, or can no longer be. Raises the run's error."""
        async with asyncio.timeout(SETTLE_LIMIT_S):
            while not self._work.done() and not self._quiet():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 0.05)
        if self._work.done() and not self._work.cancelled():
            self._work.result()

    def _quiet(self) -> bool:
        trained, ready, running = self._controller.standing()
        # A group whose places are all released ends by itself; one that waits for `open` does not.
        alive = sum(not self.sessions.waits(ordinal) for ordinal in running)
        enough = ready >= self._controller.config.rollout.groups_per_step
        return trained == self.step and not alive and not enough

    async def _end(self) -> None:
        if not self._work.done():
            self._work.cancel()
        await asyncio.wait({self._work})
        self.sessions.stream.close()  # the thread that waits there goes


@dataclass(eq=False)
class OpenSession:
    """One session: an address, a reward, a release."""

    task: Task
    base_url: str
    """For a client of either dialect; see docs/agents.md."""
    api_key: str
    _chat: Chat
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _taken: bool = False

    def reward(self, value: float, **parts: float) -> None:
        """Judge it, before its release; without, it is unscored. Named parts become metrics.

        Raises DataError: not a finite number within +-MAX_ABS_REWARD, or a part of the name
            `reward` or `score`.
        """
        if self._released.is_set():
            raise HarnessError("a session is judged before it is released")
        for name in _OWN_PARTS:
            if name in parts:
                raise DataError(
                    f"a part of session.reward is named `{name}`, which is the reward's own",
                    hint="give the part another name",
                )
        numbers = {"reward": value, **parts}
        self._chat.info[_REWARD] = {k: _finite(k, v) for k, v in numbers.items()}

    def release(self) -> None:
        """The trajectory is done. Idempotent."""
        self._released.set()


@dataclass
class _Shelf:
    """The sessions of one task that are on their way to somebody."""

    free: deque[OpenSession] = field(default_factory=deque)
    waiting: deque[asyncio.Future[OpenSession]] = field(default_factory=deque)
    coming: int = 0
    """Places of started groups that have neither begun nor failed yet."""


class TaskStream:
    """The tasks of a run that are asked for as it goes."""

    tasksets: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self._wanted: queue.SimpleQueue[Task | None] = queue.SimpleQueue()

    def want(self, task: Task) -> None:
        self._wanted.put(task)

    def task(self, ordinal: int) -> Task:
        """Blocks; called in a thread that nothing waits for."""
        task = self._wanted.get()
        if task is None:
            raise StopIteration("the run is over")
        return task

    def close(self) -> None:
        self._wanted.put(None)


class OpenSessions:
    """Opens sessions; the other side of the controller's loop."""

    def __init__(self, group_size: int) -> None:
        self.stream = TaskStream()
        self._size = group_size
        self._shelves: dict[object, _Shelf] = {}
        self._gateway = SharedGateway()
        self._run: asyncio.Future[None] | None = None
        self._unreleased: dict[str, set[OpenSession]] = {}
        self._begun: set[str] = set()
        """Trajectories that run and were on a shelf."""

    async def open(self, task: Task | str) -> OpenSession:
        """The next session of a task; a text is a task of one user message.

        Raises the error of a run that failed, HarnessError when it is over.
        """
        task = _as_task(task)
        self._check()
        shelf = self._shelf(task)
        if shelf.free:
            session = shelf.free.popleft()
        else:
            if shelf.coming <= len(shelf.waiting):
                shelf.coming += self._size
                self.stream.want(task)
            session = await self._next(shelf)
        session._taken = True
        return session

    async def _next(self, shelf: _Shelf) -> OpenSession:
        assert self._run is not None, "set before the block begins"
        waiter: asyncio.Future[OpenSession] = asyncio.get_running_loop().create_future()
        shelf.waiting.append(waiter)
        try:
            await asyncio.wait(
                {waiter, self._run}, timeout=OPEN_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if waiter.done():
                return waiter.result()
            self._check()
            raise HarnessError(f"no session could begin for {OPEN_LIMIT_S:g} s")
        except asyncio.CancelledError:
            # Handed over in this very tick: it goes to whoever opens next.
            if waiter.done() and waiter.exception() is None:
                session = waiter.result()
                if not session._released.is_set():
                    self._offer(shelf, session)
            raise
        finally:
            if waiter in shelf.waiting:
                shelf.waiting.remove(waiter)

    def _check(self) -> None:
        run = self._run
        if run is None or not run.done():
            return
        error = None if run.cancelled() else run.exception()
        if error is not None:
            raise error
        raise HarnessError(
            "the run has trained all of its steps", hint="ask for more by `steps` of open_run"
        )

    def waits(self, ordinal: int) -> bool:
        """Some session of this group has not been released, or not even begun."""
        return bool(self._unreleased.get(str(ordinal)))

    # ------------------------------------------------------------------ the loop's side

    async def __call__(self, task: Task, chat: Chat, tools: Tools, limits: Limits) -> None:
        """Hands the trajectory to whoever opens it next, and waits for its release."""
        place = chat.recorder.session.partition("#")[0]
        ordinal = place.partition("/")[0]
        shelf = self._shelf(task)
        async with self._gateway.session(chat) as (gateway, inner):
            session = OpenSession(task, gateway.base_url(inner), inner.key, chat)
            self._unreleased.setdefault(ordinal, set()).add(session)
            try:
                self._begun.add(place)
                shelf.coming = max(shelf.coming - 1, 0)
                self._offer(shelf, session)
                chat.state = "waiting for its session to be opened or released"
                await session._released.wait()
            finally:
                session._released.set()
                if session in shelf.free:
                    shelf.free.remove(session)
                self._unreleased[ordinal].discard(session)
                if not self._unreleased[ordinal]:
                    del self._unreleased[ordinal]
        if inner.error is not None:
            raise inner.error

    def _offer(self, shelf: _Shelf, session: OpenSession) -> None:
        while shelf.waiting:
            waiter = shelf.waiting.popleft()
            if not waiter.done():
                waiter.set_result(session)
                return
        shelf.free.append(session)

    def again(self, trajectory: Trajectory, allowed: bool) -> bool:
        """A session that was offered is final; a place that never begins is no longer awaited."""
        if trajectory.id in self._begun:
            self._begun.remove(trajectory.id)
            return False
        if allowed:
            return True
        shelf = self._shelf(trajectory.task)
        shelf.coming = max(shelf.coming - 1, 0)
        waiting = [waiter for waiter in shelf.waiting if not waiter.done()]
        if shelf.coming < len(waiting):
            cause = trajectory.error.message if trajectory.error else trajectory.status.value
            waiting[-1].set_exception(
                HarnessError(
                    f"a session of task {trajectory.task.id} could not begin: {cause}",
                    hint="the run goes on; open again for a session of another group",
                )
            )
        return False

    def _shelf(self, task: Task) -> _Shelf:
        """By what the policy is shown too: an id is unique in its task set alone, if there."""
        return self._shelves.setdefault((task.taskset, task.id, task.messages), _Shelf())

    async def grade(self, trajectory: Trajectory) -> Reward:
        """What the session was given; nothing = unscored."""
        given = dict(trajectory.info.get(_REWARD) or {})
        if not given:
            return Reward(value=None)
        value = given.pop("reward")
        return Reward(value=value, parts={"score": value, **given})


def _finite(name: str, value: object) -> float:
    """A number of Python's, numpy's or torch's; a text is none, even one that spells a number."""
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        number = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if abs(number) <= MAX_ABS_REWARD:  # False for NaN
        return number
    try:
        shown = repr(value)[:80]
    except ValueError:  # an integer with too many digits to print
        shown = "too large to print"
    raise DataError(
        f"`{name}` of session.reward is {shown} ({type(value).__name__}), expected a finite number "
        f"within +-{MAX_ABS_REWARD:g}"
    )


def _as_task(task: Task | str) -> Task:
    if isinstance(task, Task):
        return task
    if not isinstance(task, str) or not task:
        raise DataError(f"a task is a Task or a text, got {task!r}")
    return Task(
        id=sha256(task.encode()).hexdigest()[:16],
        taskset=TASKSET,
        messages=(Message(role="user", content=task),),
    )


__all__ = ["OpenRun", "OpenSession", "OpenSessions", "open_run"]
