"""A demonstration as a group of one trajectory: what a step learns without sampling.

Guarantees:
- what is learnt is decided by splicing, never by looking for text: the prompt is the renderer's,
  each assistant turn follows it up to and with the id that stops it, everything else is observed;
- tokens of an earlier rollout are taken as they are;
- a conversation whose past the template rewrites goes on in a new branch, as a rollout's would;
- a demonstration that does not fit into the context is a failure with its numbers. It is never cut:
  half a demonstration would teach to stop nowhere.

Takes: a Task and its Demonstration. Gives: a Group with tokens of source "demonstration", unscored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from treadle.errors import LimitExceeded, TreadleError, record
from treadle.render import PrefixUnstable, Renderer, ToolSpec
from treadle.tasks.demonstrations import Demonstration
from treadle.types import (
    Group,
    Message,
    Node,
    Party,
    SamplingParams,
    Source,
    Status,
    Task,
    Trajectory,
)


def demonstrate(
    task: Task,
    ordinal: int,
    demonstration: Demonstration,
    *,
    renderer: Renderer,
    max_context: int,
    version: int,
) -> Group:
    """The group of an ordinal.

    Args:
        max_context: tokens of a branch.
        version: PolicyVersion now serving, which dates the group.
    """
    error: TreadleError | None = None
    nodes: tuple[Node, ...] = ()
    try:
        nodes = demonstration.nodes or _rendered(task, demonstration, renderer)
        _check_length(nodes, max_context)
    except TreadleError as raised:
        error = raised
    where = f"demonstration {task.id}"
    trajectory = Trajectory(
        id=f"{ordinal}/0",
        task=task,
        sample=0,
        nodes=() if error else nodes,
        status=Status.FAILED if error else Status.FINISHED,
        # Nothing was sampled; the trainer scores demonstrations at temperature 1.
        sampling=SamplingParams(max_new_tokens=1, temperature=1.0),
        error=record(error, where) if error else None,
    )
    return Group(ordinal=ordinal, task=task, trajectories=(trajectory,), version=version)


def _rendered(task: Task, demonstration: Demonstration, renderer: Renderer) -> tuple[Node, ...]:
    nodes: list[Node] = []
    history: list[Message] = list(task.messages)
    tools = demonstration.tools
    ids = renderer.prompt(history, tools)
    leaf = _append(nodes, None, Source.OBSERVATION, ids, history)
    pending: list[Message] = []
    for message in demonstration.turns:
        if message.role != "assistant":
            pending.append(message)
            continue
        if pending:
            leaf, ids = _observe(nodes, leaf, ids, history, pending, renderer, tools)
            history += pending
            pending = []
        added = renderer.turn(history, message, tools)
        leaf = _append(nodes, leaf, Source.DEMONSTRATION, added, [message])
        ids = (*ids, *added)
        history.append(message)
    return tuple(nodes)


def _observe(
    nodes: list[Node],
    leaf: int,
    ids: tuple[int, ...],
    history: Sequence[Message],
    new: Sequence[Message],
    renderer: Renderer,
    tools: Sequence[ToolSpec],
) -> tuple[int, tuple[int, ...]]:
    """Show `new` after the turn that `ids` end with; the leaf and all ids from its root."""
    try:
        longer = renderer.extend(ids, new, tools, history=history)
    except PrefixUnstable:
        fresh = renderer.prompt([*history, *new], tools)
        return _append(nodes, None, Source.OBSERVATION, fresh, new), fresh
    return _append(nodes, leaf, Source.OBSERVATION, longer[len(ids) :], new), longer


def _append(
    nodes: list[Node],
    parent: int | None,
    source: Source,
    ids: tuple[int, ...],
    messages: Sequence[Message],
) -> int:
    """One node per message; the last one holds the tokens of all of them."""
    for i, message in enumerate(messages):
        held = ids if i == len(messages) - 1 else ()
        learnt = source is Source.DEMONSTRATION
        nodes.append(
            Node(
                id=len(nodes),
                parent=parent,
                party=Party.POLICY if learnt else Party.ENVIRONMENT,
                source=source,
                ids=held,
                trained=(learnt,) * len(held),
                logprobs=(math.nan,) * len(held),
                versions=(-1,) * len(held),
                message=message,
            )
        )
        parent = nodes[-1].id
    assert parent is not None, "a node without a message"
    return parent


def _check_length(nodes: Sequence[Node], max_context: int) -> None:
    by_id = {node.id: node for node in nodes}
    for leaf in nodes:
        length, node = 0, leaf
        while True:
            length += len(node.ids)
            if node.parent is None:
                break
            node = by_id[node.parent]
        if length > max_context:
            raise LimitExceeded(
                f"a demonstration of {length} tokens or more does not fit into max_context "
                f"{max_context}",
                hint="raise model.max_context, or leave such rows out; none is ever cut",
            )
