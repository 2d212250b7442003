"""One conversation recorded token by token, and what ends or refuses it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.render.templates import (
    ALL,
    CHATML,
    KEEPS_THINKING,
    OPENS_THINKING,
    THINKING,
    TOOLS,
    toy_tokenizer,
)
from treadle.errors import DataError, HarnessError, LimitExceeded, SamplerError
from treadle.harness import Chat, Limits
from treadle.render import Renderer
from treadle.testing import Reply, ScriptedSampler
from treadle.types import (
    Completion,
    Message,
    Node,
    Party,
    SamplingParams,
    Source,
    Status,
    StopReason,
    ToolCall,
)

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def user(text: str) -> Message:
    return Message(role="user", content=text)


def renderer(template: str = CHATML) -> Renderer:
    tokenizer = toy_tokenizer(template)
    return Renderer(tokenizer, [tokenizer.eos_token_id])


def encode(r: Renderer, text: str) -> tuple[int, ...]:
    return tuple(r.template.tokenizer.encode(text, add_special_tokens=False))


def sampler(r: Renderer, *replies: Reply) -> ScriptedSampler:
    return ScriptedSampler(
        script=replies, encode=lambda text: encode(r, text), stop_ids=r.stop_ids, version=3
    )


def run(
    r: Renderer,
    source: ScriptedSampler,
    talk: Callable[[Chat], Coroutine[Any, Any, None]],
    *,
    tools: bool = False,
    max_new_tokens: int = 200,
    **limits: float,
) -> Chat:
    """Open a session, let `talk` use its chat, and return the chat."""
    given: dict[str, Any] = {"max_turns": 8, "max_context": 4096, **limits}
    chat = Chat(
        source,
        r,
        session="s",
        sampling=lambda turn: SamplingParams(max_new_tokens=max_new_tokens, seed=turn),
        limits=Limits(**given),
        tools=[TOOL] if tools else [],
    )

    async def main() -> None:
        await source.open("s")
        await talk(chat)

    asyncio.run(main())
    return chat


def sampled(chat: Chat) -> list[Node]:
    return [n for n in chat.nodes if n.source is Source.SAMPLED]


def branches(chat: Chat) -> list[tuple[int, ...]]:
    """Token rows root..leaf, one per leaf."""
    parents = {n.parent for n in chat.nodes}
    rows = []
    for leaf in (n for n in chat.nodes if n.id not in parents):
        row, node = leaf.ids, leaf
        while node.parent is not None:
            node = chat.nodes[node.parent]
            row = node.ids + row
        rows.append(row)
    return rows


# ----------------------------------------------------------------------- recording


def test_sampled_ids_reach_the_record_and_the_next_prompt_unchanged() -> None:
    """B001: "hello" sampled as two tokens stays two tokens."""
    r = renderer(TOOLS)
    ids = (encode(r, "he")[0], encode(r, "llo")[0], *r.stop_ids)
    source = sampler(r, ids, "done")

    async def talk(chat: Chat) -> None:
        said = await chat.turn([user("hi")])
        assert said.content == "hello"
        await chat.turn([Message(role="tool", content="42", tool_call_id="call00000")])

    chat = run(r, source, talk, tools=True)
    first, second = (prompt for _, prompt, _ in source.calls)
    assert second[: len(first) + len(ids)] == first + ids
    node = sampled(chat)[0]
    assert node.ids == ids and node.trained == (True,) * 3 and node.versions == (3,) * 3
    assert node.logprobs == (-0.5, -0.51, -0.52) and node.entropies == (0.7,) * 3
    assert node.stop_reason is StopReason.EOS and node.message == chat.messages[1]


def test_observations_are_untrained_and_hold_every_new_message() -> None:
    r = renderer()

    async def talk(chat: Chat) -> None:
        await chat.turn([Message(role="system", content="rules"), user("hi")])
        await chat.turn([user("more")])

    chat = run(r, sampler(r, "a", "b"), talk)
    seen = [n for n in chat.nodes if n.source is Source.OBSERVATION]
    assert [n.message.role for n in seen if n.message] == ["system", "user", "user"]
    for node in seen:
        assert node.party is Party.ENVIRONMENT and not any(node.trained)
        assert all(math.isnan(x) for x in node.logprobs) and set(node.versions) <= {-1}
    assert [n.parent for n in chat.nodes] == [None, 0, 1, 2, 3]
    (row,) = branches(chat)
    assert (
        row == r.template.reference_ids(chat.messages[:4], generation=True) + sampled(chat)[1].ids
    )


def test_each_turn_has_parameters_of_its_own_and_all_are_sent() -> None:
    r = renderer()
    source = sampler(r, "a", "b")

    async def talk(chat: Chat) -> None:
        await chat.turn([user("x")])
        await chat.turn([user("y")])

    run(r, source, talk)
    assert [p.seed for _, _, p in source.calls] == [0, 1]


@pytest.mark.parametrize(
    "markers",
    ["", "{% generation %}", "{%- generation -%}"],
)
def test_the_trained_mask_needs_no_markers_in_the_template(markers: str) -> None:
    """B010: whatever the template says, exactly the sampled tokens are trained."""
    template = CHATML
    if markers:
        end = markers.replace("generation", "endgeneration")
        template = CHATML.replace("{{ '<|im_start|>' + m", f"{markers}{{{{ '<|im_start|>' + m")
        template = template.replace(
            "'<|im_end|>\\n' }}{% endfor", f"'<|im_end|>\\n' }}}}{end}{{% endfor"
        )
        assert template != CHATML
    r = renderer(template)

    async def talk(chat: Chat) -> None:
        await chat.turn([user("x")])
        await chat.turn([user("y")])

    source = sampler(r, "abc", "de")
    chat = run(r, source, talk)
    trained = [t for n in chat.nodes for i, t in zip(n.trained, n.ids, strict=True) if i]
    assert len(trained) == 4 + 3
    assert sum(len(n.ids) for n in chat.nodes) > 2 * len(trained)


# ----------------------------------------------------------------------- forks


def test_a_template_that_drops_thinking_forks_and_trains_nothing_twice() -> None:
    """B003"""
    r = renderer(THINKING)
    source = sampler(r, "<think>\nhm\n</think>\n\none", "<think>\nhm\n</think>\n\ntwo")

    async def talk(chat: Chat) -> None:
        await chat.turn([user("x")])
        await chat.turn([user("y")])

    chat = run(r, source, talk)
    assert chat.forks == 1
    first, second = branches(chat)
    assert first == source.calls[0][1] + sampled(chat)[0].ids
    assert second == source.calls[1][1] + sampled(chat)[1].ids
    assert source.calls[1][1] == r.template.reference_ids(chat.messages[:3], generation=True)
    assert "hm" not in r.template.decode(source.calls[1][1])
    assert [len(n.ids) for n in chat.nodes if any(n.trained)] == [len(n.ids) for n in sampled(chat)]
    assert [m.content for m in chat.messages] == ["x", "one", "y", "two"]


def test_a_prompt_that_opens_the_thinking_keeps_every_turn_and_its_first_token() -> None:
    """B011: 300 conversations of 3 turns; all 900 turns are kept, each from its first token."""
    r = renderer(OPENS_THINKING)
    kept = 0
    for i in range(300):
        source = sampler(r, *(f"{i} {k}</think>ok" for k in range(3)))

        async def talk(chat: Chat) -> None:
            for k in range(3):
                await chat.turn([user(f"q{k}")])

        chat = run(r, source, talk)
        for node, (_, prompt, _) in zip(sampled(chat), source.calls, strict=True):
            assert node.trained[0] and node.message is not None and node.message.content == "ok"
            assert prompt + node.ids in branches(chat)
            kept += 1
    assert kept == 900


@given(
    replies=st.lists(st.lists(st.integers(0, 268), min_size=1, max_size=8), min_size=1, max_size=4),
    stops=st.lists(st.booleans(), min_size=4, max_size=4),
    questions=st.lists(st.text(max_size=12), min_size=4, max_size=4),
    name=st.sampled_from(sorted(set(ALL) - {"strict_calls", "no_system"})),
)
@settings(max_examples=80, deadline=None)
def test_trained_tokens_are_exactly_what_the_sampler_returned(
    replies: list[list[int]], stops: list[bool], questions: list[str], name: str
) -> None:
    """Any template, any ids (special ones too): spans concatenate to prompts, and the trained
    tokens, in order, are the sampler's."""
    r = RENDERERS[name]
    given = [tuple(i for i in ids if i not in r.stop_ids) for ids in replies]
    given = [(*ids, *r.stop_ids) if stop else ids for ids, stop in zip(given, stops, strict=False)]
    source = sampler(r, *given)

    async def talk(chat: Chat) -> None:
        for question, _ in zip(questions, given, strict=False):
            await chat.turn([user(question)])

    chat = run(r, source, talk)
    trained = [
        (i, x)
        for n in chat.nodes
        for i, x, t in zip(n.ids, n.logprobs, n.trained, strict=True)
        if t
    ]
    assert trained == [(i, -0.5 - 0.01 * k) for ids in given for k, i in enumerate(ids)]
    rows = branches(chat)
    for (_, prompt, _), ids in zip(source.calls, given, strict=True):
        assert any(row[: len(prompt) + len(ids)] == prompt + ids for row in rows)


RENDERERS = {name: renderer(ALL[name]) for name in ALL if name not in ("strict_calls", "no_system")}


# ----------------------------------------------------------------------- refusals


def completion(**changes: Any) -> Completion:
    whole = Completion(
        ids=(5, 6), logprobs=(-1.0, -2.0), versions=(0, 0), stop_reason=StopReason.EOS
    )
    return replace(whole, **changes)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (completion(logprobs=(-1.0,)), "2 ids but 1 logprobs"),
        (completion(logprobs=()), "2 ids but 0 logprobs"),
        (completion(versions=(0,)), "2 ids but 1 versions"),
        (completion(entropies=(1.0,)), "2 ids but 1 entropies"),
        (completion(logprobs=(-1.0, math.nan)), "token 1 of 2 has logprob nan"),
        (completion(logprobs=(-math.inf, -1.0)), "token 0 of 2 has logprob -inf"),
        (completion(logprobs=(0.5, -1.0)), "token 0 of 2 has logprob 0.5"),
        (completion(versions=(0, -1)), "policy version -1"),
        (completion(ids=(1,) * 300, logprobs=(-1.0,) * 300, versions=(0,) * 300), "200 were allow"),
    ],
)
def test_numbers_that_do_not_add_up_are_refused_with_the_reason(
    bad: Completion, reason: str
) -> None:
    """Requirement 3; B018: no token without an engine logprob is ever trained."""
    r = renderer()

    async def talk(chat: Chat) -> None:
        with pytest.raises(SamplerError, match=reason):
            await chat.turn([user("x")])

    assert sampled(run(r, sampler(r, bad), talk)) == []


def test_an_end_by_stop_string_adds_no_trained_token() -> None:
    """B018: the engine stopped on a string without emitting a stop id."""
    r = renderer()
    said = Completion(
        ids=encode(r, "done."),
        logprobs=(-1.0,) * 5,
        versions=(0,) * 5,
        stop_reason=StopReason.STOP_STRING,
    )

    async def talk(chat: Chat) -> None:
        await chat.turn([user("x")])
        assert not chat.truncated
        await chat.turn([user("y")])

    chat = run(r, sampler(r, said, "ok"), talk)
    assert sampled(chat)[0].ids == said.ids
    after = chat.nodes[2]
    assert r.stop_ids[0] in after.ids and not any(after.trained)


def test_the_stop_reason_decides_on_truncation_not_the_last_token() -> None:
    """B019: eos ids [1, 106]; a turn that ends with the second one is finished."""
    tokenizer = toy_tokenizer()
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    r = Renderer(tokenizer, [tokenizer.eos_token_id, other])

    async def talk(chat: Chat) -> None:
        await chat.turn([user("x")])
        assert chat.stop_reason is StopReason.EOS and not chat.truncated

    chat = run(r, sampler(r, (5, 6, other)), talk)
    assert all(sampled(chat)[0].trained)


def test_any_other_failure_of_the_sampler_is_a_sampler_error() -> None:
    r = renderer()

    async def talk(chat: Chat) -> None:
        with pytest.raises(SamplerError, match="session s, turn 1: KeyError"):
            await chat.turn([user("x")])

    run(r, sampler(r, KeyError("boom")), talk)


def test_two_turns_at_once_are_refused() -> None:
    r = renderer()

    async def talk(chat: Chat) -> None:
        results = await asyncio.gather(
            chat.turn([user("x")]), chat.turn([user("y")]), return_exceptions=True
        )
        assert sum(isinstance(x, HarnessError) for x in results) == 1

    run(r, sampler(r, "a"), talk)


# ----------------------------------------------------------------------- limits


def test_a_reply_may_use_only_what_the_context_has_left() -> None:
    """B020: a prompt of L-5 tokens with max_new_tokens 10."""
    r = renderer()
    prompt = r.prompt([user("x")])

    async def talk(chat: Chat) -> None:
        await chat.turn([user("x")])
        assert chat.truncated

    source = sampler(r, "a long reply")
    chat = run(r, source, talk, max_context=len(prompt) + 5, max_new_tokens=10)
    assert source.calls[0][2].max_new_tokens == 5
    assert sum(len(n.ids) for n in chat.nodes) == len(prompt) + 5


def test_a_prompt_that_fills_the_context_ends_the_conversation_cleanly() -> None:
    """B020"""
    r = renderer()
    room = len(r.prompt([user("x")])) + 4

    async def talk(chat: Chat) -> None:
        await chat.turn([user("x")])
        for _ in range(2):
            with pytest.raises(LimitExceeded, match="context limit in turn 2: prompt of"):
                await chat.turn([user("y")])

    source = sampler(r, "ab", "never")
    chat = run(r, source, talk, max_context=room)
    assert (chat.ended, len(source.calls)) == (Status.TRUNCATED, 1)
    assert max(len(row) for row in branches(chat)) <= room


def test_turns_are_limited() -> None:
    r = renderer()

    async def talk(chat: Chat) -> None:
        await chat.turn([user("x")])
        with pytest.raises(LimitExceeded, match="turn limit: 1 turns used"):
            await chat.turn([user("y")])

    assert run(r, sampler(r, "a", "b"), talk, max_turns=1).ended is Status.TRUNCATED


def test_the_time_left_is_the_samplers_deadline() -> None:
    r = renderer()
    source = sampler(r, "a", "b")
    chat = Chat(
        source,
        r,
        session="s",
        sampling=lambda turn: SamplingParams(max_new_tokens=9, deadline_s=1000.0),
        limits=Limits(max_turns=3, max_context=1000, deadline=math.inf),
    )

    async def main() -> None:
        await source.open("s")
        await chat.turn([user("x")])
        chat.recorder.limits = replace(
            chat.recorder.limits, deadline=asyncio.get_running_loop().time() + 50
        )
        await chat.turn([user("y")])
        chat.recorder.limits = replace(
            chat.recorder.limits, deadline=asyncio.get_running_loop().time() - 1
        )
        with pytest.raises(LimitExceeded, match="time limit reached before turn 3"):
            await chat.turn([user("z")])

    asyncio.run(main())
    assert source.calls[0][2].deadline_s == 1000.0
    assert 0 < source.calls[1][2].deadline_s <= 50
    assert chat.ended is Status.ABORTED


def test_a_turn_that_the_sampler_gave_up_aborts_and_keeps_its_tokens() -> None:
    r = renderer()
    cut = completion(stop_reason=StopReason.ABORTED)

    async def talk(chat: Chat) -> None:
        with pytest.raises(LimitExceeded, match="gave up turn 1 after 2 tokens"):
            await chat.turn([user("x")])

    chat = run(r, sampler(r, cut), talk)
    assert chat.ended is Status.ABORTED and sampled(chat)[0].ids == (5, 6)


# ----------------------------------------------------------------------- messages


def test_calls_are_read_only_if_there_are_tools() -> None:
    r = renderer(TOOLS)

    async def talk(chat: Chat) -> None:
        await chat.turn([user("x")])

    with_tools = run(r, sampler(r, CALL), talk, tools=True)
    without = run(r, sampler(r, CALL), talk)
    call = ToolCall(id="call00000", name="add", arguments='{"a": 1}')
    assert with_tools.messages[1].tool_calls == (call,)
    assert without.messages[1].content == CALL
    assert with_tools.unread_tool_marks == without.unread_tool_marks == 0


def test_marks_of_an_unknown_syntax_are_counted() -> None:
    """B014"""
    r = renderer(TOOLS)

    async def talk(chat: Chat) -> None:
        await chat.turn([user("x")])

    chat = run(r, sampler(r, '<invoke name="add"></invoke> 42'), talk, tools=True)
    assert chat.unread_tool_marks == 1 and chat.messages[1].tool_calls == ()


def test_messages_that_the_template_refuses_are_a_data_error() -> None:
    r = renderer(ALL["no_system"])

    async def talk(chat: Chat) -> None:
        with pytest.raises(DataError, match="System role not supported"):
            await chat.turn([Message(role="system", content="s"), user("x")])

    run(r, sampler(r, "a"), talk)


def test_thinking_kept_by_the_template_is_spliced() -> None:
    r = renderer(KEEPS_THINKING)

    async def talk(chat: Chat) -> None:
        await chat.turn([user("x")])
        await chat.turn([user("y")])

    chat = run(r, sampler(r, "<think>\nhm\n</think>\n\none", "two"), talk)
    assert chat.forks == 0 and len(branches(chat)) == 1
    assert chat.messages[1].reasoning == "hm"
