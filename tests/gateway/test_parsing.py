"""No request body gives a 500, in any dialect; refusals have the dialect's shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.bench import Bench, bench, play
from treadle.gateway import chat_completions, completions, messages, responses, wire
from treadle.gateway.history import message_key
from treadle.gateway.wire import Ask, RequestError
from treadle.types import Message

DIALECTS = [chat_completions, responses, messages, completions]

WORDS = [
    "role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id",
    "tool_call_id", "system", "user", "assistant", "tool", "developer", "tool_use", "tool_result",
    "tool_use_id", "input", "thinking", "function_call", "function_call_output", "call_id",
    "output", "reasoning", "summary", "input_text", "output_text", "message", "refusal", "image",
]  # fmt: skip
FIELDS = [
    "model", "messages", "tools", "tool_choice", "stream", "stream_options", "max_tokens",
    "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "n", "best_of",
    "temperature", "top_p", "seed", "prompt", "input", "instructions", "system", "logprobs",
    "response_format", "previous_response_id", "text", "logit_bias", "thinking", "background",
]  # fmt: skip
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from([*WORDS, "\ud800", "auto", "required", "<tool_call>{", "<|im_end|>"])
)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5)
    ),
    max_leaves=10,
)
roles = st.sampled_from(["user", "assistant", "tool", "system", "developer", "x"])
blocks = st.lists(st.dictionaries(st.sampled_from(WORDS), trees, max_size=5), max_size=3)
message_like = st.fixed_dictionaries(
    {"role": roles | scalars, "content": st.text(max_size=5) | blocks | trees},
    optional={"tool_calls": trees, "tool_call_id": scalars, "type": scalars},
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        **{field: trees for field in FIELDS},
        "messages": st.lists(message_like, max_size=4) | trees,
        "input": st.lists(message_like, max_size=4) | trees,
        "max_tokens": st.integers(-1, 50) | trees,
        "prompt": st.text(max_size=9) | st.lists(st.integers(-2, 400), max_size=5) | trees,
    },
)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.PATH)
@given(body=bodies)
@settings(max_examples=80, deadline=None)
def test_reading_gives_an_ask_or_a_refusal(dialect: Any, body: dict[str, Any]) -> None:
    try:
        ask = dialect.ask(body)
    except RequestError as refused:
        assert 400 <= refused.status < 500 and refused.message
        json.dumps(dialect.error(refused))
        return
    assert isinstance(ask, Ask)
    for message in ask.messages:
        message.content.encode()
        message_key(message)


@given(
    raw=st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "replace"))
)
@settings(max_examples=100, deadline=None)
def test_bytes_that_are_no_json_object_are_refused(raw: bytes) -> None:
    try:
        assert isinstance(wire.read_json(raw), dict)
    except RequestError as refused:
        assert refused.status == 400


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"messages": [], "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"temperature": NaN}',
        b"\xff\xfe",
        b"",
        b"[]",
    ],
)
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda d: d.PATH)
def test_hostile_bytes_are_a_400(raw: bytes, dialect: Any) -> None:
    with pytest.raises(RequestError):
        dialect.ask(wire.read_json(raw))


@given(body=bodies, path=st.sampled_from([d.PATH for d in DIALECTS] + ["messages/count_tokens"]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_server_never_answers_with_a_500(body: dict[str, Any], path: str) -> None:
    """Through rendering and the template as well; an open session survives every request."""
    status, reply = _shared().ask(path, body)
    assert status < 500 or reply["error"]["code"] == "sampler_failed", reply
    if status != 200:
        assert reply["error"]["message"]


class _Server:
    """One loop and one session for all examples."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.context = bench(lambda s, t: "ok", max_turns=10**6, max_context=10**6)
        self.bench: Bench = self.loop.run_until_complete(self.context.__aenter__())

    def ask(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async def one() -> tuple[int, Any]:
            raw = json.dumps(body).encode()
            url = f"{self.bench.base_url}/{path}"
            async with self.bench.http.post(url, data=raw) as reply:
                text = await reply.text()
                stream = reply.headers["content-type"].startswith("text/event-stream")
                return reply.status, None if stream else json.loads(text)

        return self.loop.run_until_complete(asyncio.wait_for(one(), 20))

    def close(self) -> None:
        self.loop.run_until_complete(self.context.__aexit__(None, None, None))
        self.loop.close()


_SERVERS: list[_Server] = []


def _shared() -> _Server:
    if not _SERVERS:
        _SERVERS.append(_Server())
    return _SERVERS[0]


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Any:
    yield
    while _SERVERS:
        _SERVERS.pop().close()


# ----------------------------------------------------------------------- by hand


def test_anthropic_tool_results_and_text_become_messages_in_order() -> None:
    ask = messages.ask(
        {
            "max_tokens": 5,
            "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "messages": [
                {"role": "user", "content": "q"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "text", "text": "calling"},
                        {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "5"},
                        {"type": "text", "text": "go on"},
                    ],
                },
            ],
        }
    )
    assert [m.role for m in ask.messages] == ["system", "user", "assistant", "tool", "user"]
    assert ask.messages[0].content == "a\nb" and ask.messages[2].reasoning == "hm"
    assert ask.messages[2].tool_calls[0].arguments == '{"x": 1}'
    assert ask.messages[3] == Message(role="tool", content="5", tool_call_id="c1")


def test_responses_items_of_one_turn_are_one_message() -> None:
    ask = responses.ask(
        {
            "instructions": "i",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "q"}]},
                {
                    "type": "reasoning",
                    "id": "r",
                    "summary": [{"type": "summary_text", "text": "t"}],
                },
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "a"}],
                },
                {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "1"},
                {"type": "function_call_output", "call_id": "c2", "output": "2"},
            ],
        }
    )
    assert [m.role for m in ask.messages] == ["system", "user", "assistant", "tool", "tool"]
    turn = ask.messages[2]
    assert (turn.content, turn.reasoning) == ("a", "t")
    assert [c.id for c in turn.tool_calls] == ["c1", "c2"]


@pytest.mark.parametrize(
    ("dialect", "body", "field"),
    [
        (chat_completions, {"messages": [{"role": "user", "content": "x"}], "n": 3}, "n"),
        (chat_completions, {"messages": []}, "messages"),
        (chat_completions, {"messages": "x"}, "messages"),
        (chat_completions, {"messages": [{"role": "user"}], "max_tokens": 0}, "max_tokens"),
        (chat_completions, {"messages": [{"role": "user"}], "max_tokens": True}, "max_tokens"),
        (
            chat_completions,
            {"messages": [{"role": "user"}], "temperature": "hot"},
            "temperature",
        ),
        (
            chat_completions,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0",
        ),
        (messages, {"messages": [{"role": "user", "content": "x"}]}, "max_tokens"),
        (
            messages,
            {"max_tokens": 1, "messages": [{"role": "assistant", "content": "x"}]},
            "messages",
        ),
        (responses, {"input": "x", "background": True}, "background"),
        (completions, {"prompt": ["a", "b"]}, "prompt"),
        (completions, {"prompt": "a", "echo": True}, "echo"),
    ],
)
def test_a_refusal_names_the_field(dialect: Any, body: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        dialect.ask(body)
    assert caught.value.param == field and field.split(".")[0] in caught.value.message + field


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    async def main() -> None:
        async with bench(["one"]) as b:
            for ids in ([10**9], [-1], [2**70]):
                status, reply = await b.post("completions", {"prompt": ids})
                assert status == 400 and "id" in reply["error"]["message"]
            assert (await b.post("completions", {"prompt": [3, 4]}))[0] == 200

    play(main())
