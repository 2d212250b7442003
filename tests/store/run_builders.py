"""Small runs, built from the real types. Imported by the tests of this room and of weights."""

import math
from dataclasses import replace

import numpy as np

from treadle.errors import ErrorRecord
from treadle.store import Store
from treadle.types import (
    Group,
    Message,
    Node,
    Party,
    Provenance,
    Reward,
    Sample,
    SamplingParams,
    Source,
    Status,
    StopReason,
    Task,
    TokenSpan,
    ToolCall,
    Trajectory,
)

PARAMS = SamplingParams(max_new_tokens=8, temperature=0.7, stop=("\n",), seed=3)


def f32(x: float) -> float:
    """The nearest float32, as an engine returns it."""
    return float(np.float32(x))


def make_task(i: int) -> Task:
    return Task(
        id=f"add-{i}",
        taskset="sums",
        messages=(Message(role="user", content=f"1 + {i} = ?"),),
        data={"answer": str(1 + i), "pair": (1, i), "by_key": {0: "zero", 1: [1.5, None]}},
        date="2026-01-02",
    )


def seen(id: int, parent: int | None, ids: tuple[int, ...], text: str = "") -> Node:
    n = len(ids)
    return Node(
        id=id,
        parent=parent,
        party=Party.ENVIRONMENT,
        source=Source.OBSERVATION,
        ids=ids,
        trained=(False,) * n,
        logprobs=(math.nan,) * n,
        versions=(-1,) * n,
        message=Message(role="tool", content=text, tool_call_id="c1", name="add") if text else None,
    )


def said(id: int, parent: int, ids: tuple[int, ...], version: int = 0) -> Node:
    return Node(
        id=id,
        parent=parent,
        party=Party.POLICY,
        source=Source.SAMPLED,
        ids=ids,
        trained=(True,) * len(ids),
        logprobs=tuple(f32(-0.1 * (k + 1) - 0.003 * i) for k, i in enumerate(ids)),
        versions=(version,) * len(ids),
        message=Message(
            role="assistant",
            content=f"answer {ids}",
            reasoning="hm",
            tool_calls=(ToolCall(id="c1", name="add", arguments='{"a": 1,'),),
        ),
        stop_reason=StopReason.EOS,
        entropies=tuple(f32(0.3 * i) for i in ids),
    )


def make_trajectory(ordinal: int, sample: int, version: int = 0, turns: int = 1) -> Trajectory:
    nodes = [seen(0, None, (1, 2, 3 + ordinal))]
    for turn in range(turns):
        nodes.append(said(2 * turn + 1, 2 * turn, (10 + sample, 11 + turn), version))
        nodes.append(seen(2 * turn + 2, 2 * turn + 1, (20, 21), f"result {turn}"))
    return Trajectory(
        id=f"{ordinal}/{sample}",
        task=make_task(ordinal),
        sample=sample,
        nodes=tuple(nodes[:-1]),
        status=Status.FINISHED,
        sampling=PARAMS,
        reward=Reward(
            value=0.1 * sample,
            parts={"score": 0.1 * sample, "lenient": 1.0},
            flagged=(TokenSpan(1, 0, 1),) if sample else (),
        ),
        duration_s=1.25,
        tool_calls=turns,
        info={"note": "seen", "path": ("a", 1)},
    )


def make_failed(ordinal: int, sample: int) -> Trajectory:
    error = ErrorRecord(kind="ToolError", where="tool add", message="no \ud800", cause="line 1")
    return replace(
        make_trajectory(ordinal, sample),
        status=Status.FAILED,
        reward=Reward(value=None),
        error=error,
    )


def make_group(ordinal: int, size: int = 2, version: int = 0) -> Group:
    return Group(
        ordinal=ordinal,
        task=make_task(ordinal),
        trajectories=tuple(make_trajectory(ordinal, s, version) for s in range(size)),
        version=version,
    )


def rows_of(group: Group) -> list[Sample]:
    """One sample per trajectory of single-branch groups, as the batch room makes them."""
    rows = []
    for t in group.trajectories:
        columns = {
            name: tuple(v for node in t.nodes for v in getattr(node, name))
            for name in ("ids", "trained", "logprobs", "versions")
        }
        rows.append(
            Sample(
                trajectory_id=t.id,
                ordinal=group.ordinal,
                advantages=tuple(t.sample - 0.5 if on else math.nan for on in columns["trained"]),
                temperature=t.sampling.temperature,
                **columns,
            )
        )
    return rows


def run_step(store: Store, step: int, groups_per_step: int = 1, **more) -> list[Sample]:
    """A whole synchronous step on fresh prompts."""
    samples = []
    first = store.frontier().next_ordinal
    ordinals = range(first, first + groups_per_step)
    for ordinal in ordinals:
        store.start_group(ordinal, make_task(ordinal))
        group = make_group(ordinal, version=step - 1)
        store.publish_group(group)
        samples += rows_of(group)
    store.commit_step(
        step,
        version=step,
        ordinals=list(ordinals),
        samples=samples,
        metrics={"loss": 1.0 / step},
        **more,
    )
    return samples


PROVENANCE = {
    "model": Provenance(source="hub:tiny", license="apache-2.0", sha256="ab"),
    "tasks.0": Provenance(source="own", license="cc-by-4.0"),
}
