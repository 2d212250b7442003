"""A gateway over a script, for tests: one session, its log, and clients pointed at it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.render.templates import TOOLS, toy_tokenizer
from treadle.gateway.recorder import Limits, Recorder
from treadle.gateway.server import Gateway
from treadle.gateway.sessions import Session
from treadle.render import Renderer
from treadle.testing import Reply, ScriptedSampler
from treadle.types import Completion, Node, SamplingParams, Source

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def renderer(template: str = TOOLS) -> Renderer:
    tokenizer = toy_tokenizer(template)
    return Renderer(tokenizer, [tokenizer.eos_token_id])


class LoggedSampler(ScriptedSampler):
    """Also keeps what it returned."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.log: list[tuple[tuple[int, ...], Completion]] = []
        self.running = 0

    async def sample(
        self, session: str, prompt: Sequence[int], params: SamplingParams
    ) -> Completion:
        self.running += 1
        try:
            completion = await super().sample(session, prompt, params)
        finally:
            self.running -= 1
        self.log.append((tuple(prompt), completion))
        return completion


def sampler_of(r: Renderer, script: Sequence[Reply] | Callable[[str, int], Reply]) -> LoggedSampler:
    return LoggedSampler(
        script=script,
        encode=lambda text: r.template.tokenizer.encode(text, add_special_tokens=False),
        stop_ids=r.stop_ids,
        version=3,
    )


@dataclass
class Bench:
    """One session on a gateway, and everything around it."""

    gateway: Gateway
    session: Session
    recorder: Recorder
    sampler: LoggedSampler
    renderer: Renderer
    http: aiohttp.ClientSession

    @property
    def base_url(self) -> str:
        return self.gateway.base_url(self.session)

    async def post(
        self, path: str, body: Any, *, url: str = "", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        data = {"data": body} if isinstance(body, bytes) else {"json": body}
        address = f"{url or self.base_url}/{path}"
        async with self.http.post(address, headers=headers, **data) as reply:
            return reply.status, await reply.json(content_type=None)

    async def chat(self, *messages: Any, headers: dict[str, str] | None = None, **more: Any) -> Any:
        """One chat completion; messages are texts of the user, or whole."""
        given = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        body = {"model": "m", "messages": given, **more}
        status, reply = await self.post("chat/completions", body, headers=headers)
        assert status == 200, reply
        return reply["choices"][0]["message"]

    def new_recorder(self, name: str, **changes: Any) -> Recorder:
        return recorder_of(self.sampler, self.renderer, name, **changes)

    @property
    def sampled(self) -> list[Node]:
        return [n for n in self.recorder.nodes if n.source is Source.SAMPLED]

    def branches(self) -> list[tuple[int, ...]]:
        parents = {n.parent for n in self.recorder.nodes}
        leaves = [n.id for n in self.recorder.nodes if n.id not in parents]
        return [self.recorder.ids(leaf) for leaf in leaves]


def recorder_of(
    sampler: ScriptedSampler,
    r: Renderer,
    name: str = "s",
    *,
    max_turns: int = 50,
    max_context: int = 4096,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    deadline_s: float = 60.0,
) -> Recorder:
    return Recorder(
        sampler,
        r,
        session=name,
        sampling=lambda turn: SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=turn,
            deadline_s=deadline_s,
        ),
        limits=Limits(max_turns=max_turns, max_context=max_context),
    )


@contextlib.asynccontextmanager
async def bench(
    script: Sequence[Reply] | Callable[[str, int], Reply],
    *,
    template: str = TOOLS,
    gateway: dict[str, Any] | None = None,
    **changes: Any,
) -> AsyncIterator[Bench]:
    r = renderer(template)
    sampler = sampler_of(r, script)
    recorder = recorder_of(sampler, r, **changes)
    await sampler.open("s")
    async with Gateway(**(gateway or {})) as server, aiohttp.ClientSession() as http:
        session = server.sessions.open(recorder)
        yield Bench(server, session, recorder, sampler, r, http)


def play(coroutine: Any, limit_s: float = 60.0) -> Any:
    """Run a test's coroutine with a bound."""
    return asyncio.run(asyncio.wait_for(coroutine, limit_s))


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait for something that happens soon; fails when it does not."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)
