"""Calls: whatever the model writes, the rollout gets a text and goes on."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from typing import Any

import pytest

from treadle.errors import ConfigError, ToolError
from treadle.tools import Tool, ToolResult, Tools, import_object, load_tools, tool

RAN: list[Any] = []


@tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    RAN.append((a, b))
    return a + b


@tool
def nothing() -> None:
    """Do nothing."""


@tool
async def double(x: float) -> dict[str, float]:
    """Double it."""
    await asyncio.sleep(0)
    return {"doubled": 2 * x}


@tool
def fail(message: str = "") -> str:
    """Fail."""
    raise ValueError(message)


def call(each: Tool | Tools, *arguments: str) -> ToolResult:
    return asyncio.run(each.call(*arguments))  # type: ignore[arg-type]


def test_a_call_by_hand() -> None:
    assert call(add, '{"a": 2, "b": 3}') == ToolResult(text="5")
    assert call(double, '{"x": 2}') == ToolResult(text='{"doubled": 4.0}')
    assert call(nothing, "") == ToolResult(text="null")


@pytest.mark.parametrize("arguments", ['{"a": ', "[1,2]", '"x"', "7", "", '{"a": 1, "b": "2"}'])
def test_bad_arguments_are_an_error_text_and_the_tool_does_not_run(arguments: str) -> None:
    """B098."""
    RAN.clear()
    result = call(add, arguments)
    assert result.is_error and result.kind in ("malformed", "arguments")
    assert result.text.startswith("error: add was not run: ")
    assert RAN == []


def test_an_empty_string_means_no_arguments() -> None:
    """B098."""
    assert not call(nothing, "").is_error
    assert not call(nothing, "{}").is_error


def test_a_tool_that_raises_is_an_error_text() -> None:
    result = call(fail, '{"message": "no such row"}')
    assert result == ToolResult(
        text="error: fail raised ValueError: no such row", is_error=True, kind="raised"
    )
    assert call(fail, "").text == "error: fail raised ValueError"

    async def leave() -> None:
        raise SystemExit(3)

    def leave_too() -> None:
        raise SystemExit(3)

    async def leave_in_a_task() -> None:
        await asyncio.create_task(leave())

    async def close() -> None:
        raise GeneratorExit

    assert call(tool(close), "").text == "error: close raised GeneratorExit"
    assert call(tool(leave), "").text == "error: leave raised SystemExit: 3"
    assert call(tool(leave_too), "").text == "error: leave_too raised SystemExit: 3"
    said = call(tool(leave_in_a_task), "").text
    assert said == "error: leave_in_a_task raised RuntimeError: SystemExit: 3"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_tool_error_is_not_an_answer_to_the_model(asynchronous: bool) -> None:
    def lost() -> None:
        raise ToolError("the database is gone")

    async def lost_too() -> None:
        raise ToolError("the database is gone")

    with pytest.raises(ToolError, match="the database is gone"):
        call(tool(lost_too if asynchronous else lost), "")


def test_a_tool_of_an_unknown_name_is_an_error_text() -> None:
    tools = Tools([add, double])
    assert call(tools, "ad", "{}").text == "error: there is no tool `ad` (did you mean `add`?)"
    assert call(tools, "ad", "{}").kind == "unknown"
    assert call(Tools(), "x", "").is_error
    assert call(tools, "add", '{"a": 1, "b": 1}').text == "2"
    assert [s["function"]["name"] for s in tools.schemas] == ["add", "double"]
    with pytest.raises(ConfigError, match="two tools are named `add`"):
        Tools([add, add])


def test_a_long_result_is_cut_and_says_so() -> None:
    def much() -> str:
        return "x" * 20_000

    text = call(tool(much), "").text
    assert text.endswith("\n[truncated: 20,000 characters in all]")
    assert len(text) < 8_300


def test_results_that_are_no_text_become_json_or_their_description() -> None:
    def odd() -> Any:
        return {1}

    def accents() -> list[str]:
        return ["\u00e9"]

    assert call(tool(odd), "").text == "{1}"
    assert call(tool(accents), "").text == '["\u00e9"]'


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_cannot_be_put_into_words_is_an_error_text_at_once(asynchronous: bool) -> None:
    def wordless() -> None:
        raise Unspeakable

    def result() -> Any:
        return type("Odd", (), {"__str__": lambda self: 1 / 0})()

    def nested() -> Any:
        value: list[Any] = []
        for _ in range(100_000):
            value = [value]
        return value

    def made(fn: Any) -> Tool:
        async def later() -> Any:
            return fn()

        return tool(later if asynchronous else fn, name=fn.__name__)

    texts = {
        wordless: "raised Unspeakable: (its text cannot be made: RuntimeError)",
        result: "raised ZeroDivisionError: division by zero",
        nested: "raised RecursionError",
    }
    for fn, text in texts.items():
        answer = call(made(fn), "")
        assert answer.kind == "raised"
        assert answer.text.startswith(f"error: {fn.__name__} {text}")


def test_a_result_that_takes_long_to_become_text_meets_the_limit() -> None:
    release = threading.Event()

    def slow() -> Any:
        return type("Slow", (), {"__str__": lambda self: str(release.wait(30))})()

    assert call(tool(slow, limit_s=0.05), "").kind == "timeout"
    release.set()


def test_a_tool_that_hangs_times_out_while_others_go_on() -> None:
    release = threading.Event()

    def hang() -> str:
        release.wait(30)
        return "late"

    slow = tool(hang, limit_s=0.05)

    async def both() -> list[ToolResult]:
        return await asyncio.gather(
            slow.call(""), *(add.call('{"a": 1, "b": 1}') for _ in range(20))
        )

    results = asyncio.run(both())
    assert results[0].kind == "timeout"
    assert results[0].text == "error: hang did not finish within 0.05 s"
    assert {r.text for r in results[1:]} == {"2"}
    assert slow.num_stuck == 1
    release.set()
    wait_until(lambda: slow.num_stuck == 0)


def test_an_async_tool_that_hangs_is_cancelled_at_its_limit() -> None:
    ended = []

    async def hang() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(True)

    async def run() -> ToolResult:
        result = await tool(hang, limit_s=0.05).call("")
        await asyncio.sleep(0)
        return result

    assert asyncio.run(run()).kind == "timeout"
    assert ended == [True]


def test_stuck_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.tools.functions.MAX_STUCK", 3)
    release = threading.Event()

    def hang() -> None:
        release.wait(30)

    slow = tool(hang, limit_s=0.01)
    for _ in range(3):
        assert call(slow, "").kind == "timeout"
    with pytest.raises(ToolError, match="3 earlier calls still run after their limit"):
        call(slow, "")
    release.set()
    wait_until(lambda: slow.num_stuck == 0)
    assert call(slow, "").text == "null"


def test_a_cancelled_rollout_cancels_its_call() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(30)

    slow = tool(hang)

    async def run() -> None:
        task = asyncio.create_task(slow.call(""))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert slow.num_stuck == 1
    release.set()
    wait_until(lambda: slow.num_stuck == 0)


def test_a_tools_own_timeout_error_is_told_from_the_limit() -> None:
    def impatient() -> None:
        raise TimeoutError("the server")

    assert call(tool(impatient), "").kind == "raised"


def test_context_variables_reach_a_tool() -> None:
    who = contextvars.ContextVar("who", default="nobody")

    def ask() -> str:
        return who.get()

    async def run() -> ToolResult:
        who.set("me")
        return await tool(ask).call("")

    assert asyncio.run(run()).text == "me"


def test_tools_are_loaded_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tools_for_test.py").write_text(
        "from treadle.tools import tool\n"
        "def up(text: str) -> str:\n    return text.upper()\n"
        "named = tool(up, name='upper')\n"
        "number = 3\n"
        "def bad(x): pass\n"
    )
    monkeypatch.chdir(tmp_path)
    tools = load_tools(("my_tools_for_test:up", "my_tools_for_test:named"), limit_s=2.0)
    assert [t.name for t in tools] == ["up", "upper"]
    assert {t.limit_s for t in tools} == {2.0}
    assert call(tools, "upper", '{"text": "a"}').text == "A"
    with pytest.raises(ConfigError, match=r"`rollout.tools.0`: `my_tools_for_test:number` is not"):
        load_tools(("my_tools_for_test:number",))
    with pytest.raises(ConfigError, match="parameter `x` has no annotation"):
        load_tools(("my_tools_for_test:bad",))
    with pytest.raises(ConfigError, match=r"has no `upp`\nhint: did you mean `up`"):
        import_object("my_tools_for_test:upp", "k")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "`k` is `nothing`, which is not of the form module:function"),
        ("a:", "not of the form"),
        ("no_such_module_here:f", "importing `no_such_module_here` failed: ModuleNotFoundError"),
        ("treadle.nope:f", "importing `treadle.nope` failed"),
    ],
)
def test_what_cannot_be_imported_is_a_config_error(spec: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        import_object(spec, "k")
    assert message in str(caught.value)


def wait_until(done: Any) -> None:
    for _ in range(1_000):
        if done():
            return
        time.sleep(0.01)
    raise AssertionError("waited 10 s in vain")
