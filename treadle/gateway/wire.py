"""What every dialect shares: requests and answers in our nouns, and checks of foreign JSON.

Guarantees: whatever a client sends, reading it gives an Ask or a RequestError that names the
field; text that no tokenizer takes (lone surrogates) is replaced, never passed on; what another
reader would take for something else (numbers beyond all floats, a key twice) is refused.

Takes: JSON values of unknown shape. Gives: Ask; Answer in the other direction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.errors import TreadleError
from treadle.render import ToolSpec
from treadle.types import Message, StopReason, ToolCall

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_DEPTH = 64
"""Of tool schemas and arguments."""


class RequestError(TreadleError):
    """A request is refused. `status`, `code` and `retry_after_s` are what the client is told; 0 =
    nothing is said of when to come back."""

    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        status: int = 400,
        code: str = "invalid_request",
        param: str | None = None,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def text(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """One request for a turn."""

    model: str
    messages: tuple[Message, ...] = ()
    """The whole conversation as the client tells it (or what is new, see `previous`)."""
    tools: tuple[ToolSpec, ...] = ()
    read_calls: bool = True
    """False: the reply is text whatever it says (tool_choice "none")."""
    stream: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    wishes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling parameters as the client asked for them; recorded, and overruled by the run's."""
    ignored: tuple[str, ...] = ()
    """What was asked for and cannot be promised; told to the client in a header."""
    logprobs: bool = False
    usage_in_stream: bool = False
    previous: str = ""
    """Id of an earlier answer that this request continues; empty = none."""
    instructions: int = 0
    """Leading messages that are instructions of this request alone, 0 or 1."""
    continuable: bool = False
    """Later requests may name its answer as their `previous`."""
    raw: str | tuple[int, ...] | None = None
    """Plain completions: the prompt as text or ids, and no messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A recorded turn as the client gets it."""

    id: str
    """Hex digits, unique in the process; each dialect puts its own prefix before it."""
    created: int
    """Unix time, seconds."""
    message: Message
    stop_reason: StopReason
    stop: str = ""
    """The stop string that ended the turn; empty = none."""
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens: tuple[tuple[str, float], ...] = ()
    """(text, logprob) of each token, where they were asked for."""

    @property
    def truncated(self) -> bool:
        return self.stop_reason is StopReason.LENGTH


# --------------------------------------------------------------------------- JSON


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a request body. Raises RequestError."""
    try:
        value = json.loads(
            body,
            parse_constant=_no_constant,
            parse_float=_finite,
            object_pairs_hook=_each_key_once,
        )
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the request body must be a JSON object, got {_kind(value)}")
    return value


def read_arguments(given: str) -> dict[str, Any] | None:
    """The arguments of a call as an object whose text is clean; None where they are no such."""
    try:
        value = json.loads(given, parse_constant=_no_constant, parse_float=_finite)
        value = clean_tree(value, "arguments")
    except (ValueError, RecursionError, RequestError):
        return None
    return value if isinstance(value, dict) else None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:20]} is beyond every float")
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {json.dumps(twice[:40])} is there twice")
    return found


_KINDS = {
    bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list",
    dict: "an object", type(None): "null",
}  # fmt: skip


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def wrong(where: str, wanted: str, value: Any) -> RequestError:
    return RequestError(f"`{where}` must be {wanted}, got {_kind(value)}", param=where)


def text(value: Any, where: str, *, default: str | None = None) -> str:
    """Text that can be encoded; null gives `default` where there is one."""
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise wrong(where, "text", value)
    return clean(value)


def clean(value: str) -> str:
    """Lone surrogates become the replacement character."""
    if value.isascii():
        return value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def clean_tree(value: Any, where: str, depth: int = 0) -> Any:
    """JSON with clean text; refuses what is nested beyond reason."""
    if depth > MAX_DEPTH:
        raise RequestError(f"`{where}` is nested more than {MAX_DEPTH} deep", param=where)
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [clean_tree(v, where, depth + 1) for v in value]
    if isinstance(value, dict):
        return {clean(k): clean_tree(v, where, depth + 1) for k, v in value.items()}
    return value


def items(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(where, "a list", value)
    return value


def mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(where, "an object", value)
    return value


def flag(body: Mapping[str, Any], key: str) -> bool:
    value = body.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise wrong(key, "true or false", value)
    return value


def count(body: Mapping[str, Any], *keys: str) -> int | None:
    """A positive whole number under the first of `keys` that is given."""
    for key in keys:
        value = body.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            shown = value if isinstance(value, int | float) else _kind(value)
            raise RequestError(f"`{key}` must be a whole number >= 1, got {shown}", param=key)
        return value
    return None


def stops(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    given = [value] if isinstance(value, str) else items(value, where)
    found = tuple(text(s, f"{where}.{i}") for i, s in enumerate(given))
    if len(found) > MAX_STOPS or any(not 1 <= len(s) <= MAX_STOP_CHARS for s in found):
        raise RequestError(
            f"`{where}` takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS} characters",
            param=where,
        )
    return found


def one_choice(body: Mapping[str, Any], *keys: str) -> None:
    """`n` and its like must be 1."""
    for key in keys:
        value = body.get(key)
        if value is None or (value == 1 and not isinstance(value, bool)):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(key, "a whole number", value)
        raise RequestError(
            f"`{key}` must be 1, got {value}: each sample is a turn of its own",
            hint="send the request again for another, independent sample",
            param=key,
            code="unsupported_value",
        )


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
            "frequency_penalty", "repetition_penalty")  # fmt: skip


def wishes(body: Mapping[str, Any], *limits: str) -> dict[str, Any]:
    """Sampling parameters as asked, each a finite number. The run's own win over them."""
    found: dict[str, Any] = {}
    for key in (*SAMPLING, *limits):
        value = body.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(key, "a number", value)
        try:
            finite = math.isfinite(value)
        except OverflowError:
            finite = False
        if not finite:
            raise RequestError(f"`{key}` must be a finite number", param=key)
        found[key] = value
    return found


def refuse(body: Mapping[str, Any], *keys: str) -> None:
    """Fields that change what an answer is, and that are not supported."""
    for key in keys:
        if body.get(key) not in (None, False, [], {}):
            raise RequestError(f"`{key}` is not supported", param=key, code="unsupported_parameter")


# --------------------------------------------------------------------------- content


def parts(value: Any, where: str, kinds: Sequence[str]) -> str:
    """Text of a content that is text, null, or a list of text parts of these `kinds`."""
    if value is None:
        return ""
    if isinstance(value, str):
        return clean(value)
    out: list[str] = []
    for i, part in enumerate(items(value, where)):
        here = f"{where}.{i}"
        if isinstance(part, str):
            out.append(clean(part))
            continue
        kind = mapping(part, here).get("type")
        if kind not in kinds:
            raise RequestError(
                f"`{here}` is of type {kind!r}; only text can be shown to this model", param=here
            )
        field_ = "refusal" if kind == "refusal" else "text"
        out.append(text(part.get(field_), f"{here}.{field_}"))
    return "\n".join(out) if len(out) > 1 else "".join(out)


def tool(name: Any, description: Any, parameters: Any, where: str) -> ToolSpec:
    """A tool in the form that the renderer takes."""
    found = text(name, f"{where}.name")
    if not found or len(found) > 128:
        raise RequestError(f"`{where}.name` must have 1 to 128 characters", param=where)
    schema = {} if parameters is None else mapping(parameters, f"{where}.parameters")
    return {
        "type": "function",
        "function": {
            "name": found,
            "description": text(description, f"{where}.description", default=""),
            "parameters": clean_tree(schema or {"type": "object", "properties": {}}, where),
        },
    }


def call(id_: Any, name: Any, arguments: Any, where: str) -> ToolCall:
    """A call as a client echoes it; arguments as text or as an object."""
    if isinstance(arguments, dict):
        arguments = json.dumps(clean_tree(arguments, f"{where}.arguments"), ensure_ascii=False)
    arguments = text(arguments, f"{where}.arguments", default="")
    if arguments.count("{") + arguments.count("[") > MAX_DEPTH:
        _check_depth(arguments, f"{where}.arguments")
    return ToolCall(
        id=text(id_, f"{where}.id", default=""),
        name=text(name, f"{where}.name"),
        arguments=arguments,
    )


def _check_depth(arguments: str, where: str) -> None:
    """Raises RequestError where templates would nest too deep; what is no JSON is text to them."""
    try:
        clean_tree(json.loads(arguments), where)
    except ValueError:
        return
    except RecursionError:
        raise RequestError(f"`{where}` is nested more than {MAX_DEPTH} deep", param=where) from None


def conversation(messages: Sequence[Message], where: str) -> tuple[Message, ...]:
    """Checks that there is something to answer."""
    if not messages:
        raise RequestError(f"`{where}` is empty", param=where)
    if messages[-1].role == "assistant":
        raise RequestError(
            "the last message is the assistant's; a reply cannot be begun for the model",
            hint="end with a user or tool message",
            param=where,
        )
    return tuple(messages)


def frame(data: Mapping[str, Any], event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
