"""OpenAI chat completions, streaming and not, with tools.

Takes: request bodies. Gives: Ask; response bodies, server-sent events and errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treadle.gateway import wire
from treadle.gateway.wire import Answer, Ask, RequestError
from treadle.types import Message, ToolCall

PATH = "chat/completions"
PING = b": waiting\n\n"
_ROLES = {"developer": "system", "function": "tool"}


def ask(body: Mapping[str, Any]) -> Ask:
    """Raises RequestError."""
    wire.one_choice(body, "n")
    wire.refuse(body, "logit_bias", "audio", "prediction", "functions", "top_logprobs")
    messages = [
        _message(wire.mapping(m, f"messages.{i}"), f"messages.{i}")
        for i, m in enumerate(wire.items(body.get("messages"), "messages"))
    ]
    choice, ignored = tool_choice(body.get("tool_choice"))
    form = body.get("response_format")
    if form is not None and wire.mapping(form, "response_format").get("type") != "text":
        ignored = (*ignored, "response_format")
    options = body.get("stream_options")
    options = {} if options is None else wire.mapping(options, "stream_options")
    return Ask(
        model=wire.text(body.get("model"), "model", default="policy"),
        messages=wire.conversation(messages, "messages"),
        tools=tools(body.get("tools")),
        read_calls=choice != "none",
        stream=wire.flag(body, "stream"),
        max_tokens=wire.count(body, "max_completion_tokens", "max_tokens"),
        stop=wire.stops(body.get("stop"), "stop"),
        wishes=wire.wishes(body, "max_completion_tokens", "max_tokens"),
        ignored=ignored,
        logprobs=wire.flag(body, "logprobs"),
        usage_in_stream=wire.flag(options, "include_usage"),
    )


def tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """{"type": "function", "function": {...}} each."""
    out = []
    for i, item in enumerate([] if value is None else wire.items(value, "tools")):
        where = f"tools.{i}"
        if wire.mapping(item, where).get("type", "function") != "function":
            raise RequestError(
                f"`{where}.type` is {item['type']!r}; only functions are supported", param=where
            )
        function = wire.mapping(item.get("function"), f"{where}.function")
        out.append(
            wire.tool(
                function.get("name"),
                function.get("description"),
                function.get("parameters"),
                f"{where}.function",
            )
        )
    return tuple(out)


def tool_choice(value: Any) -> tuple[str, tuple[str, ...]]:
    """(none | auto, what cannot be promised): a sampled model is never forced to call."""
    if value is None or value in ("auto", "none"):
        return value or "auto", ()
    if isinstance(value, dict) or value in ("required", "any"):
        return "auto", ("tool_choice",)
    raise RequestError(f"`tool_choice` is {value!r}", param="tool_choice")


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = wire.text(item.get("role"), f"{where}.role")
    role = _ROLES.get(role, role)
    if role not in ("system", "user", "assistant", "tool"):
        raise RequestError(f"`{where}.role` is {role!r}", param=f"{where}.role")
    content = wire.parts(item.get("content"), f"{where}.content", ("text", "refusal"))
    if role == "tool":
        return Message(
            role=role,
            content=content,
            tool_call_id=wire.text(item.get("tool_call_id"), f"{where}.tool_call_id", default=""),
            name=wire.text(item.get("name"), f"{where}.name", default=""),
        )
    if role != "assistant":
        return Message(role=role, content=content)
    thought = item.get("reasoning_content") or item.get("reasoning")
    return Message(
        role=role,
        content=content,
        reasoning=wire.clean(thought) if isinstance(thought, str) else "",
        tool_calls=_calls(item.get("tool_calls"), f"{where}.tool_calls"),
    )


def _calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    out = []
    for i, item in enumerate([] if value is None else wire.items(value, where)):
        here = f"{where}.{i}"
        function = wire.mapping(wire.mapping(item, here).get("function"), f"{here}.function")
        out.append(wire.call(item.get("id"), function.get("name"), function.get("arguments"), here))
    return tuple(out)


# --------------------------------------------------------------------------- answers


def answer(ask: Ask, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answer.message.content if _has_content(answer) else None,
        "refusal": None,
    }
    if answer.message.reasoning:
        message["reasoning_content"] = answer.message.reasoning
    if answer.message.tool_calls:
        message["tool_calls"] = [_call(c) for c in answer.message.tool_calls]
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish_reason(answer),
        "logprobs": _logprobs(ask, answer),
    }
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": answer.created,
        "model": ask.model,
        "choices": [choice],
        "usage": usage(answer),
    }


def events(ask: Ask, answer: Answer) -> Iterator[bytes]:
    message = answer.message
    yield _chunk(ask, answer, {"role": "assistant", "content": ""})
    if message.reasoning:
        yield _chunk(ask, answer, {"reasoning_content": message.reasoning})
    if message.content:
        yield _chunk(ask, answer, {"content": message.content}, logprobs=True)
    for i, call in enumerate(message.tool_calls):
        yield _chunk(ask, answer, {"tool_calls": [{"index": i, **_call(call)}]})
    yield _chunk(ask, answer, {}, finish=finish_reason(answer))
    if ask.usage_in_stream:
        yield wire.frame(_head(ask, answer) | {"choices": [], "usage": usage(answer)})
    yield b"data: [DONE]\n\n"


def finish_reason(answer: Answer) -> str:
    if answer.truncated:
        return "length"
    return "tool_calls" if answer.message.tool_calls else "stop"


def usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }


def error(refused: RequestError) -> dict[str, Any]:
    kinds = {401: "authentication_error", 410: "not_found_error", 404: "not_found_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    if refused.status >= 500:
        kind = "server_error"
    return {
        "error": {
            "message": refused.text,
            "type": kind,
            "param": refused.param,
            "code": refused.code,
        }
    }


def error_event(refused: RequestError) -> bytes:
    return wire.frame(error(refused))


def context_message(prompt: int, limit: int) -> str:
    return (
        f"This model's maximum context length is {limit} tokens. However, your messages "
        f"resulted in {prompt} tokens. Please reduce the length of the messages."
    )


def _has_content(answer: Answer) -> bool:
    return bool(answer.message.content) or not answer.message.tool_calls


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _head(ask: Ask, answer: Answer) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion.chunk",
        "created": answer.created,
        "model": ask.model,
    }


def _chunk(
    ask: Ask,
    answer: Answer,
    delta: dict[str, Any],
    *,
    finish: str | None = None,
    logprobs: bool = False,
) -> bytes:
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
    if logprobs and ask.logprobs:
        choice["logprobs"] = _logprobs(ask, answer)
    return wire.frame(_head(ask, answer) | {"choices": [choice]})


def _logprobs(ask: Ask, answer: Answer) -> dict[str, Any] | None:
    if not ask.logprobs:
        return None
    content = [
        {"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []}
        for t, p in answer.tokens
    ]
    return {"content": content, "refusal": None}
