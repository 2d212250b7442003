"""Messages to tokens and back, by splicing ids: nothing sampled is ever encoded again.

Guarantees (contract 1):
- `extend` returns the ids it was given, untouched, followed by the tokens of what comes after;
- it refuses (PrefixUnstable) where the model's template would print the past in another form
  (thinking dropped, tools moved, another end of turn): the conversation is then forked.

Takes: messages, sampled ids. Gives: prompt ids, messages, a report on the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from treadle.errors import DataError, HarnessError, ModelError, TreadleError
from treadle.render import splice, thinking, tool_syntax
from treadle.render.report import TemplateReport, examine
from treadle.render.splice import Shape, Verdict, after_turn, judge, shape, stand_ins
from treadle.render.template import PROBE_CALL, Template, ToolSpec
from treadle.render.thinking import split_message
from treadle.types import Message, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PrefixUnstable(HarnessError):
    """The template prints the past differently once more follows; start a new branch."""


class Renderer:
    """The two directions for one tokenizer.

    Args:
        tokenizer: with a chat template.
        stop_ids: every id that ends a turn, from the model's generation config.

    Raises ModelError when there is no usable template or no stop id.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        if not stop_ids:
            raise ModelError(
                "no stop id is known, so a turn could never end",
                hint="set eos_token_id in the model's generation_config.json",
            )
        self.template = Template(tokenizer)
        self.stop_ids = tuple(stop_ids)
        self.turn_end = self._find_turn_end()
        self.tool_syntax = self._find_tool_syntax()
        self._syntax: tool_syntax.Syntax = self.tool_syntax or "hermes"
        self._judge = lru_cache(4096)(self._judge_shape)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> tuple[int, ...]:
        """Ids of a conversation's opening, up to where the model starts its turn.

        Raises DataError when the template refuses the messages or would lose a tool call.
        """
        return self.template.encode(self.template.text(messages, tools, generation=True))

    def extend(
        self,
        ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        history: Sequence[Message],
    ) -> tuple[int, ...]:
        """`ids` as they are, then the rest of the turn's end, the new messages, the next prompt.

        Args:
            ids: all tokens so far; they end with the tokens the sampler returned.
            history: the messages that `ids` say, the last one being the assistant's.

        Where the model did not emit its stop id (length, stop string) the template's end of turn
        is part of what is appended. Raises PrefixUnstable where the template would print the
        past differently, DataError where it refuses the messages.
        """
        if not history or history[-1].role != "assistant":
            raise DataError("`extend` continues an assistant turn: history must end with one")
        past = tuple(shape(m) for m in history)
        verdict = self.judge(past, tuple(shape(m) for m in new_messages), tools=bool(tools))
        if not verdict.stable:
            raise PrefixUnstable(
                f"the chat template does not keep its prefix here: {verdict.reason}",
                hint="the conversation goes on in a new branch with a freshly rendered prompt",
            )
        if ids and ids[-1] in self.stop_ids and ids[-1] not in self.turn_end:
            raise PrefixUnstable(
                f"the turn was ended by stop id {ids[-1]}, but the chat template ends one with "
                f"ids {list(self.turn_end)}",
                hint="the conversation goes on in a new branch with a freshly rendered prompt",
            )
        before = stand_ins(past[:-1])
        tail = self.template.encode_after(after_turn(self.template, before, new_messages, tools))
        return (*ids, *tail[self._emitted(ids, tail) :])

    def turn(
        self, history: Sequence[Message], message: Message, tools: Sequence[ToolSpec] = ()
    ) -> tuple[int, ...]:
        """Ids of an assistant turn that nobody sampled, up to and with the id that stops it.

        They continue `prompt(history)`, and are what the template prints there, but for an empty
        block of thoughts that no model writes. Of the end of the turn only what a model emits is
        among them.

        Raises:
            DataError: the template refuses the messages, prints the turn otherwise than as a
                continuation of its prompt, or loses a part of it.
        """
        template = self.template
        if not self.stops_at_turn_end:
            raise DataError(
                f"the template ends a turn with {template.decode(self.turn_end)!r}, not with a "
                "stop id: a demonstrated turn would never stop"
            )
        prompt = template.text(history, tools, generation=True)
        whole = template.text([*history, message], tools, generation=False)
        past = stand_ins([shape(m) for m in history])
        end = after_turn(template, past, (), tools, generation=False)
        if not whole.startswith(prompt) or not whole.endswith(end):
            at = splice.readable_difference(
                template, template.encode(prompt), template.encode(whole)
            )
            raise DataError(
                f"the chat template does not print this turn as a continuation of its prompt: {at}",
                hint="it was made for another form of turn, e.g. one that thinks first",
            )
        written = whole[len(prompt) : len(whole) - len(end)]
        if not split_message(message)[0]:
            written = splice.EMPTY_THOUGHT.sub("", written)
        stop = next(n for n, i in enumerate(self.turn_end) if i in self.stop_ids)
        return (*template.encode_after(written), *self.turn_end[: stop + 1])

    def parse(self, ids: Sequence[int], *, tools: bool = True, first_call: int = 0) -> Message:
        """The assistant message that sampled ids say.

        Args:
            tools: read tool calls; without, their syntax is ordinary text.
            first_call: number of calls so far: ids are call00000, call00001, ... (nine
                alphanumerics, which some templates insist on).
        """
        reasoning, content = thinking.split(self.text(ids), opened=self.template.opens_thinking)
        calls: tool_syntax.Calls = []
        if tools:
            content, calls = tool_syntax.PARSERS[self._syntax](content)
        return Message(
            role="assistant",
            content=content,
            reasoning=reasoning,
            tool_calls=tuple(
                ToolCall(id=f"call{first_call + i:05d}", name=name, arguments=arguments)
                for i, (name, arguments) in enumerate(calls)
            ),
        )

    def text(self, ids: Sequence[int]) -> str:
        """Decoded text of a turn, without the stop id that ended it."""
        ids = tuple(ids)
        return self.template.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def judge(self, history: Sequence[Shape], new: Sequence[Shape], *, tools: bool) -> Verdict:
        """Whether conversations of this shape can be continued by splicing; remembered."""
        return self._judge(tuple(history), tuple(new), tools)

    @property
    def stops_at_turn_end(self) -> bool:
        """One of the stop ids is what the template ends a turn with."""
        return any(i in self.stop_ids for i in self.turn_end)

    def check(self) -> TemplateReport:
        """Prove the renderer against the model's template on a grid of conversations."""
        return examine(self)

    # ----------------------------------------------------------------------- internals

    def _judge_shape(
        self, history: tuple[Shape, ...], new: tuple[Shape, ...], tools: bool
    ) -> Verdict:
        if not self.stops_at_turn_end:
            end = self.template.decode(self.turn_end)
            return Verdict(
                stable=False, reason=f"the template ends a turn with {end!r}, not with a stop id"
            )
        return judge(self.template, history, new, tools=tools)

    def _emitted(self, ids: Sequence[int], tail: Sequence[int]) -> int:
        """How many tokens of the turn's end the model has emitted itself."""
        if not ids or ids[-1] not in self.stop_ids:
            return 0
        count = self.turn_end.index(ids[-1]) + 1
        return count if tuple(tail[:count]) == self.turn_end[:count] else 0

    def _find_turn_end(self) -> tuple[int, ...]:
        """Tokens that the template puts between a turn and whatever follows it."""
        user = Message(role="user", content="probe question")
        last = self.template.encode_after(after_turn(self.template, [user], (), generation=False))
        try:
            more = self.template.encode_after(
                after_turn(self.template, [user], [Message(role="user", content="more")])
            )
        except TreadleError:
            return last
        common = 0
        while common < min(len(last), len(more)) and last[common] == more[common]:
            common += 1
        return last[:common] or last

    def _find_tool_syntax(self) -> tool_syntax.Syntax | None:
        """The syntax in which the template itself prints a call; None = one we cannot read."""
        if not self.template.native_tools:
            return "hermes"
        template = self.template
        user = Message(role="user", content="probe question")
        turn = Message(role="assistant", tool_calls=(PROBE_CALL,))
        try:
            text = template.text([user, turn], generation=False)
        except TreadleError:  # calls only next to definitions: told from these by no one
            return None
        prompt = template.text([user], generation=True)
        body = text.removeprefix(prompt)
        if body == text:
            body = text.partition(user.content)[2]
        body = body.removesuffix(after_turn(template, [user], (), generation=False))
        for name, parse in tool_syntax.PARSERS.items():
            if parse(body)[1] == [(PROBE_CALL.name, PROBE_CALL.arguments)]:
                return name
        return None
