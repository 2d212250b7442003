"""OpenAI responses, streaming and not, with function calls and `previous_response_id`.

Takes: request bodies. Gives: Ask; response bodies, server-sent events and errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from treadle.gateway import chat_completions as chat
from treadle.gateway import wire
from treadle.gateway.wire import Answer, Ask, RequestError
from treadle.types import Message

PATH = "responses"
PING = chat.PING
PREFIX = "resp_"

error = chat.error
context_message = chat.context_message

_TEXT = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
_ROLES = {"developer": "system"}


def ask(body: Mapping[str, Any]) -> Ask:
    """Raises RequestError."""
    wire.refuse(body, "background", "conversation", "prompt", "top_logprobs")
    instructions = wire.text(body.get("instructions"), "instructions", default="")
    given = [Message(role="system", content=instructions)] if instructions else []
    messages = _input(body.get("input"))
    choice, ignored = chat.tool_choice(body.get("tool_choice"))
    form = body.get("text")
    form = {} if form is None else wire.mapping(form, "text").get("format")
    if form and wire.mapping(form, "text.format").get("type") not in ("text", None):
        ignored = (*ignored, "text.format")
    return Ask(
        model=wire.text(body.get("model"), "model", default="policy"),
        messages=(*given, *wire.conversation(messages, "input")),
        tools=_tools(body.get("tools")),
        read_calls=choice != "none",
        stream=wire.flag(body, "stream"),
        max_tokens=wire.count(body, "max_output_tokens"),
        wishes=wire.wishes(body, "max_output_tokens"),
        ignored=ignored,
        previous=wire.text(
            body.get("previous_response_id"), "previous_response_id", default=""
        ).removeprefix(PREFIX),
        instructions=len(given),
        continuable=True,
    )


def _tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    out = []
    for i, item in enumerate([] if value is None else wire.items(value, "tools")):
        where = f"tools.{i}"
        if wire.mapping(item, where).get("type") != "function":
            raise RequestError(
                f"`{where}.type` is {item.get('type')!r}; only functions are supported", param=where
            )
        found = (item.get("name"), item.get("description"), item.get("parameters"))
        out.append(wire.tool(*found, where))
    return tuple(out)


def _input(value: Any) -> list[Message]:
    """Messages; thinking, text and calls of one turn, which are items of their own, are joined."""
    if isinstance(value, str):
        return [Message(role="user", content=wire.clean(value))]
    out: list[Message] = []
    for i, raw in enumerate(wire.items(value, "input")):
        where = f"input.{i}"
        item = wire.mapping(raw, where)
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            output = wire.parts(item.get("output"), f"{where}.output", _TEXT)
            call_id = wire.text(item.get("call_id"), f"{where}.call_id")
            out.append(Message(role="tool", content=output, tool_call_id=call_id))
        elif kind == "function_call":
            found = (item.get("call_id"), item.get("name"), item.get("arguments"))
            call = wire.call(*found, where)
            last = _turn(out)
            out[-1] = replace(last, tool_calls=(*last.tool_calls, call))
        elif kind == "reasoning":
            thought = wire.parts(item.get("content") or item.get("summary"), where, _TEXT)
            last = _turn(out)
            out[-1] = replace(last, reasoning=last.reasoning + thought)
        elif kind == "message":
            _append(out, item, where)
        else:
            raise RequestError(f"`{where}` is of type {kind!r}", param=where)
    return out


def _append(out: list[Message], item: Mapping[str, Any], where: str) -> None:
    role = wire.text(item.get("role"), f"{where}.role")
    role = _ROLES.get(role, role)
    content = wire.parts(item.get("content"), f"{where}.content", _TEXT)
    if role == "assistant":
        last = _turn(out)
        if last.content:
            out.append(Message(role="assistant", content=content))
        else:
            out[-1] = replace(last, content=content)
    elif role in ("system", "user"):
        out.append(Message(role=role, content=content))
    else:
        raise RequestError(f"`{where}.role` is {role!r}", param=f"{where}.role")


def _turn(out: list[Message]) -> Message:
    """The assistant's turn at the end of `out`, begun where there is none."""
    if not out or out[-1].role != "assistant":
        out.append(Message(role="assistant"))
    return out[-1]


# --------------------------------------------------------------------------- answers


def answer(ask: Ask, answer: Answer) -> dict[str, Any]:
    status = "incomplete" if answer.truncated else "completed"
    return _head(ask, answer, status) | {
        "incomplete_details": {"reason": "max_output_tokens"} if answer.truncated else None,
        "output": _items(answer),
        "usage": {
            "input_tokens": answer.prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.cached_tokens},
            "output_tokens": answer.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        },
    }


def events(ask: Ask, answer_: Answer) -> Iterator[bytes]:
    number = 0

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return wire.frame({"type": kind, "sequence_number": number - 1, **fields}, kind)

    whole = answer(ask, answer_)
    begun = whole | {
        "status": "in_progress", "output": [], "usage": None, "incomplete_details": None,
    }  # fmt: skip
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for i, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": i}
        yield event("response.output_item.added", output_index=i, item=_empty(item))
        if item["type"] == "message":
            part = item["content"][0]
            at["content_index"] = 0
            yield event("response.content_part.added", **at, part=part | {"text": ""})
            yield event("response.output_text.delta", **at, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, part=part)
        elif item["type"] == "function_call":
            given = item["arguments"]
            yield event("response.function_call_arguments.delta", **at, delta=given)
            yield event(
                "response.function_call_arguments.done", **at, name=item["name"], arguments=given
            )
        yield event("response.output_item.done", output_index=i, item=item)
    yield event(f"response.{whole['status']}", response=whole)


def error_event(refused: RequestError) -> bytes:
    fields = {"code": refused.code, "message": refused.text, "param": refused.param}
    return wire.frame({"type": "error", "sequence_number": 0, **fields}, "error")


def _head(ask: Ask, answer: Answer, status: str) -> dict[str, Any]:
    return {
        "id": f"{PREFIX}{answer.id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "instructions": ask.messages[0].content if ask.instructions else None,
        "model": ask.model,
        "parallel_tool_calls": True,
        "previous_response_id": f"{PREFIX}{ask.previous}" if ask.previous else None,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto" if ask.read_calls else "none",
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in ask.tools],
        "metadata": {},
    }


def _items(answer: Answer) -> list[dict[str, Any]]:
    message = answer.message
    status = "incomplete" if answer.truncated else "completed"
    out: list[dict[str, Any]] = []
    if message.reasoning:
        summary = [{"type": "summary_text", "text": message.reasoning}]
        out.append({"id": f"rs_{answer.id}", "type": "reasoning", "summary": summary})
    if message.content or not message.tool_calls:
        part = {"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}
        out.append(
            {
                "id": f"msg_{answer.id}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [part],
            }
        )
    for i, call in enumerate(message.tool_calls):
        out.append(
            {
                "id": f"fc_{answer.id}_{i}",
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        )
    return out


def _empty(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "message":
        return item | {"content": [], "status": "in_progress"}
    if item["type"] == "function_call":
        return item | {"arguments": "", "status": "in_progress"}
    return item
