"""The real client packages against the gateway: what they send, what they read back."""

from __future__ import annotations

import itertools
import json
from typing import Any

import anthropic
import openai
import pytest

from tests.gateway.bench import CALL, TOOL, Bench, bench, play

FLAT = {"type": "function", **TOOL["function"]}
THEIRS = {
    "name": "add",
    "description": "Adds.",
    "input_schema": TOOL["function"]["parameters"],
}


def openai_client(b: Bench, **more: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=b.base_url, api_key="anything", **more)


def anthropic_client(b: Bench, **more: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=b.base_url, api_key="anything", **more)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def spliced(b: Bench) -> bool:
    """Every prompt after the first starts with all tokens of the turn before it."""
    log = b.sampler.log
    return all(
        later[0][: len(p) + len(c.ids)] == (*p, *c.ids) for (p, c), later in itertools.pairwise(log)
    )


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat_tool_loop_is_one_branch_of_spliced_ids(stream: bool) -> None:
    async def main() -> None:
        async with bench([f"let me see{CALL}", CALL, "it is 5"]) as b, openai_client(b) as client:
            messages: list[Any] = [user("2+3?")]
            kwargs: dict[str, Any] = {"model": "m", "tools": [TOOL]}
            for turn in range(3):
                if stream:
                    chunks = [
                        c
                        async for c in await client.chat.completions.create(
                            messages=messages, stream=True,
                            stream_options={"include_usage": True}, **kwargs,
                        )
                    ]  # fmt: skip
                    content = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                    deltas = [c.choices[0].delta for c in chunks if c.choices]
                    calls = [k for d in deltas for k in d.tool_calls or []]
                    reason = [c.choices[0].finish_reason for c in chunks if c.choices][-1]
                    usage = chunks[-1].usage
                else:
                    reply = await client.chat.completions.create(messages=messages, **kwargs)
                    message = reply.choices[0].message
                    content, calls = message.content, list(message.tool_calls or [])
                    reason, usage = reply.choices[0].finish_reason, reply.usage
                prompt, completion = b.sampler.log[turn]
                assert (usage.prompt_tokens, usage.completion_tokens) == (
                    len(prompt),
                    len(completion.ids),
                )
                assert reason == ("tool_calls" if turn < 2 else "stop")
                if not calls:
                    assert content == "it is 5"
                    break
                assert content == ("let me see" if turn == 0 else ("" if stream else None))
                assert json.loads(calls[0].function.arguments) == {"a": 1}
                messages.append(
                    {
                        "role": "assistant",
                        "content": content,
                        "tool_calls": [
                            {
                                "id": c.id,
                                "type": "function",
                                "function": {
                                    "name": c.function.name,
                                    "arguments": c.function.arguments,
                                },
                            }
                            for c in calls
                        ],
                    }
                )
                messages.append({"role": "tool", "tool_call_id": calls[0].id, "content": "5"})
            assert len(b.branches()) == 1 and spliced(b)
            assert b.session.counts["rewrites"] == 0 and b.recorder.turns == 3

    play(main())


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tool_loop_is_one_branch_of_spliced_ids(stream: bool) -> None:
    async def main() -> None:
        async with bench([f"let me see{CALL}", "it is 5"]) as b, anthropic_client(b) as client:
            kwargs: dict[str, Any] = {
                "model": "m", "max_tokens": 150, "tools": [THEIRS], "system": "be brief",
            }  # fmt: skip
            messages: list[Any] = [user("2+3?")]
            replies = []
            for _ in range(2):
                if stream:
                    async with client.messages.stream(messages=messages, **kwargs) as events:
                        async for _ in events:
                            pass
                        reply = await events.get_final_message()
                else:
                    reply = await client.messages.create(messages=messages, **kwargs)
                replies.append(reply)
                messages.append({"role": "assistant", "content": reply.content})
                messages.append(
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": block.id,
                                "content": [{"type": "text", "text": "5"}],
                            }
                            for block in reply.content
                            if block.type == "tool_use"
                        ],
                    }
                )
            assert [r.stop_reason for r in replies] == ["tool_use", "end_turn"]
            assert [c.type for c in replies[0].content] == ["text", "tool_use"]
            assert replies[0].content[1].input == {"a": 1}
            assert replies[1].content[0].text == "it is 5"
            for reply, (prompt, completion) in zip(replies, b.sampler.log, strict=True):
                assert reply.usage.input_tokens == len(prompt)
                assert reply.usage.output_tokens == len(completion.ids)
            assert len(b.branches()) == 1 and spliced(b)
            assert b.sampler.calls[0][2].max_new_tokens == 150
            count = await client.messages.count_tokens(
                model="m", messages=[user("2+3?")], tools=[THEIRS], system="be brief"
            )
            assert count.input_tokens == len(b.sampler.log[0][0])

    play(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_id", [False, True])
def test_openai_responses_tool_loop_is_one_branch_of_spliced_ids(stream: bool, by_id: bool) -> None:
    async def main() -> None:
        async with bench([f"let me see{CALL}", "it is 5"]) as b, openai_client(b) as client:
            kwargs: dict[str, Any] = {"model": "m", "tools": [FLAT], "instructions": "be brief"}

            async def ask(given: Any, **more: Any) -> Any:
                if not stream:
                    return await client.responses.create(input=given, **more, **kwargs)
                async with client.responses.stream(input=given, **more, **kwargs) as events:
                    async for _ in events:
                        pass
                    return await events.get_final_response()

            first = await ask("2+3?")
            assert first.status == "completed" and first.output_text == "let me see"
            call = first.output[-1]
            assert call.type == "function_call" and json.loads(call.arguments) == {"a": 1}
            answer = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
            if by_id:
                second = await ask([answer], previous_response_id=first.id)
            else:
                second = await ask([user("2+3?"), *first.output, answer])
            assert second.output_text == "it is 5"
            assert second.usage.input_tokens == len(b.sampler.log[1][0])
            assert second.usage.output_tokens == len(b.sampler.log[1][1].ids)
            assert len(b.branches()) == 1 and spliced(b)

    play(main())


@pytest.mark.parametrize("stream", [False, True])
def test_plain_completions_continue_their_own_text_by_ids(stream: bool) -> None:
    async def main() -> None:
        r_ids = {}

        def script(session: str, turn: int) -> Any:
            return r_ids["cut"] if turn == 0 else "fin"

        async with bench(script, max_new_tokens=4) as b, openai_client(b) as client:
            r_ids["cut"] = tuple(b.sampler.encode("abcdef"))[:4]
            text = "once"
            for turn in range(2):
                if stream:
                    parts = [
                        c
                        async for c in await client.completions.create(
                            model="m", prompt=text, stream=True
                        )
                    ]
                    said, reason = parts[0].choices[0].text, parts[-1].choices[0].finish_reason
                else:
                    reply = await client.completions.create(model="m", prompt=text, logprobs=1)
                    said, reason = reply.choices[0].text, reply.choices[0].finish_reason
                    assert reply.choices[0].logprobs.token_logprobs == list(
                        b.sampler.log[turn][1].logprobs
                    )
                assert reason == ("length" if turn == 0 else "stop")
                text += said + " and"
            assert spliced(b) and len(b.branches()) == 1
            await client.completions.create(model="m", prompt=text)
            assert len(b.branches()) == 2, "the text does not say the stop id, so it forks"

    play(main())


def test_models_and_health_answer() -> None:
    async def main() -> None:
        async with bench([]) as b, openai_client(b) as client:
            assert [m.id async for m in client.models.list()] == ["policy"]
            assert (await client.models.retrieve("gpt-x")).id == "gpt-x"
            async with b.http.get(f"{b.gateway.url}/health") as reply:
                assert (await reply.json())["sessions"] == 1

    play(main())


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_errors_reach_the_client_as_its_own_exceptions(dialect: str) -> None:
    """Context overflow in the provider's words; the sampler's failure as one to try again."""

    async def main() -> None:
        async with bench([RuntimeError("engine fell over")], max_context=60) as b:
            if dialect == "openai":
                async with openai_client(b, max_retries=0) as client:
                    with pytest.raises(openai.BadRequestError) as caught:
                        await client.chat.completions.create(model="m", messages=[user("x" * 400)])
                    assert caught.value.code == "context_length_exceeded"
                    assert "maximum context length is 60" in str(caught.value)
                    with pytest.raises(openai.InternalServerError, match="engine fell over"):
                        await client.chat.completions.create(model="m", messages=[user("x")])
            else:
                async with anthropic_client(b, max_retries=0) as client:
                    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                        await client.messages.create(
                            model="m", max_tokens=5, messages=[user("x" * 400)]
                        )
                    with pytest.raises(anthropic.APIStatusError, match="engine fell over") as e:
                        await client.messages.create(model="m", max_tokens=5, messages=[user("x")])
                    assert e.value.status_code == 503
            assert b.session.error is not None

    play(main())
