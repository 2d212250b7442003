"""The turns of one trajectory as a graph of nodes: what `Chat` and the gateway record with.

Guarantees (contracts 1, 2, 5):
- a node of the policy holds exactly the ids, logprobs and versions the sampler returned, all
  trained; every other token is untrained, with NaN and -1;
- a reply whose numbers do not add up (a logprob missing, not finite or above 0, more tokens than
  asked for) is refused with the reason, never repaired;
- where the chat template would print the past differently, a new branch starts with a freshly
  rendered, untrained prompt: nothing is trained twice, and `forks` counts it;
- limits end the trajectory by LimitExceeded, and `ended` says as what;
- turns from different places may overlap in time, each on a sampler session of its own: nodes
  are only ever appended, parents first.

Takes: a place in the graph and new messages. Gives: nodes, and the place after the reply.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from treadle.errors import ContractError, LimitExceeded, SamplerError, boundary
from treadle.render import PrefixUnstable, Renderer, ToolSpec, markers
from treadle.sampler.checks import LOGPROB_SLACK
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one trajectory may use."""

    max_turns: int
    """Sampler calls."""
    max_context: int
    """Tokens of one branch, prompt included."""
    deadline: float = math.inf
    """Event-loop time (`loop.time()`) at which the trajectory is ABORTED."""


class ContextExceeded(LimitExceeded):
    """The prompt leaves no room for a reply. Nothing was sampled."""

    def __init__(self, message: str, *, hint: str = "", prompt: int = 0, limit: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.prompt_tokens = prompt
        self.max_context = limit


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn can begin: before anything, after a reply, or at a prompt already recorded."""

    leaf: int | None = None
    """The node; None = before anything."""
    ids: tuple[int, ...] = ()
    """All tokens from the root to the node."""
    messages: tuple[Message, ...] = ()
    """What they say."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply and the places around it."""

    message: Message
    completion: Completion
    prompt: int
    """Node that ends the prompt."""
    node: int
    """Node of the reply."""
    prompt_tokens: int
    params: SamplingParams
    """What was really asked of the sampler."""


class Recorder:
    """The graph of one trajectory, and the only way to add a turn to it.

    Args:
        session: already opened on `sampler`; the caller releases it.
        sampling: parameters of turn i, so that each turn has a seed of its own.
    """

    def __init__(
        self,
        sampler: Sampler,
        renderer: Renderer,
        *,
        session: str,
        sampling: Callable[[int], SamplingParams],
        limits: Limits,
    ) -> None:
        self.sampler = sampler
        self.renderer = renderer
        self.session = session
        self.sampling = sampling
        self.limits = limits
        self.nodes: list[Node] = []
        self.started = 0
        """Turns that were begun; the index of the next one."""
        self.turns = 0
        """Turns that were answered and recorded."""
        self.forks = 0
        self.calls = 0
        """Tool calls read so far; the next call's number."""
        self.unread_tool_marks = 0
        """Marks of tool calls, of any family, in turns in which no call could be read."""
        self.state = "before its first turn"
        """What the trajectory is doing, for the message of a time-out."""
        self.ended: Status | None = None
        """TRUNCATED or ABORTED once a limit has ended the trajectory."""
        self.end_reason = ""

    # ----------------------------------------------------------------------- the graph

    @property
    def stop_reason(self) -> StopReason | None:
        """Of the last turn; None before the first."""
        for node in reversed(self.nodes):
            if node.party is Party.POLICY:
                return node.stop_reason
        return None

    def ids(self, leaf: int | None) -> tuple[int, ...]:
        """All tokens from the root to `leaf`."""
        parts: list[tuple[int, ...]] = []
        while leaf is not None:
            parts.append(self.nodes[leaf].ids)
            leaf = self.nodes[leaf].parent
        return tuple(i for part in reversed(parts) for i in part)

    def untrain(self, node: int) -> None:
        """Keep a reply that its reader never got as a record, and let nothing learn from it."""
        old = self.nodes[node]
        blank = len(old.ids)
        self.nodes[node] = replace(
            old, trained=(False,) * blank, logprobs=(math.nan,) * blank, versions=(-1,) * blank
        )

    # ----------------------------------------------------------------------- a turn

    async def turn(
        self,
        place: Place,
        new: tuple[Message, ...],
        *,
        tools: Sequence[ToolSpec] = (),
        prompt: tuple[int, ...] | None = None,
        session: str = "",
        max_new_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        read: Callable[[Completion], Message] | None = None,
    ) -> Turn:
        """Show the policy `new` after `place` and record its reply.

        Args:
            prompt: its ids, where they are not the renderer's to make (plain completions); they
                start with those of `place`.
            session: of the sampler; empty = the trajectory's own.
            max_new_tokens: a bound below the run's own.
            stop: further stop strings.
            read: the message that a completion says; None = as the renderer parses it.

        Raises LimitExceeded at the turn, context or time limit (nothing is sampled then, or the
        sampler gave up), SamplerError when the reply cannot be trusted, DataError when the chat
        template refuses the messages.
        """
        self.check_limits()
        number = self.started + 1
        self.state = f"rendering the prompt of turn {number}"
        if prompt is None:
            ids, parent = self._prompt(place, new, tools)
        else:
            ids, parent = prompt, place.leaf
        base = len(place.ids) if parent is not None else 0
        if ids[:base] != place.ids[:base]:
            raise ContractError(
                f"session {self.session}: the prompt of turn {number} does not start "
                f"with the {base} tokens it continues"
            )
        params = self._params(len(ids), max_new_tokens, stop)
        self.started += 1
        leaf = self._observe(ids[base:], parent, new)
        self.state = f"waiting for the sampler in turn {number} ({len(ids)} tokens)"
        where = f"session {self.session}, turn {number}"
        with boundary(SamplerError, where):
            completion = await self.sampler.sample(session or self.session, ids, params)
        check_completion(completion, params.max_new_tokens, where)
        message = self._parse(completion, bool(tools)) if read is None else read(completion)
        if tools and not message.tool_calls:
            self.unread_tool_marks += markers(message.content)
        self.calls += len(message.tool_calls)
        node = self._append(
            leaf,
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
        self.turns += 1
        if completion.stop_reason is StopReason.ABORTED:
            raise self.end(
                Status.ABORTED,
                f"the sampler gave up turn {number} after {len(completion.ids)} tokens",
            )
        self.state = f"after turn {number}, in the harness"
        return Turn(message, completion, leaf, node, len(ids), params)

    def check_limits(self) -> None:
        """Raises LimitExceeded where no further turn may begin."""
        if self.ended is not None:
            raise LimitExceeded(self.end_reason)
        if self.started >= self.limits.max_turns:
            raise self.end(Status.TRUNCATED, f"turn limit: {self.started} turns used")
        if self.time_left() <= 0:
            raise self.end(Status.ABORTED, f"time limit reached before turn {self.started + 1}")

    def time_left(self) -> float:
        return self.limits.deadline - asyncio.get_running_loop().time()

    def end(self, status: Status, reason: str) -> LimitExceeded:
        """The trajectory is over; later turns raise the same."""
        self.ended, self.end_reason = status, reason
        return LimitExceeded(reason)

    # ----------------------------------------------------------------------- steps of a turn

    def _prompt(
        self, place: Place, new: tuple[Message, ...], tools: Sequence[ToolSpec]
    ) -> tuple[tuple[int, ...], int | None]:
        """Prompt ids and the node they continue; None = a new root."""
        if place.leaf is None:
            return self.renderer.prompt(new, tools), None
        if not new and self.nodes[place.leaf].party is not Party.POLICY:
            return place.ids, place.leaf  # this very prompt, once more
        history = place.messages
        try:
            ids = self.renderer.extend(place.ids, new, tools, history=history)
        except PrefixUnstable:
            self.forks += 1
            return self.renderer.prompt([*history, *new], tools), None
        return ids, place.leaf

    def _params(
        self, prompt_tokens: int, max_new_tokens: int | None, stop: tuple[str, ...]
    ) -> SamplingParams:
        room = self.limits.max_context - prompt_tokens
        if room < 1:
            raise ContextExceeded(
                f"context limit in turn {self.started + 1}: prompt of {prompt_tokens} tokens, "
                f"max_context {self.limits.max_context}",
                prompt=prompt_tokens,
                limit=self.limits.max_context,
            )
        left_s = self.time_left()
        if left_s <= 0:
            raise self.end(
                Status.ABORTED,
                f"time limit reached while the prompt of turn {self.started + 1} was rendered",
            )
        params = self.sampling(self.started)
        wanted = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        return replace(
            params,
            max_new_tokens=min(params.max_new_tokens, wanted, room),
            stop=(*params.stop, *(s for s in stop if s not in params.stop)),
            deadline_s=min(params.deadline_s, left_s),
        )

    def _observe(self, added: tuple[int, ...], parent: int | None, new: tuple[Message, ...]) -> int:
        """One node per new message; the last one holds the tokens of all of them."""
        leaf = parent
        if leaf is not None and not new and not added:
            return leaf
        for message in new[:-1]:
            leaf = self._append(leaf, Party.ENVIRONMENT, Source.OBSERVATION, (), message)
        last = new[-1] if new else None
        return self._append(leaf, Party.ENVIRONMENT, Source.OBSERVATION, added, last)

    def _parse(self, completion: Completion, tools: bool) -> Message:
        return self.renderer.parse(completion.ids, tools=tools, first_call=self.calls)

    def _append(
        self,
        parent: int | None,
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
    ) -> int:
        node = Node(
            id=len(self.nodes),
            parent=parent,
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
        return node.id


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
