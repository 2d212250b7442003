"""One conversation of a policy with its task, recorded token by token.

Guarantees (contracts 1, 2, 5): those of the recorder, for one straight line of turns; a harness
that works otherwise (parallel sub-agents, rewritten history) uses `recorder` itself.

Takes: new messages. Gives: the assistant's message; nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from treadle.errors import HarnessError
from treadle.gateway.recorder import ContextExceeded, Limits, Place, Recorder
from treadle.render import Renderer, ToolSpec
from treadle.types import Message, Node, Sampler, SamplingParams, Status, StopReason


class Chat:
    """A policy's side of one trajectory; one per session, one turn at a time.

    Args:
        session: already opened on `sampler`; the caller releases it.
        sampling: parameters of turn i, so that each turn has a seed of its own.
        tools: specs that the prompt shows; replies are searched for calls only if there are any.
        seed: of the trajectory, for a harness that draws random numbers.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        *,
        session: str,
        sampling: Callable[[int], SamplingParams],
        limits: Limits,
        tools: Sequence[ToolSpec] = (),
        seed: int = 0,
    ) -> None:
        self.recorder = Recorder(
            sampler, renderer, session=session, sampling=sampling, limits=limits
        )
        self._tools = tuple(tools)
        self._busy = False
        self._place = Place()
        self.seed = seed
        self.messages: list[Message] = []
        self.tool_calls = 0
        self.tool_errors = 0
        self.info: dict[str, Any] = {}
        """What the harness wants to keep; JSON values."""

    @property
    def nodes(self) -> list[Node]:
        return self.recorder.nodes

    @property
    def turns(self) -> int:
        return self.recorder.turns

    @property
    def forks(self) -> int:
        return self.recorder.forks

    @property
    def unread_tool_marks(self) -> int:
        """Marks of tool calls, of any family, in turns in which no call could be read."""
        return self.recorder.unread_tool_marks

    @property
    def state(self) -> str:
        """What the conversation is doing, for the message of a time-out."""
        return self.recorder.state

    @state.setter
    def state(self, value: str) -> None:
        self.recorder.state = value

    @property
    def ended(self) -> Status | None:
        """TRUNCATED or ABORTED once a limit has ended the conversation."""
        return self.recorder.ended

    @ended.setter
    def ended(self, value: Status | None) -> None:
        self.recorder.ended = value

    @property
    def end_reason(self) -> str:
        return self.recorder.end_reason

    @end_reason.setter
    def end_reason(self, value: str) -> None:
        self.recorder.end_reason = value

    @property
    def stop_reason(self) -> StopReason | None:
        """Of the last turn; None before the first."""
        return self.recorder.stop_reason

    @property
    def truncated(self) -> bool:
        """The last turn was cut by its length: what it says may be half a sentence."""
        return self.stop_reason is StopReason.LENGTH

    async def turn(self, new_messages: Sequence[Message]) -> Message:
        """Show the policy new messages and return its reply.

        Raises LimitExceeded at the turn, context or time limit (nothing is sampled then, or the
        sampler gave up), SamplerError when the reply cannot be trusted, DataError when the chat
        template refuses the messages.
        """
        if self._busy:
            raise HarnessError(f"session {self.recorder.session}: two turns at once on one chat")
        self._busy = True
        try:
            return await self._turn(tuple(new_messages))
        finally:
            self._busy = False

    async def _turn(self, new: tuple[Message, ...]) -> Message:
        try:
            turn = await self.recorder.turn(self._place, new, tools=self._tools)
        except ContextExceeded as error:  # a straight line has nowhere else to go
            raise self.recorder.end(Status.TRUNCATED, error.message) from None
        self.messages += (*new, turn.message)
        self._place = Place(turn.node, self.recorder.ids(turn.node), tuple(self.messages))
        return turn.message


__all__ = ["Chat", "Limits"]
