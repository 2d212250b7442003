"""One conversation of a policy with its task, recorded token by token.

Guarantees (contracts 1, 2, 5):
- a node of the policy holds exactly the ids, logprobs and versions the sampler returned, all
  trained; every other token is untrained, with NaN and -1;
- a reply whose numbers do not add up (a logprob missing, not finite or above 0, more tokens than
  asked for) is refused with the reason, never repaired;
- where the chat template would print the past differently, a new branch starts with a freshly
  rendered, untrained prompt: nothing is trained twice, and `forks` counts it;
- limits end the conversation by LimitExceeded, and `ended` says as what.

Takes: new messages. Gives: the assistant's message; nodes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treadle.errors import (
    ContractError,
    HarnessError,
    LimitExceeded,
    SamplerError,
    boundary,
)
from treadle.render import PrefixUnstable, Renderer, ToolSpec, markers
from treadle.types import (
    Completion,
    Message,
    Node,
    Party,
    Sampler,
    SamplingParams,
    Source,
    Status,
    StopReason,
)

LOGPROB_SLACK = 1e-3
"""Nats above 0 that rounding may give a logprob of a near-certain token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one trajectory may use."""

    max_turns: int
    """Sampler calls."""
    max_context: int
    """Tokens of one branch, prompt included."""
    deadline: float = math.inf
    """Event-loop time (`loop.time()`) at which the trajectory is ABORTED."""


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
        self._sampler = sampler
        self._renderer = renderer
        self._session = session
        self._sampling = sampling
        self._limits = limits
        self._tools = tuple(tools)
        self._busy = False
        self._ids: tuple[int, ...] = ()
        self._leaf: int | None = None
        self.seed = seed
        self.nodes: list[Node] = []
        self.messages: list[Message] = []
        self.turns = 0
        self.forks = 0
        self.tool_calls = 0
        self.tool_errors = 0
        self.unread_tool_marks = 0
        """Marks of tool calls, of any family, in turns in which no call could be read."""
        self.info: dict[str, Any] = {}
        """What the harness wants to keep; JSON values."""
        self.state = "before its first turn"
        """What the conversation is doing, for the message of a time-out."""
        self.ended: Status | None = None
        """TRUNCATED or ABORTED once a limit has ended the conversation."""
        self.end_reason = ""

    @property
    def stop_reason(self) -> StopReason | None:
        """Of the last turn; None before the first."""
        for node in reversed(self.nodes):
            if node.party is Party.POLICY:
                return node.stop_reason
        return None

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
            raise HarnessError(f"session {self._session}: two turns at once on one chat")
        self._busy = True
        try:
            return await self._turn(tuple(new_messages))
        finally:
            self._busy = False

    async def _turn(self, new: tuple[Message, ...]) -> Message:
        self._check_limits()
        self.state = f"rendering the prompt of turn {self.turns + 1}"
        prompt, parent = self._prompt(new)
        room = self._limits.max_context - len(prompt)
        if room < 1:
            raise self._end(
                Status.TRUNCATED,
                f"context limit in turn {self.turns + 1}: prompt of {len(prompt)} tokens, "
                f"max_context {self._limits.max_context}",
            )
        params = self._params(room)
        self._observe(prompt, parent, new)
        self.state = f"waiting for the sampler in turn {self.turns + 1} ({len(prompt)} tokens)"
        with boundary(SamplerError, f"session {self._session}, turn {self.turns + 1}"):
            completion = await self._sampler.sample(self._session, prompt, params)
        check_completion(
            completion, params.max_new_tokens, f"session {self._session}, turn {self.turns + 1}"
        )
        message = self._record(completion)
        if completion.stop_reason is StopReason.ABORTED:
            raise self._end(
                Status.ABORTED,
                f"the sampler gave up turn {self.turns} after {len(completion.ids)} tokens",
            )
        self.state = f"after turn {self.turns}, in the harness"
        return message

    # ----------------------------------------------------------------------- steps of a turn

    def _check_limits(self) -> None:
        if self.ended is not None:
            raise LimitExceeded(self.end_reason)
        if self.turns >= self._limits.max_turns:
            raise self._end(Status.TRUNCATED, f"turn limit: {self.turns} turns used")
        if self._time_left() <= 0:
            raise self._end(Status.ABORTED, f"time limit reached before turn {self.turns + 1}")

    def _time_left(self) -> float:
        return self._limits.deadline - asyncio.get_running_loop().time()

    def _end(self, status: Status, reason: str) -> LimitExceeded:
        self.ended, self.end_reason = status, reason
        return LimitExceeded(reason)

    def _prompt(self, new: tuple[Message, ...]) -> tuple[tuple[int, ...], int | None]:
        """Prompt ids and the node they continue; None = a new root."""
        if not self.nodes:
            return self._renderer.prompt(new, self._tools), None
        history = self.messages
        try:
            prompt = self._renderer.extend(self._ids, new, self._tools, history=history)
        except PrefixUnstable:
            self.forks += 1
            return self._renderer.prompt([*history, *new], self._tools), None
        if prompt[: len(self._ids)] != self._ids:
            raise ContractError(
                f"session {self._session}: the prompt of turn {self.turns + 1} does not start "
                f"with the {len(self._ids)} tokens it continues"
            )
        return prompt, self._leaf

    def _params(self, room: int) -> SamplingParams:
        params = self._sampling(self.turns)
        return replace(
            params,
            max_new_tokens=min(params.max_new_tokens, room),
            deadline_s=min(params.deadline_s, self._time_left()),
        )

    def _observe(
        self, prompt: tuple[int, ...], parent: int | None, new: tuple[Message, ...]
    ) -> None:
        """One node per new message; the last one holds the tokens of all of them."""
        added = prompt if parent is None else prompt[len(self._ids) :]
        self._leaf = parent
        for message in new[:-1]:
            self._append(Party.ENVIRONMENT, Source.OBSERVATION, (), message)
        last = new[-1] if new else None
        self._append(Party.ENVIRONMENT, Source.OBSERVATION, added, last)
        self._ids = prompt
        self.messages += new

    def _record(self, completion: Completion) -> Message:
        message = self._renderer.parse(
            completion.ids, tools=bool(self._tools), first_call=self.tool_calls
        )
        if self._tools and not message.tool_calls:
            self.unread_tool_marks += markers(message.content)
        self._append(
            Party.POLICY,
            Source.SAMPLED,
            completion.ids,
            message,
            trained=True,
            logprobs=completion.logprobs,
            versions=completion.versions,
            entropies=completion.entropies,
            stop_reason=completion.stop_reason,
        )
        self._ids += completion.ids
        self.messages.append(message)
        self.turns += 1
        return message

    def _append(
        self,
        party: Party,
        source: Source,
        ids: tuple[int, ...],
        message: Message | None,
        *,
        trained: bool = False,
        logprobs: tuple[float, ...] | None = None,
        versions: tuple[int, ...] | None = None,
        entropies: tuple[float, ...] = (),
        stop_reason: StopReason | None = None,
    ) -> None:
        node = Node(
            id=len(self.nodes),
            parent=self._leaf,
            party=party,
            source=source,
            ids=ids,
            trained=(trained,) * len(ids),
            logprobs=(math.nan,) * len(ids) if logprobs is None else logprobs,
            versions=(-1,) * len(ids) if versions is None else versions,
            message=message,
            stop_reason=stop_reason,
            entropies=entropies,
        )
        self.nodes.append(node)
        self._leaf = node.id


def check_completion(completion: Completion, max_new_tokens: int, where: str) -> None:
    """Refuse a completion whose numbers cannot be trained on, with the reason (SamplerError)."""
    n = len(completion.ids)
    lengths = {
        "logprobs": len(completion.logprobs),
        "versions": len(completion.versions),
        "entropies": len(completion.entropies) or n,
    }
    for name, length in lengths.items():
        if length != n:
            raise SamplerError(
                f"{where}: the sampler returned {n} ids but {length} {name}",
                hint="the engine must return one per sampled token, the stop id included",
            )
    if n > max_new_tokens:
        raise SamplerError(
            f"{where}: the sampler returned {n} tokens, {max_new_tokens} were allowed"
        )
    for i, (logprob, version) in enumerate(
        zip(completion.logprobs, completion.versions, strict=True)
    ):
        if not math.isfinite(logprob) or logprob > LOGPROB_SLACK:
            raise SamplerError(
                f"{where}: token {i} of {n} has logprob {logprob}, expected a finite number <= 0",
                hint="a token without a behaviour logprob cannot be trained on",
            )
        if version < 0:
            raise SamplerError(f"{where}: token {i} of {n} has policy version {version}")
