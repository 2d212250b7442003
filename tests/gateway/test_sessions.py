"""What a session makes of the conversations it is told: spliced, forked, drawn again, replayed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.bench import CALL, TOOL, Bench, bench, play
from tests.render.templates import CHATML, THINKING
from treadle.types import Status, StopReason


def said(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def trained(b: Bench) -> list[tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]]:
    return [(n.ids, n.logprobs, n.versions) for n in b.sampled if any(n.trained)]


def logged(b: Bench) -> list[tuple[tuple[int, ...], tuple[float, ...], tuple[int, ...]]]:
    return [(c.ids, c.logprobs, c.versions) for _, c in b.sampler.log]


# ----------------------------------------------------------------------- history


def test_a_conversation_is_one_branch_whose_tokens_are_the_samplers() -> None:
    async def main() -> None:
        async with bench(["one", "two", "three"]) as b:
            history: list[Any] = ["x"]
            for word in ("one", "two", "three"):
                assert (await b.chat(*history))["content"] == word
                history += [said(word), f"after {word}"]
            assert len(b.branches()) == 1 and trained(b) == logged(b)
            assert b.session.counts["conversations"] == 1

    play(main())


def test_a_rewritten_reply_starts_a_branch_from_the_last_reply_that_holds() -> None:
    async def main() -> None:
        async with bench(["one", "two", "three", "four"]) as b:
            await b.chat("x")
            await b.chat("x", said("one"), "y")
            await b.chat("x", said("one"), "y", said("TWO, changed"), "z")
            first, second, third = b.branches()[0], b.branches()[1], b.sampler.log[2][0]
            prefix = (*b.sampler.log[0][0], *b.sampler.log[0][1].ids)
            assert len(b.branches()) == 2
            assert first[: len(prefix)] == second[: len(prefix)] == third[: len(prefix)] == prefix
            assert b.session.counts["rewrites"] == 1
            assert trained(b) == logged(b), "no token is trained twice, none is lost"
            await b.chat("x", said("one"), "y", said("TWO, changed"), "z", said("three"), "w")
            assert len(b.branches()) == 2, "the rewritten history is a history like any other"
            assert b.session.counts["rewrites"] == 1

    play(main())


def test_dropped_messages_and_compaction_start_a_new_root() -> None:
    async def main() -> None:
        async with bench(["one", "two", "three"]) as b:
            await b.chat("x")
            await b.chat("x", said("one"), "y")
            await b.chat("summary of x and y", "go on")
            assert len(b.branches()) == 2
            assert b.sampler.log[2][0] == b.renderer.template.reference_ids(
                [n.message for n in b.recorder.nodes if n.message][4:6], generation=True
            )
            assert b.session.counts["conversations"] == 2

    play(main())


def test_a_sub_agent_with_another_system_prompt_runs_beside_its_parent() -> None:
    async def main() -> None:
        async with bench(["delegate", "found it", "thanks"]) as b:
            boss, worker = ({"role": "system", "content": c} for c in ("boss", "worker"))
            await b.chat(boss, "x")
            await b.chat(worker, "look")
            await b.chat(boss, "x", said("delegate"), "found it")
            assert len(b.branches()) == 2 and b.session.counts["rewrites"] == 0
            assert (
                b.recorder.ids(b.sampled[2].id)[: len(b.sampler.log[0][0])] == (b.sampler.log[0][0])
            )

    play(main())


def test_other_tools_are_another_prompt() -> None:
    async def main() -> None:
        async with bench(["one", "two"]) as b:
            await b.chat("x")
            await b.chat("x", said("one"), "y", tools=[TOOL])
            assert len(b.branches()) == 2

    play(main())


@pytest.mark.parametrize(
    "echo",
    [
        said("see", tool_calls=[("other", '{"a":1}')]),
        said([{"type": "text", "text": "  see "}], tool_calls=[("other", '{ "a" : 1.0 }')]),
        said("see", tool_calls=[("same", '{"a": 1}')], reasoning_content=None),
    ],
)
def test_what_a_client_does_to_layout_is_no_rewrite(echo: dict[str, Any]) -> None:
    """Ids, white space around, JSON layout, list content: the turn says the same."""

    async def main() -> None:
        async with bench([f"see{CALL}", "done"]) as b:
            reply = await b.chat("x", tools=[TOOL])
            call = reply["tool_calls"][0]
            name, arguments = echo["tool_calls"][0]
            call_id = call["id"] if name == "same" else "call_other"
            turn = echo | {
                "tool_calls": [
                    {
                        "id": call_id,
                        "type": "function",
                        "function": {"name": "add", "arguments": arguments},
                    }
                ]
            }
            answer = {"role": "tool", "tool_call_id": call_id, "content": "5"}
            await b.chat("x", turn, answer, tools=[TOOL])
            assert len(b.branches()) == 1 and b.session.counts["rewrites"] == 0

    play(main())


@pytest.mark.parametrize(
    "arguments", ['{"a": 2}', '{"a": 1, "b": 2}', '{"a": "1"}', '{"a": true}', "", "{"]
)
def test_other_arguments_of_a_call_are_a_rewrite(arguments: str) -> None:
    async def main() -> None:
        async with bench([CALL, "done"]) as b:
            call = (await b.chat("x", tools=[TOOL]))["tool_calls"][0]
            call["function"]["arguments"] = arguments
            answer = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
            status, _ = await b.post(
                "chat/completions",
                {
                    "messages": [
                        {"role": "user", "content": "x"}, said(None, tool_calls=[call]), answer
                    ],
                    "tools": [TOOL],
                },
            )  # fmt: skip
            assert status == 200 and b.session.counts["rewrites"] == 1

    play(main())


@pytest.mark.parametrize("dialect", ["chat/completions", "messages"])
@pytest.mark.parametrize("written", ["as it came", "escaped", "raw escape in the text"])
@pytest.mark.parametrize("in_text", [False, True])
def test_half_a_surrogate_pair_in_a_call_comes_back_as_what_it_was(
    dialect: str, written: str, in_text: bool
) -> None:
    """What the client reads is text, and however it writes the rest, it is the same call."""
    arguments = '{"a\\udc00": "x\\ud800y"}'
    body = json.dumps(arguments) if in_text else arguments
    drawn = f'<tool_call>{{"name": "add", "arguments": {body}}}</tool_call>'

    async def main() -> None:
        async with bench([drawn, "done"]) as b:
            asked = {"role": "user", "content": "x"}
            tools: list[Any] = [TOOL]
            if dialect == "messages":
                tools = [{"name": "add", "input_schema": TOOL["function"]["parameters"]}]  # pyright: ignore
                tools[0]["description"] = "Adds."
            ask = {"max_tokens": 99, "tools": tools, "messages": [asked]}
            status, reply = await b.post(dialect, ask)
            assert status == 200
            if dialect == "messages":
                (block,) = reply["content"]
                json.dumps(block["input"], ensure_ascii=False).encode()
                if written != "as it came":
                    block["input"] = json.loads(arguments)
                turn = {"role": "assistant", "content": [block]}
                result = {"type": "tool_result", "tool_use_id": block["id"], "content": "5"}
                answer = {"role": "user", "content": [result]}
            else:
                turn = reply["choices"][0]["message"]
                (call,) = turn["tool_calls"]
                call["function"]["arguments"].encode()
                if written == "escaped":
                    call["function"]["arguments"] = json.dumps(json.loads(arguments))
                elif written != "as it came":
                    call["function"]["arguments"] = '{"a\udc00": "x\ud800y"}'
                answer = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
            status, reply = await b.post(dialect, ask | {"messages": [asked, turn, answer]})
            assert status == 200, reply
            assert b.session.counts["rewrites"] == 0 and len(b.branches()) == 1

    play(main())


def test_thinking_need_not_come_back_but_other_thinking_is_a_rewrite() -> None:
    async def main() -> None:
        async with bench(["<think>hm</think>yes", "a", "b"], template=CHATML) as b:
            reply = await b.chat("x")
            assert (reply["content"], reply["reasoning_content"]) == ("yes", "hm")
            await b.chat("x", said("yes"), "y")
            assert b.session.counts["rewrites"] == 0
            await b.chat("x", said("yes", reasoning_content="something else"), "y")
            assert b.session.counts["rewrites"] == 1

    play(main())


def test_a_template_that_drops_thinking_forks_and_goes_on() -> None:
    async def main() -> None:
        async with bench(["<think>hm</think>yes", "two", "three"], template=THINKING) as b:
            await b.chat("x")
            await b.chat("x", said("yes"), "y")
            await b.chat("x", said("yes"), "y", said("two"), "z")
            assert b.recorder.forks >= 1
            assert trained(b) == logged(b)

    play(main())


# ----------------------------------------------------------------------- samples and resends


def test_equal_requests_are_independent_samples_of_one_prompt() -> None:
    async def main() -> None:
        async with bench(["one", "two", "three"]) as b:
            texts = [(await b.chat("x"))["content"] for _ in range(3)]
            assert texts == ["one", "two", "three"]
            assert len({params.seed for _, _, params in b.sampler.calls}) == 3
            prompts = [n for n in b.recorder.nodes if n.ids and n not in b.sampled]
            assert len(prompts) == 1, "the prompt is recorded once"
            assert len(b.branches()) == 3

    play(main())


def test_each_of_equal_texts_is_continued_from_the_latest_or_by_its_call_ids() -> None:
    async def main() -> None:
        async with bench([CALL, CALL, "one", "two"]) as b:
            calls = [(await b.chat("x", tools=[TOOL]))["tool_calls"] for _ in range(2)]
            assert calls[0][0]["id"] != calls[1][0]["id"]
            for given in calls:
                answer = {"role": "tool", "tool_call_id": given[0]["id"], "content": "5"}
                await b.chat("x", said(None, tool_calls=given), answer, tools=[TOOL])
            assert len(b.branches()) == 2, "each call's answer follows its own sample"

    play(main())


def test_parallel_requests_run_at_once_on_sessions_of_their_own() -> None:
    async def main() -> None:
        async with bench(lambda session, turn: f"{session}/{turn}") as b:
            replies = await asyncio.gather(*(b.chat(f"question {i}") for i in range(12)))
            assert len(replies) == 12 and len(b.branches()) == 12
            assert 1 < len(b.sampler.open_sessions) <= 12
            await b.gateway.sessions.close(b.session)
            assert not b.sampler.open_sessions

    play(main())


KEY = {"idempotency-key": "k1"}


def test_a_request_with_the_same_idempotency_key_is_answered_once() -> None:
    async def main() -> None:
        async with bench(["one", "two"]) as b:
            first = await b.post("chat/completions", BODY, headers=KEY)
            again = await b.post("chat/completions", BODY, headers=KEY)
            assert first == again and b.recorder.turns == 1
            other = {"messages": [{"role": "user", "content": "other"}]}
            status, reply = await b.post("chat/completions", other, headers=KEY)
            assert status == 400 and reply["error"]["code"] == "idempotency_key_reused"
            once_more = {"idempotency-key": "k2"}
            both = await asyncio.gather(
                b.post("chat/completions", BODY, headers=once_more),
                b.post("chat/completions", BODY, headers=once_more),
            )
            assert both[0] == both[1] and b.recorder.turns == 2, "joined while in flight"

    play(main())


BODY = {"messages": [{"role": "user", "content": "x"}]}


def test_a_retry_whose_first_answer_arrived_is_a_sample_of_its_own() -> None:
    async def main() -> None:
        async with bench(["one", "two"]) as b:
            assert (await b.chat("x"))["content"] == "one"
            retried = await b.chat("x", headers={"x-stainless-retry-count": "1"})
            assert retried["content"] == "two"

    play(main())


def test_a_retry_whose_first_answer_was_lost_gets_that_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first reply is cut off on its way out; the sampler is not asked again."""

    async def main() -> None:
        async with bench(["one", "two"]) as b:
            whole = b.gateway._send
            cuts = iter([True])

            async def cut(request: Any, status: int, document: Any, headers: Any) -> Any:
                if next(cuts, False):
                    request.transport.abort()
                    raise ConnectionResetError
                return await whole(request, status, document, headers)

            monkeypatch.setattr(b.gateway, "_send", cut)
            with pytest.raises(Exception, match=r"disconnected|reset"):
                await b.post("chat/completions", BODY)
            retry = {"x-stainless-retry-count": "1"}
            status, reply = await b.post("chat/completions", BODY, headers=retry)
            assert status == 200 and reply["choices"][0]["message"]["content"] == "one"
            assert b.recorder.turns == 1 and b.session.counts["replays"] == 1
            await b.gateway.sessions.close(b.session)
            assert trained(b) == logged(b), "it arrived in the end, so it is trained"

    play(main())


def test_a_reply_that_nobody_ever_received_is_kept_and_not_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with bench(["one", "two"]) as b:

            async def cut(request: Any, *rest: Any) -> Any:
                request.transport.abort()
                raise ConnectionResetError

            with monkeypatch.context() as patch:
                patch.setattr(b.gateway, "_send", cut)
                with pytest.raises(Exception, match=r"disconnected|reset"):
                    await b.post("chat/completions", BODY)
            assert (await b.chat("x"))["content"] == "two", "no retry: a sample of its own"
            await b.gateway.sessions.close(b.session)
            assert [any(n.trained) for n in b.sampled] == [False, True]
            assert b.session.info()["undelivered"] == 1

    play(main())


# ----------------------------------------------------------------------- parameters


def test_the_runs_sampling_parameters_win_and_both_are_recorded() -> None:
    """B189: temperature, top_p and seed are the run's; a smaller length bound is honoured."""

    async def main() -> None:
        async with bench(["one", "two"], max_new_tokens=20) as b:
            await b.chat("x", temperature=0, top_p=0.1, seed=7, max_tokens=9999)
            await b.chat("x", max_completion_tokens=2)
            first, second = (params for _, _, params in b.sampler.calls)
            assert (first.temperature, first.top_p, first.max_new_tokens) == (0.8, 1.0, 20)
            assert second.max_new_tokens == 2
            wished = b.session.info()["client_sampling"]
            assert wished[0] == {"temperature": 0, "top_p": 0.1, "seed": 7, "max_tokens": 9999}

    play(main())


def test_what_cannot_be_promised_is_told_in_a_header() -> None:
    async def main() -> None:
        async with bench(["one"]) as b:
            body = BODY | {"tools": [TOOL], "tool_choice": "required"}
            async with b.http.post(f"{b.base_url}/chat/completions", json=body) as reply:
                assert reply.status == 200
                assert reply.headers["x-treadle-ignored"] == "tool_choice"
            assert b.session.info()["ignored"] == {"tool_choice": 1}

    play(main())


def test_several_samples_in_one_request_are_refused_with_the_way_out() -> None:
    async def main() -> None:
        async with bench([]) as b:
            status, reply = await b.post("chat/completions", BODY | {"n": 2})
            assert status == 400 and "send the request again" in reply["error"]["message"]
            assert not b.sampler.calls

    play(main())


def test_stop_strings_end_the_turn_and_are_not_shown() -> None:
    async def main() -> None:
        ended: dict[str, Any] = {}

        def script(session: str, turn: int) -> Any:
            from treadle.types import Completion

            ids = tuple(ended["encode"]("say this END"))
            return Completion(
                ids=ids,
                logprobs=(-0.5,) * len(ids),
                versions=(3,) * len(ids),
                stop_reason=StopReason.STOP_STRING,
            )

        async with bench(script) as b:
            ended["encode"] = b.sampler.encode
            status, reply = await b.post("chat/completions", BODY | {"stop": ["END", "STOP"]})
            choice = reply["choices"][0]
            assert (status, choice["message"]["content"]) == (200, "say this ")
            assert choice["finish_reason"] == "stop"
            assert b.sampler.calls[0][2].stop == ("END", "STOP")
            ask = {"max_tokens": 50, "stop_sequences": ["END"], **BODY}
            _, reply = await b.post("messages", ask)
            assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")
            await b.chat("x", said("say this"), "y")
            assert b.session.counts["rewrites"] == 0, "the cut text is what the client knows"
            assert trained(b) == logged(b), "every sampled token is trained, the stop's too"

    play(main())


DEEP = '{"a": ' * 70 + "1" + "}" * 70


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "add", "arguments": {"a": </tool_call>',
        "<tool_call>add(1)</tool_call>",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1e999}"}</tool_call>',
        f'<tool_call>{{"name": "add", "arguments": {"[" * 70}{"]" * 70}}}</tool_call>',
        f'<tool_call>{{"name": "add", "arguments": {DEEP}}}</tool_call>',
    ],
)
def test_a_call_that_does_not_parse_is_text(text: str) -> None:
    async def main() -> None:
        async with bench([f"so: {text}"] * 2, max_new_tokens=2000) as b:
            reply = await b.chat("x", tools=[TOOL])
            assert reply["content"] == f"so: {text}" and "tool_calls" not in reply
            ask = {"max_tokens": 2000, "tools": [{"name": "add", "input_schema": {}}], **BODY}
            status, answer = await b.post("messages", ask)
            assert status == 200 and answer["content"][0]["text"] == f"so: {text}"
            assert answer["stop_reason"] == "end_turn"

    play(main())


def test_half_a_call_is_text_and_ends_by_length() -> None:
    async def main() -> None:
        async with bench([CALL], max_new_tokens=len(CALL) // 2) as b:
            _, reply = await b.post("chat/completions", BODY | {"tools": [TOOL]})
            assert reply["choices"][0]["finish_reason"] == "length"
            assert "tool_calls" not in reply["choices"][0]["message"]

    play(main())


def test_tool_choice_none_leaves_calls_as_text() -> None:
    async def main() -> None:
        async with bench([CALL]) as b:
            reply = await b.chat("x", tools=[TOOL], tool_choice="none")
            assert reply["content"] == CALL and "tool_calls" not in reply

    play(main())


# ----------------------------------------------------------------------- limits


def test_a_context_overflow_ends_the_trajectory_only_if_nothing_follows() -> None:
    async def main() -> None:
        for compacts in (True, False):
            async with bench(["one", "two"], max_context=120) as b:
                await b.chat("x")
                long = {"messages": [{"role": "user", "content": "x" * 300}]}
                status, reply = await b.post("chat/completions", long)
                assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
                if compacts:
                    await b.chat("shorter")
                await b.gateway.sessions.close(b.session)
                assert b.recorder.ended is (None if compacts else Status.TRUNCATED)

    play(main())


def test_the_turn_limit_refuses_without_a_retry_and_truncates() -> None:
    async def main() -> None:
        async with bench(["one", "two"], max_turns=1) as b:
            await b.chat("x")
            status, reply = await b.post("chat/completions", BODY)
            assert (status, reply["error"]["code"]) == (400, "limit_reached")
            assert b.recorder.ended is Status.TRUNCATED

    play(main())


def test_a_long_session_is_stored_in_linear_size() -> None:
    """B191: 60 turns, and the nodes hold each token once."""

    async def main() -> None:
        async with bench(lambda s, t: f"reply {t}", max_turns=100, max_context=10**6) as b:
            history: list[Any] = ["x" * 100]
            for turn in range(60):
                await b.chat(*history)
                history += [said(f"reply {turn}"), "y" * 100]
            last_prompt, last = b.sampler.log[-1]
            assert sum(len(n.ids) for n in b.recorder.nodes) == len(last_prompt) + len(last.ids)
            assert json.dumps(b.session.info())

    play(main())
