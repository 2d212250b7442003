"""Which trajectories a page shows, and how much of each.

Guarantees: the same run gives the same choice; a page's share of tokens and text is bounded
whatever the run is (constants below); a stored trajectory that cannot be read is shown as
missing, with the reason, and the rest is shown all the same (B150, B151).

Takes: a Store. Gives: plain values for the page's template.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from treadle.errors import ErrorRecord, StoreError
from treadle.evals.answers import gold_of
from treadle.evals.pieces import Pieces
from treadle.evals.visible import middle_out, one_line
from treadle.store import PromptRow, Store, TrajectoryRow
from treadle.types import Node, Source

MAX_TOKENS = 12_000
"""Tokens shown one by one, on the whole page."""
MAX_TOKENS_OF_NODE = 400
MAX_TRAJECTORIES = 160
MAX_TURNS = 24
MAX_TEXT = 4_000
"""Characters of one message, reasoning or call."""
MAX_GROUPS = 24
MAX_DROPPED = 12
MAX_CELLS = 64
"""Trajectories of one group in the grid."""

_SURPRISE_NATS = 5.0
"""-logprob at which a token has its full colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    text: str
    tip: str
    kind: str
    """t = sampled and trained, s = sampled and not trained, o = observed"""
    heat: float
    """0 = certain, 1 = a surprise of 5 nats or more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    title: str
    text: str
    reasoning: str
    calls: tuple[str, ...]
    tokens: tuple[Token, ...]
    num_tokens: int
    sampled: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """One trajectory on the page."""

    row: TrajectoryRow
    anchor: str
    turns: tuple[Turn, ...] = ()
    left_out: int = 0
    """Turns that are not shown."""
    error: ErrorRecord | None = None
    missing: str = ""
    """Why it cannot be shown."""
    answer: str = ""
    gold: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One trajectory in the grid of groups."""

    anchor: str
    """"" when it is not on the page."""
    heat: float | None
    """0..1 from the lowest to the highest reward of the grid; None = unscored."""
    tip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GridRow:
    """One group as a row of cells."""

    ordinal: int
    step: int | None
    taskset: str
    question: str
    note: str
    cells: tuple[Cell, ...]
    more: int
    """Trajectories without a cell."""


@dataclass
class _Budget:
    tokens: int = MAX_TOKENS
    trajectories: int = MAX_TRAJECTORIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """What `choose` chose."""

    sections: tuple[tuple[str, tuple[Shown, ...]], ...]
    grid: tuple[GridRow, ...]
    lowest: float
    highest: float


def choose(store: Store, rows: Sequence[TrajectoryRow], pieces: Pieces) -> Samples:
    """Best, worst, failed and first trajectories, and the groups of the last steps."""
    prompts = {p.ordinal: p for p in store.prompts()}
    groups = _grid_groups(rows, prompts)
    picks = _picks(rows)
    for ordinal in groups:
        taken = {row.id for _, chosen in picks for row in chosen}
        rest = [row for row in groups[ordinal][:MAX_CELLS] if row.id not in taken]
        picks.append((f"group {ordinal}", rest))
    budget = _Budget()
    sections: list[tuple[str, tuple[Shown, ...]]] = []
    for title, chosen in picks:
        shown = tuple(_show(store, row, pieces, budget) for row in _afford(chosen, budget))
        if shown:
            sections.append((title, shown))
    anchors = {s.row.id: s.anchor for _, part in sections for s in part}
    rewards = [r.reward for part in groups.values() for r in part if r.reward is not None]
    low, high = min(rewards, default=0.0), max(rewards, default=0.0)
    grid = tuple(
        _grid_row(store, prompts[ordinal], part, anchors, low, high)
        for ordinal, part in groups.items()
    )
    return Samples(sections=tuple(sections), grid=grid, lowest=low, highest=high)


# --------------------------------------------------------------------------- choosing


def _picks(rows: Sequence[TrajectoryRow]) -> list[tuple[str, list[TrajectoryRow]]]:
    """Titles and trajectories; each trajectory once."""
    steps = sorted({r.step for r in rows if r.step is not None})
    late = set(steps[-max(1, len(steps) // 10) :])
    last = [r for r in rows if r.step in late] if steps else list(rows)
    first = [r for r in rows if steps and r.step == steps[0]] if len(steps) > 3 else []
    failed = [r for r in rows if r.reward is None]
    when = "of the last steps" if steps else "so far"
    taken: set[str] = set()
    return [
        (f"best {when}", _extreme(last, taken, 4, best=True)),
        (f"worst {when}", _extreme(last, taken, 4, best=False)),
        ("failed or unscored", _extreme(failed, taken, 3, best=False)),
        ("best of the first step", _extreme(first, taken, 2, best=True)),
        ("worst of the first step", _extreme(first, taken, 2, best=False)),
    ]


def _extreme(
    rows: Iterable[TrajectoryRow], taken: set[str], count: int, *, best: bool
) -> list[TrajectoryRow]:
    """The first `count` by reward, one per group as long as there are groups; unscored ones
    only where there is nothing else to choose from."""
    rows = [r for r in rows if r.id not in taken]
    scored = [r for r in rows if r.reward is not None]

    def order(row: TrajectoryRow) -> tuple[float, int, int]:
        value = 0.0 if row.reward is None else row.reward
        return (-value if best else value), -row.ordinal, row.sample

    ranked = sorted(scored or rows, key=order)
    seen: set[int] = set()
    again: list[TrajectoryRow] = []
    out: list[TrajectoryRow] = []
    for row in ranked:
        (again if row.ordinal in seen else out).append(row)
        seen.add(row.ordinal)
    out = (out + again)[:count]
    taken.update(r.id for r in out)
    return out


def _afford(rows: Sequence[TrajectoryRow], budget: _Budget) -> Iterable[TrajectoryRow]:
    for row in rows:
        if budget.tokens <= 0 or budget.trajectories <= 0:
            return
        budget.trajectories -= 1
        yield row


def _grid_groups(
    rows: Sequence[TrajectoryRow], prompts: Mapping[int, PromptRow]
) -> dict[int, list[TrajectoryRow]]:
    """Trajectories by ordinal: the groups trained or waiting last, and those dropped last."""
    groups: dict[int, list[TrajectoryRow]] = {}
    for row in rows:
        groups.setdefault(row.ordinal, []).append(row)
    kept = [o for o in groups if prompts[o].state != "dropped"]
    kept.sort(key=lambda o: (prompts[o].step or math.inf, o))
    dropped = [o for o in groups if prompts[o].state == "dropped"]
    return {o: groups[o] for o in [*kept[-MAX_GROUPS:][::-1], *dropped[-MAX_DROPPED:][::-1]]}


# --------------------------------------------------------------------------- showing


def _anchor(row: TrajectoryRow) -> str:
    return f"t-{row.ordinal}-{row.sample}"


def _show(store: Store, row: TrajectoryRow, pieces: Pieces, budget: _Budget) -> Shown:
    shown = Shown(row=row, anchor=_anchor(row), error=row.error)
    try:
        trajectory = store.trajectory(row.id)
    except StoreError as error:
        return replace(shown, missing=error.message)
    nodes = trajectory.nodes
    head = MAX_TURNS * 2 // 3
    kept = nodes if len(nodes) <= MAX_TURNS else nodes[:head] + nodes[head - MAX_TURNS :]
    branched = len({n.parent for n in nodes}) < len(nodes)
    return replace(
        shown,
        turns=tuple(_turn(node, pieces, budget, branched) for node in kept),
        left_out=len(nodes) - len(kept),
        answer=one_line(trajectory.answer, 160),
        gold=gold_of(trajectory.task),
    )


def _turn(node: Node, pieces: Pieces, budget: _Budget, branched: bool) -> Turn:
    message = node.message
    text = "" if message is None else message.content
    role = node.party.value if message is None else message.role
    title = (
        role if node.party.value in (role, "policy", "environment") else f"{role} ({node.party})"
    )
    versions = sorted({v for v in node.versions if v >= 0})
    if versions:
        title += f", version {'-'.join(map(str, {versions[0]: 0, versions[-1]: 0}))}"
    if node.stop_reason is not None:
        title += f", ended by {node.stop_reason}"
    if branched and node.parent is not None:
        title += f", node {node.id} after {node.parent}"
    calls = () if message is None else message.tool_calls
    return Turn(
        title=title,
        text=middle_out(text, MAX_TEXT),
        reasoning="" if message is None else middle_out(message.reasoning, MAX_TEXT),
        calls=tuple(middle_out(f"{c.name}({c.arguments})", MAX_TEXT) for c in calls[:20]),
        tokens=_tokens(node, text, pieces, budget),
        num_tokens=len(node.ids),
        sampled=node.source is Source.SAMPLED,
    )


def _tokens(node: Node, text: str, pieces: Pieces, budget: _Budget) -> tuple[Token, ...]:
    sampled = node.source is Source.SAMPLED
    limit = min(MAX_TOKENS_OF_NODE if sampled else MAX_TOKENS_OF_NODE // 4, budget.tokens)
    shown = range(min(limit, len(node.ids)))
    budget.tokens -= len(shown)
    cut = len(shown) < len(node.ids)
    texts = pieces(node.ids[: len(shown)], "" if cut else text)
    return tuple(
        Token(
            text=texts[i] if texts is not None else str(node.ids[i]),
            tip=_tip(node, i, sampled),
            kind="o" if not sampled else "t" if node.trained[i] else "s",
            heat=round(min(1.0, -node.logprobs[i] / _SURPRISE_NATS), 2)
            if sampled and math.isfinite(node.logprobs[i])
            else 0.0,
        )
        for i in shown
    )


def _tip(node: Node, i: int, sampled: bool) -> str:
    if not sampled:
        return f"id {node.ids[i]}, observed: not trained"
    tip = f"id {node.ids[i]}, logprob {node.logprobs[i]:.3f}"
    if i < len(node.entropies):
        tip += f", entropy {node.entropies[i]:.2f}"
    mask = "trained" if node.trained[i] else "not trained"
    return f"{tip}, version {node.versions[i]}, {mask}"


def _grid_row(
    store: Store,
    prompt: PromptRow,
    rows: Sequence[TrajectoryRow],
    anchors: Mapping[str, str],
    low: float,
    high: float,
) -> GridRow:
    try:
        messages = store.task(prompt.ordinal).messages
        question = one_line(messages[-1].content if messages else "", 90)
    except StoreError as error:
        question = f"missing: {error.message}"
    cells = []
    for row in rows[:MAX_CELLS]:
        heat = None
        if row.reward is not None:
            heat = round((row.reward - low) / (high - low), 2) if high > low else 1.0
        said = "unscored" if row.reward is None else f"reward {row.reward:.3g}"
        tip = f"{row.id}: {said}, {row.status}, {row.num_sampled} tokens"
        cells.append(Cell(anchor=anchors.get(row.id, ""), heat=heat, tip=tip))
    return GridRow(
        ordinal=prompt.ordinal,
        step=prompt.step,
        taskset=prompt.taskset,
        question=question,
        note=f"dropped: {prompt.reason}" if prompt.state == "dropped" else "",
        cells=tuple(cells),
        more=len(rows) - len(cells),
    )
