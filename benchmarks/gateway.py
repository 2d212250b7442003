"""What the gateway costs: CPU per turn beyond the same turn in a chat, and memory per session.

    python -m benchmarks.gateway [--json] [--sessions 10000] [--turns 3]

10,000 sessions are opened at once and each asks a few turns over HTTP, from a process of its own
over 64 connections that are kept alive. The sampler answers at once, so what is measured is ours:
HTTP, JSON, attribution, matching of the history, recording. The same turns are then run by `Chat`
in this process; the difference in CPU time of this process is the overhead. Memory is the growth
of the resident set over all open sessions, divided by their number.

Figures:
- gateway.overhead_us: CPU of a turn over HTTP minus CPU of the same turn by Chat; microseconds
- gateway.session_bytes: resident memory of an open session with its turns recorded
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
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common import finish, median, say

CONNECTIONS = 64
QUESTION = "What is the weight of the second parcel, and to which shelf does it go?"
REPLY = "The second parcel weighs 4 kg and goes to shelf B."


class Instant:
    """A sampler whose every reply is the same and takes no time."""

    version = 0

    def __init__(self, ids: Sequence[int]) -> None:
        from treadle.types import Completion, SamplerCapabilities, StopReason

        self.open_sessions = 0
        self._ids = tuple(ids)
        self._reply: dict[str, Any] = {
            "ids": self._ids,
            "logprobs": (-0.5,) * len(ids),
            "versions": (0,) * len(ids),
            "stop_reason": StopReason.EOS,
        }
        self._make = Completion
        self.capabilities = SamplerCapabilities(
            release=True, score=False, shared_prefix=False, entropies=False
        )

    async def open(self, session: str, *, group: str = "") -> None:
        self.open_sessions += 1

    async def sample(self, session: str, prompt: Sequence[int], params: Any) -> Any:
        return self._make(**self._reply, prompt_tokens=len(prompt))

    async def score(self, ids: Sequence[int], start: int, *, temperature: float = 1.0) -> Any:
        raise NotImplementedError

    async def release(self, session: str) -> None:
        self.open_sessions -= 1


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


async def over_http(sessions: int, turns: int, connections: int) -> dict[str, Any]:
    """CPU of this process, memory, and what the client saw."""
    import psutil

    from treadle.gateway.server import Gateway

    renderer, sampler = parts()
    process = psutil.Process()
    async with Gateway() as gateway:
        gc.collect()
        rss = process.memory_info().rss
        opened = []
        for i in range(sessions):
            recorder = recorder_of(sampler, renderer, f"s{i}", turns)
            await sampler.open(f"s{i}")
            opened.append(gateway.sessions.open(recorder))
        urls = "\n".join(gateway.base_url(s) for s in opened)
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.gateway", "--client", str(turns), str(connections),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        cpu = time.process_time()
        out, _ = await client.communicate(urls.encode())
        cpu = time.process_time() - cpu
        assert client.returncode == 0, "the client failed"
        seen = json.loads(out)
        gc.collect()
        grown = process.memory_info().rss - rss
        assert all(s.recorder.turns == turns for s in opened)
        assert not any(s.counts["rewrites"] for s in opened)
        num_nodes = sum(len(s.recorder.nodes) for s in opened)
        health = len(gateway.sessions)
    assert health == sessions and sampler.open_sessions == 0, "every session was released"
    return seen | {
        "cpu_us_per_turn": 1e6 * cpu / seen["turns"],
        "bytes_per_session": grown / sessions,
        "nodes_per_session": num_nodes / sessions,
    }


async def by_chat(sessions: int, turns: int) -> float:
    """CPU in microseconds of the same turn without a gateway."""
    from treadle.harness import Chat, Limits
    from treadle.types import Message, SamplingParams

    renderer, sampler = parts()
    cpu = time.process_time()
    for i in range(sessions):
        await sampler.open(f"s{i}")
        chat = Chat(
            sampler,
            renderer,
            session=f"s{i}",
            sampling=lambda turn: SamplingParams(max_new_tokens=200, seed=turn),
            limits=Limits(max_turns=turns, max_context=1 << 20),
        )
        for turn in range(turns):
            await chat.turn([Message(role="user", content=f"{QUESTION} ({turn})")])
        await sampler.release(f"s{i}")
    return 1e6 * (time.process_time() - cpu) / (sessions * turns)


def parts() -> tuple[Any, Instant]:
    from treadle.models.tiny import build_tokenizer
    from treadle.render import Renderer

    tokenizer = build_tokenizer()
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    ids = [*renderer.template.encode(REPLY), tokenizer.eos_token_id]
    return renderer, Instant(ids)


def recorder_of(sampler: Any, renderer: Any, name: str, turns: int) -> Any:
    from treadle.gateway.recorder import Limits, Recorder
    from treadle.types import SamplingParams

    return Recorder(
        sampler,
        renderer,
        session=name,
        sampling=lambda turn: SamplingParams(max_new_tokens=200, seed=turn),
        limits=Limits(max_turns=turns, max_context=1 << 20),
    )


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
    say(f"{args.sessions} sessions of {args.turns} turns over HTTP")
    busy = asyncio.run(over_http(args.sessions, args.turns, CONNECTIONS))
    say("the same turns by Chat")
    chat_us = asyncio.run(by_chat(args.sessions, args.turns))
    say("one client alone")
    alone = asyncio.run(over_http(min(args.sessions, 300), args.turns, 1))
    figures = {
        "gateway.overhead_us": busy["cpu_us_per_turn"] - chat_us,
        "gateway.session_bytes": busy["bytes_per_session"],
        "gateway.latency_us": alone["latency_us"],
        "gateway.turns_per_s": busy["turns"] / busy["wall_s"],
    }
    from importlib.metadata import version

    detail = {
        "sessions": args.sessions,
        "turns": args.turns,
        "connections": CONNECTIONS,
        "over_http": busy,
        "chat_cpu_us_per_turn": chat_us,
        "alone": {k: v for k, v in alone.items() if k != "bytes_per_session"},
    }
    finish("gateway", figures, detail, {"aiohttp": version("aiohttp")})


if __name__ == "__main__":
    main()
