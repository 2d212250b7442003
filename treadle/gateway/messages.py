"""Anthropic messages, streaming and not, with tools.

Takes: request bodies. Gives: Ask; response bodies, server-sent events and errors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from treadle.gateway import wire
from treadle.gateway.wire import Answer, Ask, RequestError
from treadle.types import Message, StopReason

PATH = "messages"
COUNT_PATH = "messages/count_tokens"
PING = wire.frame({"type": "ping"}, "ping")


def ask(body: Mapping[str, Any]) -> Ask:
    """Raises RequestError."""
    limit = wire.count(body, "max_tokens")
    if limit is None:
        raise RequestError("`max_tokens`: Field required", param="max_tokens")
    return _ask(body, limit)


def count_ask(body: Mapping[str, Any]) -> Ask:
    """A request that only wants its prompt counted."""
    return _ask(body, None)


def _ask(body: Mapping[str, Any], limit: int | None) -> Ask:
    wire.refuse(body, "mcp_servers", "container")
    messages: list[Message] = []
    system = wire.parts(body.get("system"), "system", ("text",))
    if system:
        messages.append(Message(role="system", content=system))
    for i, item in enumerate(wire.items(body.get("messages"), "messages")):
        where = f"messages.{i}"
        messages += _messages(wire.mapping(item, where), where)
    choice, ignored = _tool_choice(body.get("tool_choice"))
    return Ask(
        model=wire.text(body.get("model"), "model", default="policy"),
        messages=wire.conversation(messages, "messages"),
        tools=_tools(body.get("tools")),
        read_calls=choice != "none",
        stream=wire.flag(body, "stream"),
        max_tokens=limit,
        stop=wire.stops(body.get("stop_sequences"), "stop_sequences"),
        wishes=wire.wishes(body, "max_tokens"),
        ignored=ignored,
    )


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    out = []
    for i, item in enumerate([] if value is None else wire.items(value, "tools")):
        where = f"tools.{i}"
        if wire.mapping(item, where).get("type", "custom") not in ("custom", None):
            raise RequestError(
                f"`{where}.type` is {item['type']!r}; only tools of the client are supported",
                param=where,
            )
        found = (item.get("name"), item.get("description"), item.get("input_schema"))
        out.append(wire.tool(*found, where))
    return tuple(out)


def _tool_choice(value: Any) -> tuple[str, tuple[str, ...]]:
    if value is None:
        return "auto", ()
    kind = wire.mapping(value, "tool_choice").get("type")
    if kind in ("auto", "none"):
        return kind, ()
    if kind in ("any", "tool"):
        return "auto", ("tool_choice",)
    raise RequestError(f"`tool_choice.type` is {kind!r}", param="tool_choice")


def _messages(item: Mapping[str, Any], where: str) -> list[Message]:
    """One message of theirs may be several of ours: each tool result is one."""
    role, content = item.get("role"), item.get("content")
    if role == "system":
        return [Message(role="system", content=wire.parts(content, f"{where}.content", ("text",)))]
    if role not in ("user", "assistant"):
        raise RequestError(f"`{where}.role` is {role!r}", param=f"{where}.role")
    if isinstance(content, str):
        return [Message(role=role, content=wire.clean(content))]
    blocks = wire.items(content, f"{where}.content")
    checked = [
        (wire.mapping(b, f"{where}.content.{i}"), f"{where}.content.{i}")
        for i, b in enumerate(blocks)
    ]
    return [_assistant(checked)] if role == "assistant" else _user(checked)


def _assistant(blocks: list[tuple[dict[str, Any], str]]) -> Message:
    texts, thoughts, calls = [], [], []
    for block, where in blocks:
        kind = block.get("type")
        if kind == "text":
            texts.append(wire.text(block.get("text"), f"{where}.text"))
        elif kind == "thinking":
            thoughts.append(wire.text(block.get("thinking"), f"{where}.thinking", default=""))
        elif kind == "tool_use":
            given = wire.mapping(block.get("input"), f"{where}.input")
            calls.append(wire.call(block.get("id"), block.get("name"), given, where))
        elif kind != "redacted_thinking":
            raise RequestError(f"`{where}` is of type {kind!r}", param=where)
    return Message(
        role="assistant",
        content="\n".join(texts),
        reasoning="\n".join(thoughts),
        tool_calls=tuple(calls),
    )


def _user(blocks: list[tuple[dict[str, Any], str]]) -> list[Message]:
    out: list[Message] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            out.append(Message(role="user", content="\n".join(texts)))
            texts.clear()

    for block, where in blocks:
        if block.get("type") == "tool_result":
            flush()
            out.append(
                Message(
                    role="tool",
                    content=wire.parts(block.get("content"), f"{where}.content", ("text",)),
                    tool_call_id=wire.text(block.get("tool_use_id"), f"{where}.tool_use_id"),
                )
            )
        else:
            texts.append(wire.parts([block], where, ("text",)))
    flush()
    return out or [Message(role="user")]


# --------------------------------------------------------------------------- answers


def answer(ask: Ask, answer: Answer) -> dict[str, Any]:
    return _head(ask, answer) | {
        "content": _blocks(answer),
        "stop_reason": stop_reason(answer),
        "stop_sequence": answer.stop or None,
        "usage": usage(answer),
    }


def events(ask: Ask, answer: Answer) -> Iterator[bytes]:
    start = _head(ask, answer) | {
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(answer) | {"output_tokens": 0},
    }
    yield _event("message_start", message=start)
    for i, block in enumerate(_blocks(answer)):
        empty, deltas = _deltas(block)
        yield _event("content_block_start", index=i, content_block=empty)
        for delta in deltas:
            yield _event("content_block_delta", index=i, delta=delta)
        yield _event("content_block_stop", index=i)
    end = {"stop_reason": stop_reason(answer), "stop_sequence": answer.stop or None}
    yield _event("message_delta", delta=end, usage={"output_tokens": answer.completion_tokens})
    yield _event("message_stop")


def stop_reason(answer: Answer) -> str:
    if answer.truncated:
        return "max_tokens"
    if answer.message.tool_calls:
        return "tool_use"
    return "stop_sequence" if answer.stop_reason is StopReason.STOP_STRING else "end_turn"


def usage(answer: Answer) -> dict[str, Any]:
    """Cached prompt tokens are counted apart from the others, as this dialect does."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": answer.completion_tokens,
    }


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


def error(refused: RequestError) -> dict[str, Any]:
    kind = _KINDS.get(
        refused.status, "api_error" if refused.status >= 500 else "invalid_request_error"
    )
    return {"type": "error", "error": {"type": kind, "message": refused.text}}


def error_event(refused: RequestError) -> bytes:
    return wire.frame(error(refused), "error")


def context_message(prompt: int, limit: int) -> str:
    return f"prompt is too long: {prompt} tokens > {limit - 1} maximum"


def _head(ask: Ask, answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": ask.model,
    }


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    message = answer.message
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.tool_calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.tool_calls:
        given = wire.read_arguments(call.arguments or "{}")
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return blocks


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The block as it starts, and what then fills it."""
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        return block | {"thinking": ""}, [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
    given = json.dumps(block["input"])
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": given}]


def _event(kind: str, **fields: Any) -> bytes:
    return wire.frame({"type": kind, **fields}, kind)
