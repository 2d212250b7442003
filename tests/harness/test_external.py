"""An unmodified agent as a harness: its record, its limits, its failures, its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gateway.bench import recorder_of, renderer, sampler_of, until
from treadle.config import RolloutConfig
from treadle.errors import ConfigError, SamplerError, Terminated
from treadle.gateway.server import Gateway
from treadle.harness import command, external, harness_named
from treadle.harness.external import Command, SharedGateway
from treadle.rollout.run import run_trajectory
from treadle.testing import Hang
from treadle.tools import load_tools
from treadle.types import Message, Reward, Status, Task, Trajectory

TASK = Task(
    id="t",
    taskset="set",
    messages=(Message(role="user", content="what is {api_key}?"),),
    data={"answer": "the secret"},
)


def ask(base_url: str, *messages: str) -> str:
    """One chat completion by nothing but the standard library."""
    body = {"messages": [{"role": "user", "content": m} for m in messages]}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return json.load(reply)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        error.close()
        raise


def run(agent: Any, script: Any, *, task: Task = TASK, **changes: Any) -> tuple[Trajectory, Any]:
    r = renderer()
    sampler = sampler_of(r, script)
    config = replace(RolloutConfig(max_new_tokens=50, time_limit_s=20.0), **changes)

    async def grade(trajectory: Trajectory) -> Reward:
        return Reward(value=1.0)

    trajectory = asyncio.run(
        run_trajectory(
            task,
            0,
            0,
            sampler=sampler,
            renderer=r,
            harness=external(agent),
            tools=load_tools(()),
            config=config,
            max_context=400,
            seed=0,
            grade=grade,
        )
    )
    assert not sampler.open_sessions and sampler.running == 0, "every session was released"
    return trajectory, sampler


def test_an_agents_turns_are_its_trajectory() -> None:
    def agent(task: Task, base_url: str, api_key: str) -> None:
        assert ask(base_url, task.messages[0].content) == "one"
        assert ask(base_url, "a side question") == "two"

    trajectory, sampler = run(agent, ["one", "two"])
    assert trajectory.status is Status.FINISHED and trajectory.reward.value == 1.0
    assert trajectory.answer == "two" and len(list(trajectory.branches())) == 2
    assert trajectory.num_trained_tokens == sum(len(c.ids) for _, c in sampler.log)
    assert trajectory.info["gateway"]["requests"] == 2


def test_an_async_agent_is_awaited() -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> None:
        await asyncio.to_thread(ask, base_url, "x")

    assert run(agent, ["one"])[0].status is Status.FINISHED


def test_an_agent_that_asks_nothing_or_raises_has_failed() -> None:
    def raises(task: Task, base_url: str, api_key: str) -> None:
        ask(base_url, "x")
        raise ZeroDivisionError("oops")

    trajectory, _ = run(lambda *given: None, [])
    assert trajectory.error is not None and "without asking" in trajectory.error.message
    trajectory, _ = run(raises, ["one"])
    assert trajectory.status is Status.FAILED and trajectory.error is not None
    assert trajectory.error.kind == "HarnessError" and "oops" in trajectory.error.message
    assert trajectory.num_sampled_tokens > 0, "what it did stays on the record"


class NoException(BaseException):
    """What some test frameworks raise."""


@pytest.mark.parametrize(
    "end",
    [
        SystemExit(0),
        GeneratorExit(),
        BaseExceptionGroup("several", [SystemExit(3)]),
        NoException(),
        asyncio.CancelledError(),
    ],
)
def test_an_async_agent_that_ends_like_a_program_fails_its_own_trajectory(
    end: BaseException,
) -> None:
    async def agent(task: Task, base_url: str, api_key: str) -> None:
        await asyncio.to_thread(ask, base_url, "x")
        raise end

    trajectory, _ = run(agent, ["one"])
    assert trajectory.status is Status.FAILED and trajectory.error is not None
    assert trajectory.error.kind == "HarnessError"
    assert trajectory.num_sampled_tokens > 0, "what it did stays on the record"


def test_what_ends_this_process_is_not_an_agents_failure() -> None:
    async def itself(task: Task, base_url: str, api_key: str) -> None:
        raise Terminated(143)

    async def in_a_task(task: Task, base_url: str, api_key: str) -> None:
        await asyncio.create_task(itself(task, base_url, api_key))

    for agent in (itself, in_a_task):
        with pytest.raises(Terminated):
            run(agent, [])


@pytest.mark.parametrize("waits", ["for it", "beside it", "in a group", "not", "and swallows"])
@pytest.mark.parametrize("end", [SystemExit(3), KeyboardInterrupt(), NoException()])
def test_a_task_of_an_agent_that_ends_like_a_program_fails_its_trajectory(
    end: BaseException, waits: str
) -> None:
    """asyncio lets it out of the task, and so out of the loop and the run."""

    async def leave() -> None:
        await asyncio.sleep(0)
        raise end

    async def agent(task: Task, base_url: str, api_key: str) -> None:
        await asyncio.to_thread(ask, base_url, "x")
        if waits == "in a group":
            async with asyncio.TaskGroup() as group:
                group.create_task(leave())
                await asyncio.sleep(20)
            return
        leaving = asyncio.create_task(leave())
        if waits == "for it":
            await leaving
        elif waits == "and swallows":
            with contextlib.suppress(BaseException):
                await leaving
        elif waits == "beside it":
            await asyncio.wait({leaving})
            leaving.result()

    trajectory, _ = run(agent, ["one"])
    if waits == "not" or (waits == "and swallows" and isinstance(end, NoException)):
        assert trajectory.status is Status.FINISHED
        return
    assert trajectory.status is Status.FAILED and trajectory.error is not None
    assert trajectory.error.kind == "HarnessError"
    if waits != "in a group":
        assert type(end).__name__ in trajectory.error.message
    assert trajectory.num_sampled_tokens > 0, "what it did stays on the record"


def test_the_other_trajectories_of_a_loop_go_on_when_an_agents_task_exits() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def agent(task: Task, base_url: str, api_key: str) -> None:
        if task.id == "bad":
            leaving = asyncio.create_task(leave())
            await asyncio.sleep(20)
            await leaving
        for _ in range(3):
            await asyncio.to_thread(ask, base_url, "x")

    async def grade(trajectory: Trajectory) -> Reward:
        return Reward(value=1.0)

    r = renderer()
    harness = external(agent)

    async def main() -> list[Trajectory]:
        sampler = sampler_of(r, lambda session, turn: "one")
        return await asyncio.gather(
            *(
                run_trajectory(
                    replace(TASK, id="bad" if i == 1 else "good"),
                    i,
                    0,
                    sampler=sampler,
                    renderer=r,
                    harness=harness,
                    tools=load_tools(()),
                    config=RolloutConfig(max_new_tokens=50, time_limit_s=30.0),
                    max_context=400,
                    seed=0,
                    grade=grade,
                )
                for i in range(3)
            )
        )

    ends = [t.status for t in asyncio.run(main())]
    assert ends == [Status.FINISHED, Status.FAILED, Status.FINISHED]


def test_the_samplers_failure_is_not_the_agents() -> None:
    """Then the group tries again, which it does not for an agent that is broken."""

    def swallows(task: Task, base_url: str, api_key: str) -> None:
        with pytest.raises(urllib.error.HTTPError):
            ask(base_url, "x")

    def passes_on(task: Task, base_url: str, api_key: str) -> None:
        ask(base_url, "x")

    for agent in (swallows, passes_on):
        trajectory, _ = run(agent, [SamplerError("engine died")])
        assert trajectory.status is Status.FAILED and trajectory.error is not None
        assert trajectory.error.kind == "SamplerError"


def test_limits_end_it_as_they_end_a_chat() -> None:
    def greedy(task: Task, base_url: str, api_key: str) -> None:
        for _ in range(5):
            ask(base_url, "x")

    def long(task: Task, base_url: str, api_key: str) -> None:
        ask(base_url, "x")
        ask(base_url, "y" * 1000)

    trajectory, _ = run(greedy, ["one"] * 5, max_turns=3)
    assert trajectory.status is Status.TRUNCATED and trajectory.info["turns"] == 3
    trajectory, _ = run(long, ["one"] * 5)
    assert trajectory.status is Status.TRUNCATED and "context" in trajectory.info["limit"]
    assert trajectory.reward.value == 1.0, "graded as it stands"


def test_an_agent_beyond_its_time_is_aborted_and_its_turn_cancelled() -> None:
    def agent(task: Task, base_url: str, api_key: str) -> None:
        ask(base_url, "x")

    trajectory, _ = run(agent, [Hang()], time_limit_s=0.5)
    assert trajectory.status is Status.ABORTED


# ----------------------------------------------------------------------- commands

PROGRAM = """
import json, os, subprocess, sys, urllib.request
prompt = sys.stdin.read()
assert prompt == sys.argv[1], (prompt, sys.argv)
assert "secret" not in json.dumps(dict(os.environ)), "what grades the task is out of reach"
assert json.loads(os.environ["TREADLE_MESSAGES"])[0]["content"] == prompt
for flavour, path in (("OPENAI", "/chat/completions"), ("ANTHROPIC", "/v1/messages")):
    url, key = os.environ[flavour + "_BASE_URL"], os.environ[flavour + "_API_KEY"]
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 9}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"x-api-key": key})
    with urllib.request.urlopen(request, timeout=20) as reply: reply.read()
"""


def test_a_command_finds_the_session_in_its_environment() -> None:
    agent = command([sys.executable, "-c", PROGRAM, "{prompt}"])
    trajectory, sampler = run(agent, ["one", "two"])
    assert trajectory.status is Status.FINISHED, trajectory.error
    assert len(sampler.log) == 2


def test_a_command_that_fails_shows_its_last_words() -> None:
    code = "print('x' * 10**6); print('the end is near'); raise SystemExit(3)"
    trajectory, _ = run(command([sys.executable, "-c", code]), [])
    assert trajectory.error is not None and trajectory.error.kind == "HarnessError"
    assert "status 3" in trajectory.error.message
    assert "the end is near" in trajectory.error.message
    assert len(trajectory.error.message) < 5000


def test_a_program_that_is_not_there_is_an_error_of_the_harness() -> None:
    trajectory, _ = run(command(["no-such-program-anywhere"]), [])
    assert trajectory.error is not None and "no-such-program" in trajectory.error.message


def test_a_command_and_what_it_started_are_killed_at_the_limit(tmp_path: Path) -> None:
    """Also what it left in the background when it ended in time, holding its output open."""
    pids = tmp_path / "pids"
    child = "import time; time.sleep(600)"
    for waits, limit_s in ((True, 5.0), (False, 20.0)):
        code = (
            "import os, subprocess, sys\n"
            f"p = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
            f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{p.pid}}')\n"
            + ("p.wait()" if waits else "")
        )
        trajectory, _ = run(command([sys.executable, "-c", code]), [], time_limit_s=limit_s)
        assert trajectory.status is (Status.ABORTED if waits else Status.FAILED)
        for pid in map(int, pids.read_text().split()):
            asyncio.run(until(lambda pid=pid: not _alive(pid)))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_places_in_a_command_are_filled_once() -> None:
    """A prompt that spells a place is not searched again."""
    agent = command([sys.executable, "-c", PROGRAM, "{prompt}"])
    assert isinstance(agent, Command) and TASK.messages[0].content == "what is {api_key}?"
    assert run(agent, ["one", "two"])[0].status is Status.FINISHED


def test_a_long_prompt_reaches_a_command_on_its_input() -> None:
    """Linux refuses to start a program with a variable of 128 KiB."""
    code = (
        "import os, sys\n"
        "assert len(sys.stdin.read()) == 200_000\n"
        "raise SystemExit(9 if 'TREADLE_MESSAGES' not in os.environ else 1)"
    )
    long = replace(TASK, messages=(Message(role="user", content="x" * 200_000),))
    trajectory, _ = run(command([sys.executable, "-c", code]), [], task=long)
    assert trajectory.error is not None and "status 9" in trajectory.error.message


def test_a_text_that_no_program_can_read_starts_none(tmp_path: Path) -> None:
    started = tmp_path / "started"
    agent = command([sys.executable, "-c", f"open({str(started)!r}, 'w')"])
    broken = replace(TASK, messages=(Message(role="user", content="a\ud800b"),))
    trajectory, _ = run(agent, [], task=broken)
    assert trajectory.error is not None and trajectory.error.kind == "DataError"
    assert "character 1" in trajectory.error.message and not started.exists()


# ----------------------------------------------------------------------- the shared gateway


@pytest.mark.parametrize("ticks", range(6))
def test_a_user_cancelled_while_the_gateway_starts_leaves_no_server(
    ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Gateway] = []
    start = Gateway.start

    async def noted(self: Gateway) -> Gateway:
        made.append(self)
        return await start(self)

    monkeypatch.setattr(Gateway, "start", noted)

    async def main() -> None:
        r = renderer()
        shared = SharedGateway()

        async def use() -> None:
            recorder = recorder_of(sampler_of(r, []), r)
            async with shared.session(SimpleNamespace(recorder=recorder, info={})):  # pyright: ignore
                await asyncio.Event().wait()

        using = asyncio.ensure_future(use())
        for _ in range(ticks):
            await asyncio.sleep(0)
        using.cancel()
        await asyncio.wait({using})
        assert not shared.gateways and not shared.users
        assert all(gateway._runner is None for gateway in made)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


# ----------------------------------------------------------------------- names


def test_a_harness_is_named_or_refused() -> None:
    assert callable(harness_named("tests.harness.test_external:ask"))
    with pytest.raises(ConfigError, match="no harness `tool_lop`") as caught:
        harness_named("tool_lop")
    assert "tool_loop" in caught.value.hint
    with pytest.raises(ConfigError, match="cannot be called"):
        harness_named("tests.harness.test_external:TASK")
    with pytest.raises(ConfigError, match=r"rollout\.harness"):
        RolloutConfig(harness="tool_lop")
    assert os.environ.get("TREADLE_MESSAGES") is None
