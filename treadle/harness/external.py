"""An agent that was not written for training, run as it is: it calls an address, we record.

Guarantees:
- the agent gets a session of its own on a gateway that lives as long as any trajectory needs it;
  every turn it samples there is in the trajectory, whatever the agent does with its messages;
- the time limit holds: an async agent is cancelled, a command is killed with its whole process
  group; a plain function cannot be killed, but its session is closed, so it gets no further turn;
- a failure of the sampler is a SamplerError whatever the agent made of it; otherwise an agent that
  raises, ends like a program (it, or a task that it started), or exits with another status than 0,
  is a HarnessError;
- what an agent cannot get (a turn beyond the limits) ends the trajectory as it does in a chat.

Takes: an agent, i.e. a function of (task, base_url, api_key), or `command([...])`. Gives: a
Harness.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treadle.errors import ConfigError, DataError, HarnessError, boundary
from treadle.gateway.recorder import Limits
from treadle.harness.chat import Chat
from treadle.harness.types import Harness
from treadle.threads import contained, in_thread
from treadle.tools import Tools
from treadle.types import Task

if TYPE_CHECKING:
    from treadle.gateway.server import Gateway
    from treadle.gateway.sessions import Session

Agent = Callable[[Task, str, str], "Awaitable[object] | object"]
"""agent(task, base_url, api_key), plain or async; what it returns is not used.

`base_url` ends in /v1 and works in every client of the OpenAI and the Anthropic dialects;
`api_key` names the session too, for agents whose address is fixed."""

OUTPUT_BYTES = 4000
"""Of a command's output, from its end, shown when it fails."""
MESSAGES_BYTES = 120_000
"""Of TREADLE_MESSAGES: Linux starts no program with a variable of 128 KiB or more. A task with
more has its texts on standard input only."""
POLL_S = 0.05
"""How often a running command is looked at."""
KILL_LIMIT_S = 5.0
"""For a killed command to be gone."""


def external(agent: Agent) -> Harness:
    """A harness that runs `agent` against the gateway for one trajectory at a time."""
    shared = SharedGateway()

    async def run(task: Task, chat: Chat, tools: Tools, limits: Limits) -> None:
        async with shared.session(chat) as (gateway, session):
            chat.state = "running the agent, before its first call"
            try:
                with boundary(HarnessError, f"agent {_name(agent)}"):
                    await contained(_run(agent, task, gateway.base_url(session), session.key))
            except HarnessError as error:
                # The agent's own failure is not news where a limit or the sampler caused it.
                await gateway.sessions.close(session, "the agent has ended")
                if session.error is not None:
                    raise session.error from error
                if chat.ended is None:
                    raise
        if session.error is not None:
            raise session.error

    return run


async def _run(agent: Agent, task: Task, base_url: str, api_key: str) -> None:
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(
        getattr(agent, "__call__", None)  # noqa: B004  an object with an async __call__
    ):
        result = agent(task, base_url, api_key)
    else:
        result = await in_thread(agent, task, base_url, api_key)
    if inspect.isawaitable(result):
        await result


@dataclass
class SharedGateway:
    """One gateway for all trajectories that run at the same time on a loop."""

    users: dict[asyncio.AbstractEventLoop, int] = field(default_factory=dict)
    gateways: dict[asyncio.AbstractEventLoop, asyncio.Future[Gateway]] = field(default_factory=dict)

    @contextlib.asynccontextmanager
    async def session(self, chat: Chat) -> AsyncIterator[tuple[Gateway, Session]]:
        """A session that records into `chat`; its counts are in `info["gateway"]` afterwards."""
        loop = asyncio.get_running_loop()
        self.users[loop] = self.users.get(loop, 0) + 1
        try:
            gateway = await self._gateway(loop)
            session = gateway.sessions.open(chat.recorder)
            try:
                yield gateway, session
            finally:
                await gateway.sessions.close(session, "the agent has ended")
                chat.tool_calls = chat.recorder.calls
                chat.info["gateway"] = session.info()
        finally:
            self.users[loop] -= 1
            if not self.users[loop]:
                del self.users[loop]
                started = self.gateways.pop(loop, None)
                if started is not None:
                    # In a task of its own: a second cancellation leaves no server behind either.
                    await asyncio.shield(asyncio.ensure_future(_ended(started)))

    async def _gateway(self, loop: asyncio.AbstractEventLoop) -> Gateway:
        if loop not in self.gateways:
            from treadle.gateway.server import Gateway

            self.gateways[loop] = asyncio.ensure_future(Gateway().start())
        return await asyncio.shield(self.gateways[loop])


async def _ended(started: asyncio.Future[Gateway]) -> None:
    """Close a gateway. One that still starts is let: a socket that is being bound is nobody's."""
    await asyncio.wait({started})
    if not started.cancelled() and started.exception() is None:
        await started.result().close()


# --------------------------------------------------------------------------- commands


@dataclass(frozen=True)
class Command:
    """An agent that is a program; see `command`."""

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()

    async def __call__(self, task: Task, base_url: str, api_key: str) -> None:
        prompt = "\n\n".join(m.content for m in task.messages)
        try:
            fed = prompt.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"task {task.id} cannot be given to `{self.argv[0]}`: its text has half a "
                f"surrogate pair at character {error.start}",
                hint="repair the task's text where it is read",
            ) from None
        places = {"{prompt}": prompt, "{base_url}": base_url, "{api_key}": api_key}
        environment = os.environ | dict(self.env) | environment_of(task, base_url, api_key)
        process = await asyncio.create_subprocess_exec(
            *(_filled(argument, places) for argument in self.argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        output = bytearray()
        feed = asyncio.ensure_future(_feed(process, fed))
        drain = asyncio.ensure_future(_drain(process, output))
        try:
            # Not wait(): it also waits for whoever else holds the pipes open.
            while (status := process.returncode) is None:
                await asyncio.sleep(POLL_S)
        finally:
            await _kill(process)  # what it left behind holds its output open
            await asyncio.wait({feed, drain}, timeout=KILL_LIMIT_S)
            feed.cancel()
            drain.cancel()
        if status != 0:
            shown = output.decode(errors="replace").strip() or "it printed nothing"
            raise HarnessError(f"`{self.argv[0]}` exited with status {status}; it ended: {shown}")


def command(argv: Sequence[str], *, env: dict[str, str] | None = None) -> Command:
    """An agent that is a program.

    Args:
        argv: `{prompt}`, `{base_url}` and `{api_key}` in it are replaced. The prompt (the texts
            of the task's messages) is also on standard input; addresses and keys are also in
            OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY, the
            messages in TREADLE_MESSAGES as JSON, unless that is longer than MESSAGES_BYTES.
        env: further variables. Nothing of what grades the task is ever passed on.
    """
    if not argv:
        raise ConfigError("a command needs at least the name of a program")
    return Command(tuple(argv), tuple((env or {}).items()))


def environment_of(task: Task, base_url: str, api_key: str) -> dict[str, str]:
    """Variables that point the usual clients at a session."""
    messages = json.dumps([{"role": m.role, "content": m.content} for m in task.messages])
    variables = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }
    if len(messages) <= MESSAGES_BYTES:
        variables["TREADLE_MESSAGES"] = messages
    return variables


async def _feed(process: asyncio.subprocess.Process, prompt: bytes) -> None:
    assert process.stdin is not None, "it is a pipe"
    with contextlib.suppress(ConnectionError):  # it need not read what it does not want
        process.stdin.write(prompt)
        await process.stdin.drain()
    process.stdin.close()


async def _drain(process: asyncio.subprocess.Process, tail: bytearray) -> None:
    """Read the output to its end, keep its last bytes."""
    assert process.stdout is not None, "it is a pipe"
    while chunk := await process.stdout.read(65536):
        tail += chunk
        del tail[:-OUTPUT_BYTES]


async def _kill(process: asyncio.subprocess.Process) -> None:
    """The whole group: what it started in the background goes with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KILL_LIMIT_S):
            await process.wait()


def _filled(argument: str, places: dict[str, str]) -> str:
    """Replaced in one pass: what is put in is never searched again."""
    out, rest = "", argument
    while rest:
        found = [(at, name) for name in places if (at := rest.find(name)) >= 0]
        if not found:
            break
        at, name = min(found)
        out, rest = out + rest[:at] + places[name], rest[at + len(name) :]
    return out + rest


def _name(agent: Any) -> str:
    return getattr(agent, "__qualname__", None) or type(agent).__name__


__all__ = ["Agent", "Command", "SharedGateway", "command", "environment_of", "external"]
