"""Gateway, router and two built-in engines as one chain: whatever breaks, every count ends at zero.

Nothing here is scripted: the tokens are drawn by a tiny model, and what was recorded is checked
against the engines' own scores of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from tests.gateway import bench
from treadle.config import LoraConfig
from treadle.gateway.recorder import Limits, Recorder
from treadle.gateway.server import Gateway
from treadle.gateway.sessions import Session
from treadle.models.load import load
from treadle.models.policy import Policy
from treadle.models.tiny import build_random
from treadle.render import Renderer
from treadle.sampler.engine import Engine
from treadle.sampler.router import NoReplica, Router, RouterLimits
from treadle.types import SamplingParams, Source

play = partial(bench.play, limit_s=110)
until = partial(bench.until, limit_s=60)
QUICK = RouterLimits(poll_s=0.05, recovery_s=0.5, move_margin=None)
LONG = 150
"""Tokens of a turn that something happens to."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    place: Path = tmp_path_factory.mktemp("model") / "tiny"
    build_random(place, layers=2, hidden=32, heads=4, kv_heads=2, intermediate=64, max_context=2048)
    loaded = load(str(place), max_context=1024)
    # What it says has a known length, so that a turn is long enough to be broken.
    return Policy(replace(loaded, stop_ids=()), lora=LoraConfig(rank=4), dtype=torch.float32)


@dataclass
class Chain:
    gateway: Gateway
    router: Router
    engines: dict[str, Engine]
    renderer: Renderer
    http: aiohttp.ClientSession
    max_new_tokens: int = 8

    async def open(self, name: str, **changes: Any) -> Session:
        await self.router.open(name)
        tokens = changes.get("max_new_tokens", self.max_new_tokens)
        recorder = Recorder(
            self.router,
            self.renderer,
            session=name,
            sampling=lambda turn: SamplingParams(max_new_tokens=tokens, seed=turn, deadline_s=300),
            limits=Limits(max_turns=50, max_context=1000),
        )
        return self.gateway.sessions.open(recorder)

    async def post(
        self, session: Session, *said: dict[str, Any], headers: Any = None, **more: Any
    ) -> tuple[int, Any]:
        body = {"messages": [*(said or (user("hello"),))], **more}
        url = f"{self.gateway.base_url(session)}/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as reply:
            return reply.status, await reply.json(content_type=None)

    def home(self, session: Session) -> str:
        home = self.router.where(session.recorder.session)
        assert home is not None
        return home

    def running(self) -> int:
        return sum(engine.stats().running for engine in self.engines.values())

    async def turn_begun(self, session: Session, tokens: int = 5) -> None:
        """The session's turn is being drawn, and has some of its tokens."""
        engine = self.engines[self.home(session)]
        before = engine.stats().decoded_tokens
        await until(lambda: engine.stats().decoded_tokens >= before + tokens)

    async def check_recorded(self, session: Session) -> int:
        """Every trained token has the logprob that a living engine gives it; how many there are."""
        recorder, count = session.recorder, 0
        for node in recorder.nodes:
            if node.source is not Source.SAMPLED or not any(node.trained):
                continue
            before = recorder.ids(node.parent)
            scores = await self.router.score((*before, *node.ids), len(before))
            assert node.logprobs == pytest.approx(scores, abs=1e-4)
            count += sum(node.trained)
        return count

    async def check_nothing_is_left(self) -> None:
        assert (len(self.gateway.sessions), self.gateway.sessions.in_flight) == (0, 0)
        stats = self.router.stats()
        assert (stats.sessions, stats.placed, stats.waiting, stats.turns) == (0, 0, 0, 0)
        assert not any(stats.per_replica.values())
        for engine in self.engines.values():
            if engine._dead is None:
                load = await engine.load()
                assert (load.sessions, load.running, load.waiting, load.kv_usage) == (0, 0, 0, 0.0)
        assert stats.orphans == 0 or stats.healthy < len(self.engines)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@contextlib.asynccontextmanager
async def chain(
    policy: Policy,
    *,
    limits: RouterLimits = QUICK,
    gateway: dict[str, Any] | None = None,
    max_new_tokens: int = 8,
    **engine: Any,
) -> AsyncIterator[Chain]:
    async with contextlib.AsyncExitStack() as stack:
        engines = {
            f"r{i}": await stack.enter_async_context(
                Engine(policy, max_rows=16, kv_tokens=32_768, name=f"r{i}", **engine)
            )
            for i in range(2)
        }
        router = await stack.enter_async_context(Router(engines, limits=limits))
        server = await stack.enter_async_context(Gateway(**(gateway or {})))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        tokenizer = policy.loaded.tokenizer
        renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
        yield Chain(server, router, engines, renderer, http, max_new_tokens)


def test_turns_go_through_all_of_it_and_what_is_recorded_is_what_was_drawn(policy: Policy) -> None:
    async def main() -> None:
        async with chain(policy) as c:
            sessions = [await c.open(f"s{i}") for i in range(8)]
            assert set(c.router.stats().per_replica.values()) == {4}

            async def talk(session: Session) -> None:
                said: list[dict[str, Any]] = [user("one")]
                for _ in range(3):
                    status, reply = await c.post(session, *said)
                    assert status == 200
                    said += [reply["choices"][0]["message"], user("more")]
                assert not session.counts["rewrites"] and session.recorder.turns == 3

            await asyncio.gather(*(talk(session) for session in sessions))
            for session in sessions:
                assert await c.check_recorded(session) == 3 * 8
                await c.gateway.sessions.close(session)
            assert (await c.router.load()).prefix_hit_tokens > 0
            await c.check_nothing_is_left()

    play(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dies", ["closed", "crashed"])
def test_a_replica_that_dies_in_a_turn_costs_the_agent_nothing(
    policy: Policy, dies: str, stream: bool
) -> None:
    async def main() -> None:
        async with chain(policy, max_new_tokens=LONG) as c:
            session, other = await c.open("a"), await c.open("b")
            home = c.home(session)
            assert c.home(other) != home
            call = asyncio.ensure_future(_text(c, session, stream))
            await c.turn_begun(session)
            await _kill(c.engines[home], dies)
            assert await call
            assert c.home(session) == c.home(other)
            stats = c.router.stats()
            assert (stats.losses, stats.failovers, stats.retried_turns) == (1, 1, 1)
            assert session.recorder.turns == 1 and session.error is None
            assert len([n for n in session.recorder.nodes if n.source is Source.SAMPLED]) == 1
            assert await c.check_recorded(session) == LONG
            for each in (session, other):
                await c.gateway.sessions.close(each)
            await c.check_nothing_is_left()

    play(main())


def test_without_any_replica_the_agent_gets_a_503_and_the_trajectory_a_typed_error(
    policy: Policy,
) -> None:
    async def main() -> None:
        async with chain(policy, max_new_tokens=LONG) as c:
            session = await c.open("a")
            call = asyncio.ensure_future(c.post(session))
            await c.turn_begun(session)
            await asyncio.gather(*(_kill(e, "crashed") for e in c.engines.values()))
            status, reply = await call
            assert (status, reply["error"]["code"]) == (503, "no_replica")
            assert isinstance(session.error, NoReplica)
            status, reply = await c.post(session)
            assert status == 503, "and again, without hanging"
            await c.gateway.sessions.close(session)
            assert session.recorder.turns == 0
            assert not any(any(n.trained) for n in session.recorder.nodes)
            await c.check_nothing_is_left()

    play(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_turn_in_the_engine(policy: Policy, stream: bool) -> None:
    async def main() -> None:
        async with chain(policy, max_new_tokens=LONG) as c:
            session, other = await c.open("a"), await c.open("b")
            stays = asyncio.ensure_future(c.post(other))
            leaves = asyncio.ensure_future(c.post(session, stream=stream))
            await c.turn_begun(session)
            leaves.cancel()
            await until(lambda: session.in_flight == 0)
            await until(
                lambda: c.engines["r0"].stats().aborted + c.engines["r1"].stats().aborted == 1
            )
            assert (await stays)[0] == 200
            status, _ = await c.post(session, max_tokens=4)
            assert status == 200, "the session goes on"
            assert await c.check_recorded(session) == 4
            for each in (session, other):
                await c.gateway.sessions.close(each)
            await c.check_nothing_is_left()

    play(main())


def test_of_many_clients_that_leave_at_any_moment_nothing_stays(policy: Policy) -> None:
    async def main() -> None:
        async with chain(policy, max_new_tokens=60) as c:
            sessions = [await c.open(f"s{i}") for i in range(40)]

            async def fickle(i: int, session: Session) -> None:
                call = asyncio.ensure_future(c.post(session, stream=i % 2 == 0))
                await asyncio.wait({call}, timeout=0.02 * (i % 12))
                call.cancel()
                await asyncio.wait({call})

            await asyncio.gather(*(fickle(i, s) for i, s in enumerate(sessions)))
            await until(lambda: c.gateway.sessions.in_flight == 0)
            await until(lambda: c.running() == 0 and c.router.stats().turns == 0)
            for session in sessions:
                await c.check_recorded(session)
                await c.gateway.sessions.close(session)
            await until(lambda: c.router.stats().orphans == 0)
            await c.check_nothing_is_left()

    play(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_reader_that_stalls_is_cut_off_and_nothing_learns_from_its_answer(
    policy: Policy, stream: bool
) -> None:
    async def main() -> None:
        async with chain(policy, gateway={"send_limit_s": 0.3}, max_new_tokens=300) as c:
            session = await c.open("a")
            # Buffers so small that an answer with logprobs does not fit into them.
            assert c.gateway._runner is not None
            for site in c.gateway._runner.sites:
                for listening in site._server.sockets:  # type: ignore[attr-defined]
                    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            loop = asyncio.get_running_loop()
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", c.gateway._port))
                body = json.dumps({"messages": [user("x")], "logprobs": True, "stream": stream})
                head = (
                    f"POST /s/{session.key}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                    f"content-length: {len(body)}\r\n\r\n"
                )
                await loop.sock_sendall(sock, (head + body).encode())
                await until(lambda: session.recorder.turns == 1)
                await until(lambda: session._readers == 0)
            (node,) = (n for n in session.recorder.nodes if n.source is Source.SAMPLED)
            assert len(node.ids) == 300 and all(node.trained)
            await c.gateway.sessions.close(session)
            (node,) = (n for n in session.recorder.nodes if n.source is Source.SAMPLED)
            assert session.info()["undelivered"] == 1 and not any(node.trained)
            await c.check_nothing_is_left()

    play(main())


def test_releasing_twice_is_releasing_once_in_every_part(policy: Policy) -> None:
    async def main() -> None:
        async with chain(policy) as c:
            session = await c.open("a")
            assert (await c.post(session))[0] == 200
            home = c.home(session)
            for _ in range(2):
                await c.gateway.sessions.close(session)
                await c.router.release("a")
                await c.engines[home].release("a")
            assert c.router.stats().released == 1
            status, reply = await c.post(session)
            assert (status, reply["error"]["code"]) == (410, "session_closed")
            await c.check_nothing_is_left()
            # The name is free for another life.
            again = await c.open("a")
            assert (await c.post(again))[0] == 200
            await c.gateway.sessions.close(again)
            await c.check_nothing_is_left()

    play(main())


def test_a_release_in_the_middle_of_a_turn_ends_it_for_the_client(policy: Policy) -> None:
    async def main() -> None:
        async with chain(policy, max_new_tokens=LONG) as c:
            session = await c.open("a")
            call = asyncio.ensure_future(c.post(session))
            await c.turn_begun(session)
            await c.gateway.sessions.close(session, "the run is over")
            status, reply = await call
            assert (status, reply["error"]["message"]) == (410, "the run is over")
            await c.check_nothing_is_left()

    play(main())


def test_a_session_that_expires_in_one_part_is_told_or_goes_on(policy: Policy) -> None:
    """In the engine: nobody notices. In the router: 410 once, then on. In the gateway: 410."""

    async def main() -> None:
        limits = replace(QUICK, ttl_s=1e6)
        async with chain(policy, limits=limits, session_ttl_s=0.2) as c:
            session = await c.open("a")
            _, reply = await c.post(session)
            said = [user("hello"), reply["choices"][0]["message"], user("more")]
            await until(
                lambda: c.engines["r0"].stats().expired + c.engines["r1"].stats().expired == 1
            )
            status, reply = await c.post(session, *said)
            assert status == 200 and not session.counts["rewrites"]
            c.router._limits = replace(QUICK, ttl_s=0.05)
            await until(lambda: c.router.stats().expired == 1)
            c.router._limits = limits
            said += [reply["choices"][0]["message"], user("and")]
            status, reply = await c.post(session, *said)
            assert (status, reply["error"]["code"]) == (410, "session_expired")
            status, reply = await c.post(session, *said)
            assert status == 200 and await c.check_recorded(session) == 3 * 8
            c.gateway.sessions.ttl_s = 0.05
            await until(lambda: asyncio.get_running_loop().time() > session.last_used + 0.06)
            assert await c.gateway.sessions.sweep() == 1
            status, reply = await c.post(session, *said)
            assert (status, reply["error"]["code"]) == (410, "session_closed")
            await c.check_nothing_is_left()

    play(main())


def test_a_resend_is_replayed_and_the_engine_draws_nothing_for_it(policy: Policy) -> None:
    async def main() -> None:
        async with chain(policy, max_new_tokens=40) as c:
            session = await c.open("a")
            key = {"idempotency-key": "k"}
            first, second = await asyncio.gather(
                c.post(session, headers=key), c.post(session, headers=key)
            )
            third = await c.post(session, headers=key)
            assert first == second == third and first[0] == 200
            decoded = sum(e.stats().decoded_tokens for e in c.engines.values())
            assert decoded == 40 and session.recorder.turns == 1
            assert session.counts["replays"] == 2
            # A client that lost its answer and counts its retries gets the turn it is owed.
            call = asyncio.ensure_future(c.post(session, user("again"), stream=True))
            await c.turn_begun(session)
            call.cancel()
            await until(lambda: session.in_flight == 0)
            status, _ = await c.post(
                session, user("again"), headers={"x-stainless-retry-count": "1"}
            )
            assert status == 200 and session.recorder.turns == 2
            different = await c.post(session), await c.post(session)
            assert different[0] != different[1], "equal requests are independent samples"
            assert await c.check_recorded(session) == 4 * 40
            await c.gateway.sessions.close(session)
            await c.check_nothing_is_left()

    play(main())


def test_weights_published_in_the_middle_of_a_turn_are_recorded_per_token(policy: Policy) -> None:
    async def main() -> None:
        async with chain(policy, max_new_tokens=LONG) as c:
            sessions = [await c.open(f"s{i}") for i in range(2)]
            calls = [asyncio.ensure_future(c.post(session)) for session in sessions]
            await asyncio.gather(*(c.turn_begun(session) for session in sessions))
            await asyncio.to_thread(c.router.publish, 1)
            assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]
            for session in sessions:
                (node,) = (n for n in session.recorder.nodes if n.source is Source.SAMPLED)
                assert set(node.versions) == {0, 1} and sorted(node.versions) == [*node.versions]
                await c.gateway.sessions.close(session)
            await c.check_nothing_is_left()

    play(main())


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_sessions_opened_and_abandoned_leave_no_count_and_no_memory(
    policy: Policy, count: int
) -> None:
    """Some ask and go on, some ask and leave in the middle, most never ask; nobody releases."""

    async def main() -> None:
        async with chain(policy, gateway={"ttl_s": 0.5}, max_new_tokens=4) as c:
            sessions = c.gateway.sessions

            async def abandon(name: str, i: int) -> None:
                session = await c.open(name)
                if i % 8 == 0:
                    await c.post(session)
                elif i % 8 == 1:
                    call = asyncio.ensure_future(c.post(session))
                    await asyncio.wait({call}, timeout=0.001 * (i % 5))
                    call.cancel()
                    await asyncio.wait({call})

            async def wave(round_: int, size: int) -> int:
                before = sessions.expired
                for start in range(0, size, 50):
                    each = range(start, start + 50)
                    await asyncio.gather(*(abandon(f"{round_}/{i}", i) for i in each))
                await until(lambda: sessions.expired == before + size)
                await until(lambda: c.router.stats().orphans == 0)
                await c.check_nothing_is_left()
                gc.collect()
                return tracemalloc.get_traced_memory()[0]

            tracemalloc.start()
            try:
                first = await wave(0, 100)
                second = await wave(1, count)
            finally:
                tracemalloc.stop()
            per_session = (second - first) / count
            # The gateway keeps the key of a closed session and why it ended, up to a bound.
            assert per_session < 1000, f"{per_session:.0f} bytes are left per session"

    play(main())


# ----------------------------------------------------------------------- breaking things


async def _kill(engine: Engine, how: str) -> None:
    if how == "closed":
        await asyncio.to_thread(engine.close)
        return

    def crash() -> None:
        raise RuntimeError("device lost")

    engine._stepper.step = crash  # type: ignore[method-assign]
    await until(lambda: engine._dead is not None)


async def _text(c: Chain, session: Session, stream: bool) -> str:
    """What the agent reads, of an answer that must be whole."""
    if not stream:
        status, reply = await c.post(session)
        assert status == 200, reply
        return reply["choices"][0]["message"]["content"]
    body = {"messages": [user("hello")], "stream": True}
    url = f"{c.gateway.base_url(session)}/chat/completions"
    async with c.http.post(url, json=body) as reply:
        assert reply.status == 200
        raw = (await reply.read()).decode()
    assert raw.endswith("data: [DONE]\n\n")
    frames = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    return "".join(f["choices"][0]["delta"].get("content", "") for f in frames)
