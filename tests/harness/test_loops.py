"""Single turn, tool loop and environment, on a scripted policy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from tests.render.templates import CHATML, TOOLS, toy_tokenizer
from treadle.errors import LimitExceeded, TaskError, ToolError
from treadle.harness import Chat, Harness, Limits, environment_loop, harness_named, single_turn
from treadle.render import Renderer
from treadle.testing import Reply, ScriptedSampler
from treadle.tools import Tools, tool
from treadle.types import Message, Observation, SamplingParams, Task

NONE = Tools()
TASK = Task(id="t", taskset="set", messages=(Message(role="user", content="2+3?"),))


class Adder:
    """The tool `add` and a record of what it was run with."""

    def __init__(self, fail: Exception | None = None) -> None:
        self.ran: list[tuple[int, int]] = []
        self.fail = fail

        def add(a: int = 0, b: int = 0) -> int:
            """Add two integers."""
            if self.fail is not None:
                raise self.fail
            self.ran.append((a, b))
            return a + b

        self.tools = Tools([tool(add)])


def call(arguments: str, name: str = "add") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def play(
    harness: Harness,
    replies: Sequence[Reply],
    tools: Tools = NONE,
    *,
    template: str = TOOLS,
    max_turns: int = 8,
    max_new_tokens: int = 400,
    check: Callable[[Chat], None] = lambda chat: None,
) -> Chat:
    tokenizer = toy_tokenizer(template)
    r = Renderer(tokenizer, [tokenizer.eos_token_id])
    source = ScriptedSampler(
        script=replies,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        stop_ids=r.stop_ids,
    )
    limits = Limits(max_turns=max_turns, max_context=8192)
    chat = Chat(
        source,
        r,
        session="s",
        sampling=lambda turn: SamplingParams(max_new_tokens=max_new_tokens),
        limits=limits,
        tools=tools.schemas,
        seed=11,
    )

    async def main() -> None:
        await source.open("s")
        await harness(TASK, chat, tools, limits)

    asyncio.run(main())
    return chat


def roles(chat: Chat) -> list[str]:
    return [m.role for m in chat.messages]


# ----------------------------------------------------------------------- the loops


def test_a_single_turn_is_one_prompt_and_one_reply() -> None:
    chat = play(single_turn, ["5"])
    assert roles(chat) == ["user", "assistant"] and chat.turns == 1
    assert harness_named("single_turn") is single_turn


@pytest.mark.parametrize("template", [TOOLS, CHATML])
def test_the_tool_loop_goes_on_until_a_turn_has_no_call(template: str) -> None:
    """With native tools, and with tools written as text."""
    adder = Adder()
    replies = [call('{"a": 2, "b": 3}'), "the answer is 5"]
    chat = play(harness_named("tool_loop"), replies, adder.tools, template=template)
    assert roles(chat) == ["user", "assistant", "tool", "assistant"]
    assert adder.ran == [(2, 3)] and chat.messages[2].content == "5"
    assert (chat.tool_calls, chat.tool_errors, chat.forks) == (1, 0, 0)
    assert chat.messages[-1].content == "the answer is 5"


def test_every_call_of_a_turn_is_answered_once_in_order() -> None:
    """Requirement 15: one tool message per call id."""
    adder = Adder()
    turn = "\n".join([call('{"a": 1}'), call('{"a": 2}'), call('{"a": 3}')])
    chat = play(harness_named("tool_loop"), [turn, call('{"a": 4}'), "done"], adder.tools)
    answers = [m for m in chat.messages if m.role == "tool"]
    assert [m.content for m in answers] == ["1", "2", "3", "4"]
    calls = [c.id for m in chat.messages for c in m.tool_calls]
    assert [m.tool_call_id for m in answers] == calls and len(set(calls)) == 4


@pytest.mark.parametrize(
    ("arguments", "error"),
    [('{"a": ', True), ("[1, 2]", True), ('"x"', True), ("7", True), ('""', False)],
)
def test_bad_arguments_become_that_calls_answer_and_the_rollout_goes_on(
    arguments: str, error: bool
) -> None:
    """B098: the tool does not run on them; empty text means no arguments."""
    adder = Adder()
    chat = play(harness_named("tool_loop"), [call(arguments), "done"], adder.tools)
    answer = chat.messages[2]
    assert answer.role == "tool" and answer.tool_call_id == chat.messages[1].tool_calls[0].id
    assert ("error" in answer.content) is error
    assert adder.ran == ([] if error else [(0, 0)])
    assert (chat.tool_calls, chat.tool_errors) == (1, int(error))
    assert chat.messages[-1].content == "done"


def test_an_unknown_tool_is_answered_with_the_known_ones() -> None:
    chat = play(harness_named("tool_loop"), [call("{}", "adds"), "done"], Adder().tools)
    assert "no tool `adds`" in chat.messages[2].content and "`add`" in chat.messages[2].content
    assert chat.tool_errors == 1


def test_a_tool_that_is_out_of_order_ends_the_rollout() -> None:
    with pytest.raises(ToolError, match="the service is down"):
        play(
            harness_named("tool_loop"),
            [call("{}"), "done"],
            Adder(ToolError("the service is down")).tools,
        )


def test_an_exception_of_a_tool_is_its_answer() -> None:
    fails = Adder(RuntimeError("no route"))
    chat = play(harness_named("tool_loop"), [call("{}"), "done"], fails.tools)
    assert "no route" in chat.messages[2].content and chat.tool_errors == 1


def test_half_a_call_is_never_run() -> None:
    """B020: a reply cut in the middle of its JSON."""
    adder = Adder()
    chat = play(harness_named("tool_loop"), [call('{"a": 1}')], adder.tools, max_new_tokens=20)
    assert chat.truncated and adder.ran == [] and roles(chat) == ["user", "assistant"]


def test_a_model_that_never_stops_calling_meets_the_turn_limit() -> None:
    replies = [call("{}")] * 5
    with pytest.raises(LimitExceeded, match="turn limit: 3 turns"):
        play(harness_named("tool_loop"), replies, Adder().tools, max_turns=3)


# ----------------------------------------------------------------------- environments


@dataclass
class Countdown:
    """Counts down once per reply; pays 1 per step."""

    steps: int
    fail: str = ""
    seed: int = -1
    closed: int = 0

    def reset(self, task: Task, seed: int) -> Observation:
        self.seed = seed
        if self.fail == "reset":
            raise RuntimeError("no board")
        return Observation(messages=(Message(role="user", content=f"{self.steps} left"),))

    def step(self, message: Message) -> Observation:
        if self.fail == "step":
            raise RuntimeError("no move")
        self.steps -= 1
        new = (Message(role="user", content=f"{self.steps} left"),)
        return Observation(messages=new, done=self.steps == 0, reward=1.0)

    def close(self) -> None:
        self.closed += 1


def test_an_environment_speaks_first_and_says_when_to_stop() -> None:
    world = Countdown(3)
    chat = play(environment_loop(lambda task: world), ["a", "b", "c"], template=CHATML)
    assert roles(chat) == ["user", "user", "assistant"] + ["user", "assistant"] * 2
    assert chat.info == {"environment_rewards": [1.0, 1.0, 1.0], "environment_reward": 3.0}
    assert (world.seed, world.closed) == (11, 1)


def test_a_step_that_hangs_blocks_neither_the_loop_nor_the_exit() -> None:
    class Stuck(Countdown):
        def step(self, message: Message) -> Observation:
            threading.Event().wait()
            raise AssertionError("unreachable")

    world = Stuck(3)

    async def bounded(task: Task, chat: Chat, tools: Tools, limits: Limits) -> None:
        await asyncio.wait_for(environment_loop(lambda task: world)(task, chat, tools, limits), 0.1)

    with pytest.raises(TimeoutError):
        play(bounded, ["a"], template=CHATML)
    assert world.closed == 1


def test_an_environment_is_closed_however_it_ends() -> None:
    for fail in ("reset", "step"):
        world = Countdown(3, fail=fail)
        with pytest.raises(TaskError, match=f"{fail}.*no (board|move)"):
            play(environment_loop(lambda task, world=world: world), ["a"], template=CHATML)
        assert world.closed == 1
    cut = Countdown(3)
    chat = play(environment_loop(lambda task: cut), ["abcd"], template=CHATML, max_new_tokens=2)
    assert chat.truncated and chat.ended is None and cut.closed == 1
    limited = Countdown(3)
    with pytest.raises(LimitExceeded):
        play(environment_loop(lambda task: limited), ["a"], template=CHATML, max_turns=1)
    assert limited.closed == 1
