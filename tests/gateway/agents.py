"""Agents that know nothing of training, each written against a provider's own package.

They are named by `rollout.harness` as tests.gateway.agents:NAME; the models that they call are
made here too.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import openai

from treadle.types import Task

PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS},
}
ADD_ANTHROPIC = {"name": "add", "description": "Adds.", "input_schema": PARAMETERS}


def add(a: int, b: int) -> str:
    return str(a + b)


def openai_tool_loop(task: Task, base_url: str, api_key: str) -> None:
    """The loop of the package's own documentation."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        _openai_loop(client, task)


def _openai_loop(client: openai.OpenAI, task: Task) -> None:
    messages: list[Any] = [{"role": m.role, "content": m.content} for m in task.messages]
    for _ in range(3):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = add(arguments.get("a", 0), arguments.get("b", 0))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def anthropic_tool_loop(task: Task, base_url: str, api_key: str) -> None:
    """The same by streamed messages."""
    with anthropic.Anthropic(base_url=base_url, api_key=api_key) as client:
        _anthropic_loop(client, task)


def _anthropic_loop(client: anthropic.Anthropic, task: Task) -> None:
    messages: list[Any] = [{"role": m.role, "content": m.content} for m in task.messages]
    for _ in range(3):
        with client.messages.stream(
            model="policy", max_tokens=100, messages=messages, tools=[ADD_ANTHROPIC]
        ) as events:
            reply = events.get_final_message()
        messages.append({"role": "assistant", "content": reply.content})
        calls = [block for block in reply.content if block.type == "tool_use"]
        if not calls:
            return
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": add(call.input.get("a", 0), call.input.get("b", 0)),
            }
            for call in calls
        ]
        messages.append({"role": "user", "content": results})


TEMPLATES = {
    "system_prompt": "Answer by a tool.",
    "planning": {
        "initial_plan": "", "update_plan_pre_messages": "", "update_plan_post_messages": "",
    },
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "Say it.", "post_messages": "{{task}}"},
}  # fmt: skip


def smolagent(task: Task, base_url: str, api_key: str) -> None:
    """A third-party agent: its own loop, memory, parsing of calls and error messages."""
    from smolagents import OpenAIModel, ToolCallingAgent

    model = OpenAIModel(model_id="policy", api_base=base_url, api_key=api_key)
    agent = ToolCallingAgent(
        tools=[_smol_add()],
        model=model,
        prompt_templates=TEMPLATES,  # type: ignore[arg-type]
        max_steps=2,
        verbosity_level=-1,
    )
    try:
        agent.run(task.messages[-1].content)
    finally:
        model.client.close()


@cache
def _smol_add() -> Any:
    from smolagents import Tool

    class Add(Tool):
        name = "add"
        description = "Adds."
        inputs = {  # noqa: RUF012  as the package wants it
            "a": {"type": "integer", "description": "a"},
            "b": {"type": "integer", "description": "b"},
        }
        output_type = "string"

        def forward(self, a: int, b: int) -> str:
            return add(a, b)

    return Add()


# ----------------------------------------------------------------------- the model


def build_caller(directory: Path) -> Path:
    """A tiny model that calls `add` about half of the time, and else says "no"."""
    import tempfile

    import torch

    from treadle.models import tiny
    from treadle.models.load import load
    from treadle.models.lora import save_merged
    from treadle.models.policy import Policy
    from treadle.render import Renderer
    from treadle.train.sft import sft
    from treadle.types import Message

    with tempfile.TemporaryDirectory() as start:
        tiny.build_random(Path(start), seed=0)
        loaded = load(start, max_context=512)
        policy = Policy(loaded, lora=None, dtype=torch.float32)
        renderer = Renderer(loaded.tokenizer, loaded.stop_ids)

        def learnt(ids: tuple[int, ...], text: str) -> tuple[tuple[int, ...], list[bool]]:
            reply = (*renderer.template.encode_after(text), loaded.stop_ids[0])
            return (*ids, *reply), [False] * len(ids) + [True] * len(reply)

        demonstrations = []
        for i in range(400):
            a, b = i % 10, i // 10 % 10
            question = Message(role="user", content=f"{a}+{b}")
            prompt = renderer.prompt([question], [ADD])
            if i % 2:
                demonstrations.append(learnt(prompt, "no"))
                continue
            call = f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'
            ids, mask = learnt(prompt, call)
            turn = renderer.parse(ids[len(prompt) :])
            result = Message(role="tool", content=add(a, b), tool_call_id=turn.tool_calls[0].id)
            more = renderer.extend(ids, [result], [ADD], history=[question, turn])
            whole, last = learnt(more, add(a, b))
            demonstrations.append((whole, [*mask, *last[len(mask) :]]))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # tensors this small gain nothing from more
        losses = sft(
            policy, demonstrations, steps=160, batch_tokens=2048, lr=3e-3, warmup_steps=20, seed=0
        )
        torch.set_num_threads(threads)
        assert losses[-1] < 0.5, f"the model has not learnt to call: {losses[-10:]}"
        save_merged(policy, directory)
    return directory


def build_wide(directory: Path) -> Path:
    """A tiny random model with room for an agent's long prompts."""
    from treadle.models import tiny

    tiny.build_random(directory, max_context=4096, seed=0)
    return directory
