"""Plain completions: text (or token ids) in, text out, no chat template.

Takes: request bodies. Gives: Ask; response bodies, server-sent events and errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treadle.gateway import chat_completions as chat
from treadle.gateway import wire
from treadle.gateway.wire import Answer, Ask, RequestError

PATH = "completions"
PING = chat.PING

error = chat.error
error_event = chat.error_event
context_message = chat.context_message


def ask(body: Mapping[str, Any]) -> Ask:
    """Raises RequestError."""
    wire.one_choice(body, "n", "best_of")
    wire.refuse(body, "logit_bias", "suffix", "echo")
    options = body.get("stream_options")
    options = {} if options is None else wire.mapping(options, "stream_options")
    logprobs = body.get("logprobs")
    if isinstance(logprobs, bool) or not isinstance(logprobs, int | None):
        raise wire.wrong("logprobs", "a whole number", logprobs)
    return Ask(
        model=wire.text(body.get("model"), "model", default="policy"),
        raw=_prompt(body.get("prompt")),
        stream=wire.flag(body, "stream"),
        max_tokens=wire.count(body, "max_tokens"),
        stop=wire.stops(body.get("stop"), "stop"),
        wishes=wire.wishes(body, "max_tokens"),
        logprobs=logprobs is not None,
        usage_in_stream=wire.flag(options, "include_usage"),
    )


def _prompt(value: Any) -> str | tuple[int, ...]:
    """One prompt: text, ids, or a list that holds the one."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return wire.clean(value)
    if isinstance(value, list) and value and all(type(i) is int for i in value):
        return tuple(value)
    raise RequestError(
        "`prompt` must be one text, or one list of token ids, and not empty", param="prompt"
    )


def answer(ask: Ask, answer: Answer) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": answer.message.content,
        "finish_reason": chat.finish_reason(answer),
        "logprobs": _logprobs(ask, answer),
    }
    return _head(ask, answer) | {"choices": [choice], "usage": chat.usage(answer)}


def events(ask: Ask, answer: Answer) -> Iterator[bytes]:
    head = _head(ask, answer)
    choice = {
        "index": 0,
        "text": answer.message.content,
        "finish_reason": chat.finish_reason(answer),
        "logprobs": _logprobs(ask, answer),
    }
    yield wire.frame(head | {"choices": [choice]})
    if ask.usage_in_stream:
        yield wire.frame(head | {"choices": [], "usage": chat.usage(answer)})
    yield b"data: [DONE]\n\n"


def _head(ask: Ask, answer: Answer) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer.id}",
        "object": "text_completion",
        "created": answer.created,
        "model": ask.model,
    }


def _logprobs(ask: Ask, answer: Answer) -> dict[str, Any] | None:
    if not ask.logprobs:
        return None
    offsets, at = [], 0
    for token, _ in answer.tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": [t for t, _ in answer.tokens],
        "token_logprobs": [p for _, p in answer.tokens],
        "top_logprobs": None,
        "text_offset": offsets,
    }
