"""The start-up proof that renderer and template agree, cell by cell on a grid.

Each cell is a conversation (system message or not, 1 to 4 user turns, tool calls or not,
thinking or not). It is walked as a rollout would: prompt, turn, splice, turn; and at each prompt
the spliced ids must equal what the tokenizer's own `apply_chat_template` gives for the whole.

Takes: a Renderer. Gives: a TemplateReport, for `doctor`, the ledger and the loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal

from treadle.errors import ModelError, TreadleError
from treadle.render.splice import Shape, first_difference, readable_difference, stand_ins
from treadle.render.template import PROBE_CALL, PROBE_TOOL
from treadle.types import Message

if TYPE_CHECKING:
    from treadle.render.renderer import Renderer

Outcome = Literal["stable", "unstable", "unsupported", "wrong"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One conversation of the grid."""

    system: bool
    turns: int
    tools: bool
    thinking: bool
    outcome: Outcome
    """stable: spliced ids equal the template's at every prompt. unstable: the template rewrites
    the past, such conversations fork. unsupported: the template refuses the roles. wrong: ids
    differ though the template looked stable; never trained on."""
    token: int = -1
    """First differing token of an unstable or wrong cell."""
    detail: str = ""

    @property
    def reason(self) -> str:
        """The detail without its position in the tokens."""
        return self.detail.partition(";")[0]

    @property
    def name(self) -> str:
        parts = ["system" if self.system else "no system", f"{self.turns} turns"]
        parts += [p for p, on in (("tools", self.tools), ("thinking", self.thinking)) if on]
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class TemplateReport:
    """What is known of a tokenizer's template."""

    hash: str
    """sha256 of the template: part of a run's provenance."""
    cells: tuple[Cell, ...]
    num_bos: int
    """BOS ids at the start of a prompt: 0 where the template writes none, never above 1."""
    turn_end: tuple[int, ...]
    """Ids that the template ends an assistant turn with."""
    turn_end_text: str
    stops_at_turn_end: bool
    """One of the stop ids is what the template ends a turn with."""
    turn_end_special: bool
    """The template ends a turn with a token of its own, not with plain text."""
    has_system: bool
    native_tools: bool
    """False: tools are written as text (Hermes form), as the template shows none."""
    tool_syntax: str | None
    """Syntax of tool calls, proven by one round trip; None = not readable."""
    reasoning: str
    """field | inline | dropped"""
    opens_thinking: bool
    """The generation prompt opens a think tag."""

    def count(self, outcome: Outcome) -> int:
        return sum(c.outcome == outcome for c in self.cells)

    @property
    def problems(self) -> tuple[str, ...]:
        """What makes training on this template wrong, whatever the tasks."""
        found = []
        if self.num_bos > 1:
            found.append(f"prompts start with {self.num_bos} BOS tokens, expected at most 1")
        if self.turn_end_special and not self.stops_at_turn_end:
            found.append(
                f"the template ends a turn with {self.turn_end_text!r} (ids "
                f"{list(self.turn_end)}), which holds none of the model's stop ids"
            )
        found += [f"{c.name}: {c.detail}" for c in self.cells if c.outcome == "wrong"]
        return tuple(found)

    def require(self, *, tools: bool = False) -> None:
        """Raise ModelError unless rollouts (with tools) can be trained on this template."""
        found = list(self.problems)
        if tools and self.tool_syntax is None:
            found.append(
                "tool calls as this template prints them cannot be read back "
                f"(a call of `{PROBE_CALL.name}` did not survive the round trip)"
            )
        if found:
            raise ModelError(
                "the chat template cannot be trained on: " + "; ".join(found),
                hint="fix chat_template or eos_token_id of the model directory, or use "
                "another model; `treadle doctor` shows the whole grid",
            )

    def lines(self) -> list[str]:
        """For people: a summary, then every cell that is not stable."""
        kinds: tuple[Outcome, ...] = ("stable", "unstable", "unsupported", "wrong")
        counts = ", ".join(f"{self.count(k)} {k}" for k in kinds if self.count(k))
        out = [
            f"template {self.hash[:12]}: {counts} of {len(self.cells)} conversations",
            f"turn ends with {self.turn_end_text!r}; tools "
            f"{'native' if self.native_tools else 'as text'}, syntax {self.tool_syntax}; "
            f"thinking {self.reasoning}{', opened by the prompt' if self.opens_thinking else ''}",
        ]
        for outcome, reason in dict.fromkeys(
            (c.outcome, c.reason) for c in self.cells if c.outcome != "stable"
        ):
            alike = [c for c in self.cells if (c.outcome, c.reason) == (outcome, reason)]
            out.append(f"{len(alike)} {outcome}, e.g. {alike[0].name}: {alike[0].detail}")
        return out + [f"problem: {p}" for p in self.problems]


def examine(renderer: Renderer) -> TemplateReport:
    """Walk the grid. A few hundred renders, well under a second."""
    template = renderer.template
    prompt = renderer.prompt([Message(role="user", content="probe question")])
    bos = template.tokenizer.bos_token_id
    added = template.tokenizer.added_tokens_decoder
    num_bos = 0
    while num_bos < len(prompt) and bos is not None and prompt[num_bos] == bos:
        num_bos += 1
    switches = product((False, True), repeat=3)
    cells = tuple(cell for on in switches for cell in _walk(renderer, *on))
    return TemplateReport(
        hash=template.hash,
        cells=cells,
        num_bos=num_bos,
        turn_end=renderer.turn_end,
        turn_end_text=template.decode(renderer.turn_end),
        stops_at_turn_end=renderer.stops_at_turn_end,
        turn_end_special=any(i in added for i in renderer.turn_end),
        has_system=template.has_system,
        native_tools=template.native_tools,
        tool_syntax=renderer.tool_syntax,
        reasoning=template.reasoning,
        opens_thinking=template.opens_thinking,
    )


_MAX_TURNS = 4


def _shapes(system: bool, tools: bool, thinking: bool) -> list[Shape]:
    out: list[Shape] = [("system", True, False, 0)] if system else []
    for _ in range(_MAX_TURNS):
        out.append(("user", True, False, 0))
        if tools:
            out += [("assistant", False, thinking, 1), ("tool", True, False, 0)]
        out.append(("assistant", True, thinking, 0))
    return out


def _walk(renderer: Renderer, system: bool, tools: bool, thinking: bool) -> list[Cell]:
    """The four cells of 1 to 4 turns: what befalls one befalls those that continue it."""
    shapes = _shapes(system, tools, thinking)
    messages = stand_ins(shapes)
    cells: list[Cell] = []
    outcome: Outcome = "stable"
    token, detail, start, ids = -1, "", 0, ()
    for end, message in enumerate(messages):
        if message.role != "assistant":
            continue
        if outcome == "stable":
            outcome, token, detail, ids = _prompt(renderer, shapes, messages, start, end, ids)
        start = end + 1
        if message.content:  # the reply that closes a user's turn
            cells.append(
                Cell(
                    system=system,
                    turns=len(cells) + 1,
                    tools=tools,
                    thinking=thinking,
                    outcome=outcome,
                    token=token,
                    detail=detail,
                )
            )
    return cells


def _prompt(
    renderer: Renderer,
    shapes: list[Shape],
    messages: list[Message],
    start: int,
    end: int,
    ids: tuple[int, ...],
) -> tuple[Outcome, int, str, tuple[int, ...]]:
    """The prompt for messages[end], given the ids of the prompt for messages[start - 1]."""
    template = renderer.template
    specs = (PROBE_TOOL,) if any(s[3] for s in shapes) else ()
    try:
        expected = template.reference_ids(messages[:end], specs, generation=True)
    except TreadleError as error:
        return "unsupported", -1, error.message, ids
    if start == 0:
        ids = renderer.prompt(messages[:end], specs)
    else:
        verdict = renderer.judge(shapes[:start], shapes[start:end], tools=bool(specs))
        if not verdict.stable:
            return "unstable", verdict.token, verdict.reason, ids
        sampled = template.encode_after(verdict.turn) + _stop(renderer)
        new, history = messages[start:end], messages[:start]
        ids = renderer.extend((*ids, *sampled), new, specs, history=history)
    if ids != expected:
        detail = readable_difference(template, ids, expected)
        return "wrong", first_difference(ids, expected), detail, ids
    return "stable", -1, "", ids


def _stop(renderer: Renderer) -> tuple[int, ...]:
    """What a model emits to end a turn: the template's own end, up to the stop id."""
    for i, token in enumerate(renderer.turn_end):
        if token in renderer.stop_ids:
            return renderer.turn_end[: i + 1]
    return ()
