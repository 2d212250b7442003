"""A tokenizer's chat template, with its quirks found by trying it rather than assumed.

Guarantees:
- text is turned into ids without the tokenizer's own special tokens: the template alone decides
  on BOS, so there is never a second one;
- a special token spelt out inside a message (a tool result that says "<|im_end|>") becomes
  ordinary text tokens and cannot end a turn or open another;
- a lone surrogate, which is no text and which tokenizers refuse, is rendered as U+FFFD;
- a message that the template would lose (tool calls, tool results, tools) is written as text in
  the form of `text_tools` instead; what cannot be shown at all raises.

Takes: messages. Gives: text and token ids, as the model's template has them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from treadle.errors import DataError, ModelError, TreadleError, boundary
from treadle.render import text_tools
from treadle.render.thinking import CLOSE, OPEN, split_message
from treadle.types import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToolSpec = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description", "parameters": JSON schema}}."""

PROBE_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"type": "integer"}},
            "required": ["value"],
        },
    },
}
PROBE_CALL = ToolCall(id="call00000", name="probe_tool", arguments='{"value": 4711}')

_BREAK = "\ufdd0"
"""A Unicode noncharacter, never valid in text: marks where encoding must not join characters."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

_TAGS = {
    f"<{slash}{name}>" for name in ("think", "tool_call", "tool_response") for slash in ("", "/")
}
"""Written by this package too, and no turn begins or ends with one: never broken up."""


class Template:
    """One tokenizer's template and what it turned out to support.

    `reasoning`: "field" (it reads `reasoning_content`), "inline" (think tags inside the content)
    or "dropped" (earlier thinking is never shown). `opens_thinking`: the generation prompt ends
    inside an open think tag, so a reply starts as thinking. `native_tools`: tools, calls and
    results are all shown by the template itself.

    Raises ModelError when the tokenizer has no chat template, or one that cannot show a plain
    user message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ModelError(
                "the tokenizer has no chat template, so messages cannot become tokens",
                hint="use an instruct model, or set `chat_template` in its tokenizer_config.json",
            )
        self.tokenizer = tokenizer
        source = tokenizer.chat_template
        canonical = source if isinstance(source, str) else json.dumps(source, sort_keys=True)
        self.hash = hashlib.sha256(canonical.encode()).hexdigest()
        self._control = _control_pattern(tokenizer)
        self._arguments: Literal["object", "text"] = "object"
        self.reasoning: Literal["field", "inline", "dropped"] = "field"
        self.native_tools = True
        user = Message(role="user", content="probe question")
        try:
            opening = self.text([user], generation=True)
        except TreadleError as error:
            raise ModelError(f"the chat template cannot show one user message: {error}") from error
        if user.content not in opening:
            raise ModelError("the chat template does not show the content of a user message")
        self.opens_thinking = opening.rstrip().endswith(OPEN)
        system = Message(role="system", content="probe rules")
        self.has_system = self._shows([system, user], (), [system.content])
        self.reasoning = self._find_reasoning(user)
        self.native_tools = self._find_tools(user)

    # ----------------------------------------------------------------------- text and ids

    def text(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation: bool
    ) -> str:
        """The template's text; `generation` appends the prompt that opens an assistant turn.

        Raises DataError when the template refuses the messages (e.g. it has no system role) or
        loses a tool or a tool call.
        """
        if not self.native_tools:
            messages = text_tools.as_text(messages, tools, system_role=self.has_system)
            tools = ()
        roles = ", ".join(m.role for m in messages)
        with boundary(DataError, f"the chat template refused messages with roles {roles}"):
            text = self.tokenizer.apply_chat_template(
                [self._as_dict(m) for m in messages],
                tools=[self._defuse(dict(t)) for t in tools] or None,
                tokenize=False,
                add_generation_prompt=generation,
            )
        assert isinstance(text, str)
        names = [c.name for m in messages for c in m.tool_calls]
        names += [t["function"]["name"] for t in tools]
        lost = [name for name in names if self._defuse(name) not in text]
        if lost:
            raise DataError(
                f"the chat template shows no trace of {', '.join(f'`{n}`' for n in lost)} "
                f"(a tool or a tool call) in messages with roles {roles}",
                hint="training on it would hide part of the conversation; use another template",
            )
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a whole prompt; adds no special token of its own."""
        first, *rest = text.split(_BREAK)
        ids = self._plain(first)
        for piece in rest:
            ids += self._inside(piece)
        return tuple(ids)

    def encode_after(self, text: str) -> tuple[int, ...]:
        """Ids of text that continues something: no word-start marker is put in front."""
        first, *rest = text.split(_BREAK)
        ids = self._inside(first)
        for piece in rest:
            ids += self._inside(piece)
        return tuple(ids)

    def decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def reference_ids(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, generation: bool
    ) -> tuple[int, ...]:
        """What the tokenizer's own `apply_chat_template` gives: the yardstick of the checks."""
        if not self.native_tools:
            messages = text_tools.as_text(messages, tools, system_role=self.has_system)
            tools = ()
        with boundary(DataError, "chat template"):
            encoded: Any = self.tokenizer.apply_chat_template(
                [self._as_dict(m) for m in messages],
                tools=[self._defuse(dict(t)) for t in tools] or None,
                tokenize=True,
                return_dict=True,
                add_generation_prompt=generation,
            )
        return tuple(encoded["input_ids"])

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def _inside(self, text: str) -> list[int]:
        # Word-piece tokenizers mark the start of a text as the start of a word. A newline in
        # front takes that mark; where it merges with the text, the tokenizer makes no such mark.
        lead = self._plain("\n")
        ids = self._plain("\n" + text)
        if ids[: len(lead)] == lead:
            return ids[len(lead) :]
        return self._plain(text)

    # ----------------------------------------------------------------------- messages

    def _as_dict(self, message: Message) -> dict[str, Any]:
        reasoning, content = split_message(message)
        out: dict[str, Any] = {"role": message.role, "content": self._defuse(content)}
        if reasoning and self.reasoning == "inline":
            out["content"] = self._defuse(f"{OPEN}\n{reasoning}\n{CLOSE}\n\n{content}")
        elif reasoning:
            out["reasoning_content"] = self._defuse(reasoning)
        if message.tool_calls:
            out["tool_calls"] = [self._call(c) for c in message.tool_calls]
        if message.tool_call_id:
            out["tool_call_id"] = message.tool_call_id
        if message.name:
            out["name"] = self._defuse(message.name)
        return out

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = call.arguments or "{}"
        if self._arguments == "object":
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = call.arguments  # malformed: shown as the model wrote it
        function = {"name": self._defuse(call.name), "arguments": self._defuse(arguments)}
        return {"type": "function", "function": function, "id": call.id}

    def _defuse(self, value: Any) -> Any:
        """Text that came from outside: special tokens broken up, lone surrogates replaced."""
        if isinstance(value, str):
            clean = _LONE_SURROGATE.sub("\ufffd", value.replace(_BREAK, ""))
            return self._control.sub(lambda m: _BREAK.join(m[0]), clean)
        if isinstance(value, dict):
            return {self._defuse(k): self._defuse(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._defuse(v) for v in value]
        return value

    # ----------------------------------------------------------------------- probes

    def _shows(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], wanted: Sequence[str]
    ) -> bool:
        try:
            text = self.text(messages, tools, generation=False)
        except TreadleError:
            return False
        return all(w in text for w in wanted)

    def _find_reasoning(self, user: Message) -> Literal["field", "inline", "dropped"]:
        turn = Message(role="assistant", content="probe reply", reasoning="probe thought")
        before = self.text([user], generation=False)
        form: Literal["field", "inline"]
        for form in ("field", "inline"):
            self.reasoning = form
            try:
                text = self.text([user, turn], generation=False)
            except TreadleError:
                continue
            blocks = text.count(OPEN) - before.count(OPEN)
            if text.count(turn.reasoning) == 1 and blocks <= 1:
                return form
        return "dropped"

    def _find_tools(self, user: Message) -> bool:
        turn = Message(role="assistant", tool_calls=(PROBE_CALL,))
        answer = Message(role="tool", content="probe answer", tool_call_id=PROBE_CALL.id)
        wanted = ["4711", answer.content]
        form: Literal["object", "text"]
        for form in ("object", "text"):
            self._arguments = form
            if self._shows([user, turn, answer], (PROBE_TOOL,), wanted):
                return True
        self._arguments = "object"
        return False


def _control_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    added = tokenizer.added_tokens_decoder.values()
    special = {t.content for t in added if t.special and len(t.content) > 1}
    longest_first = sorted(special - _TAGS, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
