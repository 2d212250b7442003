"""Tools for templates that know none: definitions, calls and results written as plain text.

The form is the one most open models were trained on (Hermes, Qwen): definitions in the system
message, calls as JSON between <tool_call> tags, results as a user message between
<tool_response> tags.

Takes: messages and tools. Gives: messages that need nothing but roles and content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from treadle.types import Message, ToolCall

_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, system_role: bool
) -> list[Message]:
    """The same conversation without tool roles, tool calls or tool definitions.

    `system_role` False: the definitions go in front of the first user message instead.
    """
    out: list[Message] = []
    for message in messages:
        if message.role == "tool":
            response = f"<tool_response>\n{message.content}\n</tool_response>"
            if out and out[-1].content.endswith("</tool_response>"):
                out[-1] = replace(out[-1], content=f"{out[-1].content}\n{response}")
            else:
                out.append(Message(role="user", content=response))
        elif message.tool_calls:
            parts = [message.content] if message.content else []
            parts += [_call(c) for c in message.tool_calls]
            out.append(replace(message, content="\n".join(parts), tool_calls=()))
        else:
            out.append(message)
    return _with_definitions(out, tools, system_role) if tools else out


def _call(call: ToolCall) -> str:
    name = json.dumps(call.name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'


def _with_definitions(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], system_role: bool
) -> list[Message]:
    lines = "\n".join(json.dumps(dict(t), ensure_ascii=False) for t in tools)
    text = _INSTRUCTIONS.format(tools=lines)
    host = "system" if system_role else "user"
    for i, message in enumerate(messages):
        if message.role == host:
            joined = [message.content, text] if system_role else [text, message.content]
            changed = replace(message, content="\n\n".join(p for p in joined if p))
            return [*messages[:i], changed, *messages[i + 1 :]]
    return [Message(role=host, content=text), *messages]
