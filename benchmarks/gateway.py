"""What 10,000 sessions cost through gateway and router: CPU per turn, and memory.

    python -m benchmarks.gateway [--json] [--sessions 10000] [--turns 3]

    client process --HTTP, 64 connections--> gateway -> router -> 16 simulated replicas

All sessions are open at once and each asks a few turns. The replicas keep sessions and KV as they
always do, and their time costs nothing (every duration of their cost model is 0), so what is
measured is ours: HTTP, JSON, attribution, matching of the history, recording; placing, bounding
and clocking of turns. The same turns are then run by `Chat` in this process, on the replicas
themselves; the difference in CPU time of this process is the overhead. The router's part of it is
measured apart, without anything else around: sessions opened, sampled and released through it and
on the replicas, in turn. Memory is the growth of the resident set over all open sessions, divided
by their number. At the end every count, of gateway, router and replicas, has to be 0 again, or
there is no figure.

Figures:
- gateway.overhead_us: CPU of a turn over HTTP through gateway and router, minus CPU of the same
  turn by Chat on a replica; microseconds
- gateway.router_us: the router's part, its share of open and release included
- gateway.gateway_us: the rest
- gateway.session_bytes: resident memory of an open session with its turns recorded, in gateway,
  router and replica together
- gateway.latency_us: median time of one turn as a client sees it that asks alone
- gateway.turns_per_s: with all connections busy
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.common import finish, median, say

if TYPE_CHECKING:
    from treadle.render import Renderer
    from treadle.sampler.router import Router
    from treadle.sampler.simulated import SimulatedEngine
    from treadle.types import Sampler

CONNECTIONS = 64
REPLICAS = 16
QUESTION = "What is the weight of the second parcel, and to which shelf does it go?"
REPLY = "The second parcel weighs 4 kg and goes to shelf B."


# --------------------------------------------------------------------------- the client's process


async def drive(urls: Sequence[str], turns: int, connections: int) -> dict[str, Any]:
    """Ask every session its turns; the client's own numbers."""
    waiting = list(reversed(urls))
    latencies: list[float] = []

    async def work() -> None:
        where = urlsplit(urls[0])
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        while waiting:
            path = urlsplit(waiting.pop()).path
            messages = []
            for turn in range(turns):
                messages.append({"role": "user", "content": f"{QUESTION} ({turn})"})
                started = time.perf_counter()
                reply = await ask(reader, writer, path, messages)
                latencies.append(time.perf_counter() - started)
                messages.append({"role": "assistant", "content": reply})
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(connections)))
    wall = time.perf_counter() - started
    return {"wall_s": wall, "latency_us": 1e6 * median(latencies), "turns": len(latencies)}


async def ask(reader: Any, writer: Any, path: str, messages: list[dict[str, str]]) -> str:
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    head = f"POST {path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200"), answer
    lower = answer.lower()
    size = int(lower[lower.index(b"content-length:") + 15 :].split(b"\r\n")[0])
    text = json.loads(await reader.readexactly(size))["choices"][0]["message"]["content"]
    assert text == REPLY, text
    return text


# --------------------------------------------------------------------------- the server's process


@dataclass(frozen=True)
class Chain:
    """What turns go through."""

    renderer: Renderer
    replicas: dict[str, SimulatedEngine]
    router: Router

    async def check_empty(self) -> None:
        """Every count is 0, or the benchmark has no figure."""
        stats = self.router.stats()
        counts = (stats.sessions, stats.placed, stats.waiting, stats.turns, stats.orphans)
        assert counts == (0,) * 5, f"the router has sessions left: {counts}"
        assert not any(stats.per_replica.values()), stats.per_replica
        for engine in self.replicas.values():
            load = await engine.load()
            left = (load.sessions, load.running, load.waiting, engine.kv_used)
            assert left == (0,) * 4, f"{engine.name} has something left: {left}"


def chain(replicas: int = REPLICAS) -> Chain:
    """A router over replicas that all say REPLY, in no time."""
    from treadle.models.tiny import build_tokenizer
    from treadle.render import Renderer
    from treadle.sampler.router import Router
    from treadle.sampler.simulated import CostModel, SimulatedEngine

    tokenizer = build_tokenizer()
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    ids = (*renderer.template.encode(REPLY), tokenizer.eos_token_id)
    free = CostModel(
        step_s=0.0, row_s=0.0, context_s=0.0, prefill_s=0.0, prefill_context_s=0.0, kv_tokens=10**9
    )

    class Saying(SimulatedEngine):
        def _completion(self, turn: Any, stop: Any) -> Any:
            completion = super()._completion(turn, stop)
            return replace(completion, ids=ids[: len(completion.ids)])

    engines: dict[str, SimulatedEngine] = {
        f"r{i}": Saying(free, name=f"r{i}", max_rows=2048, reply_tokens=lambda params: len(ids))
        for i in range(replicas)
    }
    return Chain(renderer, engines, Router(engines))


async def over_http(sessions: int, turns: int, connections: int) -> dict[str, Any]:
    """CPU of this process, memory, and what the client saw."""
    import psutil

    from treadle.gateway.recorder import Limits, Recorder
    from treadle.gateway.server import Gateway
    from treadle.types import SamplingParams

    parts, process = chain(), psutil.Process()
    async with parts.router as router, Gateway() as gateway:
        gc.collect()
        rss = process.memory_info().rss
        opened = []
        for i in range(sessions):
            await router.open(f"s{i}")
            recorder = Recorder(
                router,
                parts.renderer,
                session=f"s{i}",
                sampling=lambda turn: SamplingParams(max_new_tokens=200, seed=turn),
                limits=Limits(max_turns=turns, max_context=1 << 14),
            )
            opened.append(gateway.sessions.open(recorder))
        spread = sorted(router.stats().per_replica.values())
        assert sum(spread) == sessions and spread[-1] - spread[0] <= 1, spread
        urls = "\n".join(gateway.base_url(s) for s in opened)
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.gateway", "--client", str(turns), str(connections),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent,
        )  # fmt: skip
        cpu = time.process_time()
        out, _ = await client.communicate(urls.encode())
        cpu = time.process_time() - cpu
        assert client.returncode == 0, "the client failed"
        seen = json.loads(out)
        gc.collect()
        grown = process.memory_info().rss - rss
        assert all(s.recorder.turns == turns for s in opened)
        assert not any(s.counts["rewrites"] or s.counts["conversations"] != 1 for s in opened)
        assert (router.stats().completed, router.stats().retried_turns) == (sessions * turns, 0)
        num_nodes = sum(len(s.recorder.nodes) for s in opened)
        assert len(gateway.sessions) == sessions
        ending = time.process_time()
        for session in opened:
            await gateway.sessions.close(session)
        ending = time.process_time() - ending
        assert (len(gateway.sessions), gateway.sessions.in_flight) == (0, 0)
        await parts.check_empty()
    return seen | {
        "cpu_us_per_turn": 1e6 * cpu / seen["turns"],
        "close_us_per_session": 1e6 * ending / sessions,
        "bytes_per_session": grown / sessions,
        "nodes_per_session": num_nodes / sessions,
    }


async def by_chat(sessions: int, turns: int) -> float:
    """CPU in microseconds of the same turn without gateway and router."""
    from treadle.harness import Chat, Limits
    from treadle.types import Message, SamplingParams

    parts = chain()
    replicas = list(parts.replicas.values())
    cpu = time.process_time()
    for i in range(sessions):
        sampler = replicas[i % len(replicas)]
        await sampler.open(f"s{i}")
        chat = Chat(
            sampler,
            parts.renderer,
            session=f"s{i}",
            sampling=lambda turn: SamplingParams(max_new_tokens=200, seed=turn),
            limits=Limits(max_turns=turns, max_context=1 << 14),
        )
        for turn in range(turns):
            await chat.turn([Message(role="user", content=f"{QUESTION} ({turn})")])
        await sampler.release(f"s{i}")
    cpu = time.process_time() - cpu
    return 1e6 * cpu / (sessions * turns)


async def bare(sessions: int, turns: int, *, routed: bool) -> float:
    """CPU in microseconds of a turn alone, through the router or on the replicas."""
    from treadle.types import SamplingParams

    parts = chain()
    replicas: list[Sampler] = list(parts.replicas.values())
    prompt, params = tuple(range(200)), SamplingParams(max_new_tokens=200)
    async with parts.router as router:
        cpu = time.process_time()
        for i in range(sessions):
            sampler = router if routed else replicas[i % len(replicas)]
            await sampler.open(f"s{i}")
            for _ in range(turns):
                await sampler.sample(f"s{i}", prompt, params)
            await sampler.release(f"s{i}")
        cpu = time.process_time() - cpu
        await parts.check_empty()
    return 1e6 * cpu / (sessions * turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="nothing but the document on stdout")
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--client", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        urls = sys.stdin.read().split()
        print(json.dumps(asyncio.run(drive(urls, args.client[0], args.client[1]))))
        return
    asyncio.run(by_chat(200, args.turns))  # caches are warm for both
    say(f"{args.sessions} sessions of {args.turns} turns over HTTP, {REPLICAS} replicas")
    busy = asyncio.run(over_http(args.sessions, args.turns, CONNECTIONS))
    say("the same turns by Chat, and turns alone with and without the router")
    chat_us = asyncio.run(by_chat(args.sessions, args.turns))
    rounds = [
        [asyncio.run(bare(1000, args.turns, routed=routed)) for routed in (False, True)]
        for _ in range(9)
    ]
    router_us = median([routed - alone for alone, routed in rounds])
    say("one client alone")
    alone = asyncio.run(over_http(min(args.sessions, 300), args.turns, 1))
    overhead_us = busy["cpu_us_per_turn"] - chat_us
    figures = {
        "gateway.overhead_us": overhead_us,
        "gateway.router_us": router_us,
        "gateway.gateway_us": overhead_us - router_us,
        "gateway.session_bytes": busy["bytes_per_session"],
        "gateway.latency_us": alone["latency_us"],
        "gateway.turns_per_s": busy["turns"] / busy["wall_s"],
    }
    from importlib.metadata import version

    detail = {
        "sessions": args.sessions,
        "turns": args.turns,
        "connections": CONNECTIONS,
        "replicas": REPLICAS,
        "over_http": busy,
        "chat_cpu_us_per_turn": chat_us,
        "bare_cpu_us_per_turn": {"replica, router": rounds},
        "alone": {k: v for k, v in alone.items() if k != "bytes_per_session"},
    }
    finish("gateway", figures, detail, {"aiohttp": version("aiohttp")})


if __name__ == "__main__":
    main()
