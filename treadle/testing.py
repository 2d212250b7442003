"""A sampler that says what it is told, for tests of everything above the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from treadle.errors import SamplerError
from treadle.types import Completion, SamplerCapabilities, SamplingParams, StopReason


class Hang:
    """A reply that never comes."""


Reply = str | tuple[int, ...] | Completion | Exception | Hang
"""Text (encoded, the stop id added), exact ids (the stop reason follows from the last one), a
whole completion, an error to raise, or nothing at all. Ids beyond max_new_tokens are cut, and the
turn then ends by LENGTH; a Completion is passed on as it is."""


@dataclass(kw_only=True)
class ScriptedSampler:
    """Implements `treadle.types.Sampler`.

    `script` is a list with one reply per turn, the same for every session, or a function of
    (session, turn) for anything else. What it was asked is kept in `calls`.
    """

    script: Sequence[Reply] | Callable[[str, int], Reply]
    encode: Callable[[str], Sequence[int]] = lambda text: tuple(text.encode())
    stop_ids: Sequence[int] = (0,)
    version: int = 0
    calls: list[tuple[str, tuple[int, ...], SamplingParams]] = field(default_factory=list)
    groups: dict[str, str] = field(default_factory=dict)
    """Group of every session ever opened."""
    open_sessions: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)
    logprob: float = -0.5

    @property
    def capabilities(self) -> SamplerCapabilities:
        return SamplerCapabilities(release=True, score=False, shared_prefix=True, entropies=True)

    async def open(self, session: str, *, group: str = "") -> None:
        if session in self.groups:
            raise SamplerError(f"session {session} was opened before")
        self.groups[session] = group
        self.open_sessions.add(session)

    async def sample(
        self, session: str, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        if session not in self.open_sessions:
            raise SamplerError(f"session {session} is not open")
        turn = self.turns.get(session, 0)
        self.turns[session] = turn + 1
        self.calls.append((session, tuple(prompt), params))
        await asyncio.sleep(0)
        if callable(self.script):
            reply = self.script(session, turn)
        elif turn < len(self.script):
            reply = self.script[turn]
        else:
            raise SamplerError(f"the script has {len(self.script)} replies, turn {turn} was asked")
        return await self._complete(reply, prompt, params)

    async def _complete(
        self, reply: Reply, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        if isinstance(reply, Completion):
            return reply
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Hang):
            await asyncio.Event().wait()
            raise AssertionError("unreachable")
        ids = (*self.encode(reply), self.stop_ids[0]) if isinstance(reply, str) else reply
        ids = tuple(ids[: params.max_new_tokens])
        stopped = bool(ids) and ids[-1] in self.stop_ids
        return Completion(
            ids=ids,
            logprobs=tuple(self.logprob - 0.01 * i for i in range(len(ids))),
            versions=(self.version,) * len(ids),
            entropies=(0.7,) * len(ids),
            stop_reason=StopReason.EOS if stopped else StopReason.LENGTH,
            prompt_tokens=len(prompt),
        )

    async def score(
        self, ids: Sequence[int], start: int, *, temperature: float = 1.0
    ) -> tuple[float, ...]:
        raise SamplerError("a script cannot score")

    async def release(self, session: str) -> None:
        self.open_sessions.discard(session)
        self.released.append(session)
